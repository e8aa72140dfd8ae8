"""The stock training runs whose memory is measured: plain data, each run describes itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

BERT = {"vocab_size": 21128, "max_position_embeddings": 512}
LARGE = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096,
}  # fmt: skip
ROBERTA = {
    "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1,
    "layer_norm_eps": 1e-5, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
DEBERTA_V3 = {
    "vocab_size": 128100, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "relative_attention": True, "position_buckets": 256,
    "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": ["p2c", "c2p"],
    "max_relative_positions": -1, "position_biased_input": False, "type_vocab_size": 0,
    "layer_norm_eps": 1e-7, "pad_token_id": 0,
}  # fmt: skip

# Name -> (model type, what its published config.json says where that differs from the default).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base": ("bert", BERT),
    "bert-large": ("bert", {**BERT, **LARGE}),
    "roberta-base": ("roberta", ROBERTA),
    "xlmr-base": ("xlm-roberta", {**ROBERTA, "vocab_size": 250002}),
    "xlmr-large": ("xlm-roberta", {**ROBERTA, **LARGE, "vocab_size": 250002}),
    "distilbert": ("distilbert", {"vocab_size": 30522}),
    "electra-base": ("electra", {
        "embedding_size": 768, "hidden_size": 768, "num_attention_heads": 12,
        "intermediate_size": 3072, "vocab_size": 30522,
    }),
    "albert-base-v2": ("albert", {
        "embedding_size": 128, "hidden_size": 768, "num_attention_heads": 12,
        "intermediate_size": 3072, "vocab_size": 30000, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
    }),
    "deberta-v3-base": ("deberta-v2", DEBERTA_V3),
    # The published xlarge has 24 layers; six show the same per-layer memory.
    "deberta-v2-xlarge-6": ("deberta-v2", {
        **DEBERTA_V3, "hidden_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 24,
        "intermediate_size": 6144, "attention_head_size": 64, "conv_kernel_size": 3,
        "conv_act": "gelu",
    }),
    "ernie-base": ("ernie", {
        "vocab_size": 40000, "max_position_embeddings": 2048, "type_vocab_size": 4,
        "task_type_vocab_size": 3, "use_task_id": True,
    }),
    "modernbert-base": ("modernbert", {"vocab_size": 50368, "pad_token_id": 50283}),
    "mpnet-base": ("mpnet", {"vocab_size": 30527}),
    "qwen2-0.5b": ("qwen2", {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "tie_word_embeddings": True, "pad_token_id": 151643,
    }),
    "qwen3-0.6b": ("qwen3", {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": True, "pad_token_id": 151643,
    }),
    "gpt2": ("gpt2", {"pad_token_id": 50256}),
    # Seen by nobody while the prediction was written.
    "bert-medium": ("bert", {
        **BERT, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
        "intermediate_size": 2048,
    }),
    "rbt3": ("bert", {**BERT, "num_hidden_layers": 3}),
    "roberta-large": ("roberta", {**ROBERTA, **LARGE}),
    "electra-small": ("electra", {"vocab_size": 30522}),
    "deberta-base": ("deberta", {
        "vocab_size": 50265, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
        "max_relative_positions": -1, "position_biased_input": False, "type_vocab_size": 0,
    }),
    "camembert-base": ("camembert", {**ROBERTA, "vocab_size": 32005}),
    "llama-160m": ("llama", {
        "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072,
        "num_hidden_layers": 12, "num_attention_heads": 12, "pad_token_id": 0,
    }),
    "opt-125m": ("opt", {"pad_token_id": 1}),
    "convbert-base": ("convbert", {}),
    "mobilebert": ("mobilebert", {}),
    "modernbert-large": ("modernbert", {
        "vocab_size": 50368, "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "intermediate_size": 2624, "pad_token_id": 50283,
    }),
}  # fmt: skip

# These families' tokenizers hand the model a segment id a token.
SEGMENT_IDS = {"bert", "ernie", "albert", "electra", "deberta-v2"}
TINY = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "embedding_size": 48, "attention_head_size": 12, "head_dim": 12,
    "vocab_size": 211, "pad_token_id": 0, "dim": 48, "hidden_dim": 64, "n_layers": 2, "n_heads": 4,
    "n_embd": 48, "n_layer": 2, "n_head": 4, "max_position_embeddings": 520,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One stock run: a few steps of `batch` x `accumulation` rows."""

    model: str
    batch: int = 32
    length: int = 128
    accumulation: int = 1
    padding: str = "longest"
    """`none`: every row is full; `longest`: rows of mixed length; `max_length`: all padded."""
    optim: str = "adamw_torch_fused"
    bf16: bool = False
    fp16: bool = False
    tf32: bool = False
    dtype: str = "float32"
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    attn_implementation: str | None = None
    freeze: str | None = None
    """`encoder`, `embeddings`, or N: the embeddings and the first N layers."""
    lora: dict[str, Any] | None = None
    expandable_segments: bool = False
    phases: bool = False
    """Also evaluate, save a checkpoint and resume from it."""
    history: bool = False
    """Also write down every allocation and free."""
    requires: str = ""
    """A package this run needs; the run is left out where it is missing."""
    training: dict[str, Any] = field(default_factory=dict)
    """Further `TrainingArguments`."""

    @property
    def id(self) -> str:
        """All that sets the run apart, in one readable word."""
        shape = (f"{self.batch}x{self.accumulation}", f"len{self.length}")
        return "/".join((self.model, *shape, *_flags(self)))

    @property
    def steps(self) -> int:
        """The loss scaler of fp16 may skip the first steps: then there is no optimizer state."""
        return 6 if self.fp16 else 3

    def config(self, *, tiny: bool = False) -> tuple[str, dict[str, Any]]:
        """The model type and its config; `tiny` keeps the names and shrinks every size."""
        family, config = MODELS[self.model]
        if tiny:
            small = {k: v for k, v in TINY.items() if k in config or _known(family, k)}
            config = {**config, **small}
        return family, config

    def row_lengths(self) -> list[int]:
        """The tokens of each row, in the order they are trained; drawn like short reviews.

        One step more than a run trains, for the run that resumes.
        """
        count = (self.steps + 1) * self.batch * self.accumulation
        if self.padding == "none":
            return [self.length] * count
        draw = random.Random(self.length * 1009 + self.batch)
        longest = self.length if self.padding == "longest" else self.length * 3 // 4
        drawn = (draw.lognormvariate(0, 0.8) * longest / 2 for _ in range(count))
        lengths = [max(4, min(longest, round(tokens))) for tokens in drawn]
        # The highest step is one whose optimizer state exists: the longest row is in the last.
        lengths[(self.steps - 1) * self.batch * self.accumulation] = longest
        return lengths

    def describe(self) -> dict[str, Any]:
        """The case as JSON, complete enough to be run again or predicted."""
        family, config = MODELS[self.model]
        return {
            "id": self.id, "model_type": family, "config": config, "num_labels": 2,
            "token_type_ids": family in SEGMENT_IDS, **asdict(self),
        }  # fmt: skip


def _known(family: str, key: str) -> bool:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family)
    return hasattr(config, key) and key not in config.attribute_map


def _flags(case: Case) -> Iterator[str]:
    yield {"none": "full", "longest": "mixed", "max_length": "padded"}[case.padding]
    yield case.optim
    names = ("bf16", "fp16", "tf32", "gradient_checkpointing", "torch_compile")
    yield from (name for name in (*names, "expandable_segments", "phases") if getattr(case, name))
    if case.dtype != "float32":
        yield f"pure-{case.dtype}"
    if case.attn_implementation:
        yield case.attn_implementation
    if case.freeze:
        yield f"freeze-{case.freeze}"
    if case.lora:
        yield f"lora-{case.lora['r']}-{case.lora['lora_dropout']}"
    yield from (f"{key}-{value}" for key, value in case.training.items())


def _lora(*targets: str, dropout: float = 0.0) -> dict[str, Any]:
    return {"r": 8, "lora_alpha": 16, "lora_dropout": dropout, "target_modules": list(targets)}


def _recipe(padding: str) -> list[Case]:
    """The rungs people copy and what an expert gets, both on BERT-Large."""
    one: dict[str, Any] = {"batch": 1, "accumulation": 32, "padding": padding}
    checkpointed = {**one, "gradient_checkpointing": True}
    frozen = {**checkpointed, "optim": "adafactor", "freeze": "encoder"}
    half = {"padding": padding, "bf16": True, "gradient_checkpointing": True}
    large = "bert-large"
    return [
        Case(model=large, padding=padding),
        Case(model=large, padding=padding, bf16=True),
        Case(model=large, **one),
        Case(model=large, **checkpointed),
        Case(model=large, **checkpointed, optim="adafactor"),
        Case(model=large, **frozen),
        Case(model=large, **frozen, length=32),
        Case(model=large, **half),
        Case(model=large, **half, optim="adafactor"),
    ]


CASES: list[Case] = [
    *_recipe("none"),
    Case(model="bert-base", history=True),
    Case(model="bert-base", batch=8, padding="none"),
    Case(model="bert-base", batch=16, length=512, bf16=True),
    Case(model="bert-base", length=32, bf16=True),
    Case(model="bert-base", fp16=True),
    Case(model="bert-base", dtype="bfloat16"),
    Case(model="bert-base", optim="adamw_torch"),
    Case(model="bert-base", optim="sgd"),
    Case(model="bert-base", optim="adafactor", bf16=True),
    Case(model="bert-base", padding="max_length"),
    Case(model="bert-base", batch=8, accumulation=4, bf16=True),
    Case(model="bert-base", attn_implementation="eager"),
    Case(model="bert-base", attn_implementation="eager", bf16=True, padding="none"),
    Case(model="bert-base", freeze="embeddings"),
    Case(model="bert-base", freeze="6", bf16=True),
    Case(model="bert-base", lora=_lora("query", "value"), requires="peft"),
    Case(model="bert-base", lora=_lora("query", "value", dropout=0.1), bf16=True, requires="peft"),
    Case(model="bert-base", batch=64, length=64, gradient_checkpointing=True),
    Case(model="roberta-base", bf16=True),
    Case(model="roberta-base", length=256, batch=16, gradient_checkpointing=True, optim="sgd"),
    Case(model="xlmr-base"),
    Case(model="xlmr-base", optim="adafactor", bf16=True, history=True),
    Case(model="xlmr-base", freeze="embeddings", bf16=True, length=64),
    Case(model="xlmr-large", batch=8, gradient_checkpointing=True, bf16=True),
    Case(model="distilbert", length=512, batch=8),
    Case(model="distilbert", fp16=True, optim="adamw_torch", length=64),
    Case(model="electra-base", bf16=True, batch=16, length=256),
    Case(model="electra-base", dtype="bfloat16", optim="adafactor"),
    Case(model="albert-base-v2", padding="none"),
    Case(model="albert-base-v2", bf16=True, length=256, batch=16),
    Case(model="deberta-v3-base", batch=16),
    Case(model="deberta-v3-base", bf16=True, gradient_checkpointing=True),
    Case(model="deberta-v2-xlarge-6", batch=8, bf16=True),
    Case(model="ernie-base", length=64),
    Case(model="ernie-base", fp16=True, gradient_checkpointing=True),
    Case(model="modernbert-base", bf16=True, history=True),
    Case(model="modernbert-base", length=512, batch=8),
    Case(model="modernbert-base", attn_implementation="eager", bf16=True, batch=16, length=256),
    Case(model="mpnet-base"),
    Case(model="mpnet-base", bf16=True, optim="adamw_torch", length=64),
    Case(model="qwen2-0.5b", batch=8, bf16=True),
    Case(model="qwen2-0.5b", batch=8, dtype="bfloat16", gradient_checkpointing=True),
    Case(model="qwen3-0.6b", batch=4, length=256, bf16=True, history=True),
    Case(model="qwen3-0.6b", batch=8, bf16=True, lora=_lora("q_proj", "v_proj", dropout=0.1),
         requires="peft"),
    Case(model="gpt2", batch=16, bf16=True),
    Case(model="bert-base", bf16=True, expandable_segments=True, history=True),
    Case(model="xlmr-base", optim="adafactor", bf16=True, expandable_segments=True),
    Case(model="bert-base", batch=16, phases=True),
    Case(model="bert-base", batch=16, phases=True, bf16=True, optim="adafactor"),
    Case(model="bert-large", batch=4, phases=True),
    *_recipe("longest"),
    Case(model="bert-large", padding="none", tf32=True),
    Case(model="bert-large", bf16=True, gradient_checkpointing=True, padding="none",
         optim="adamw_torch_8bit", requires="torchao"),
    Case(model="bert-base", optim="adamw_torch_8bit", requires="torchao"),
    Case(model="bert-base", dtype="bfloat16", optim="flash_adamw", requires="flashoptim"),
    # Last, since compiling takes longer than all the rest of a run.
    Case(model="bert-large", padding="none", bf16=True, torch_compile=True),
]  # fmt: skip

# Measured after the prediction was finished, to see what it is worth on what it never saw.
HELD_OUT: list[Case] = [
    Case(model="bert-medium", batch=5, length=300),
    Case(model="rbt3", batch=64, bf16=True),
    Case(model="rbt3", batch=100, length=40, optim="adamw_torch"),
    Case(model="roberta-large", batch=8, length=512, bf16=True, gradient_checkpointing=True),
    Case(model="electra-small", batch=64, length=96, fp16=True),
    Case(model="deberta-base", batch=8),
    Case(model="camembert-base", batch=12, length=200, optim="adafactor"),
    Case(model="llama-160m", batch=8, bf16=True),
    Case(model="opt-125m", batch=8, bf16=True),
    Case(model="convbert-base", batch=8),
    Case(model="mobilebert", batch=16, length=128),
    Case(model="modernbert-large", batch=8, bf16=True),
    Case(model="xlmr-base", batch=16, length=384, bf16=True,
         lora=_lora("query", "value", dropout=0.1), requires="peft"),
    Case(model="bert-large", batch=6, length=256, bf16=True, freeze="12"),
    Case(model="gpt2", batch=4, length=512),
]  # fmt: skip
