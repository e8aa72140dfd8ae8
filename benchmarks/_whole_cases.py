"""The whole runs that are measured: model, budget, task and flags of each, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from _memory_cases import DEBERTA_V3, LARGE, MODELS, SEGMENT_IDS, TINY

ELECTRA_LARGE = {**LARGE, "embedding_size": 1024, "vocab_size": 30522}
ALBERT = {
    "embedding_size": 128, "vocab_size": 30000, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
# Name -> (model type, its config); every tokenizer here pads with token 0.
MADE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **MODELS,
    "electra-large": ("electra", ELECTRA_LARGE),
    "albert-xlarge-v2": ("albert", {
        **ALBERT, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
        "intermediate_size": 8192,
    }),
    "deberta-v3-large": ("deberta-v2", {**DEBERTA_V3, **LARGE}),
    "ernie-large": ("ernie", {**MODELS["ernie-base"][1], **LARGE, "vocab_size": 30522}),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One `memfit train` as a user types it."""

    name: str
    model: str
    budget: str
    length: int = 128
    task: str = "single"
    """Which table: `single`, `multi`, `regression`, `pairs`, or `full`: `single` with all rows."""
    epochs: int = 1
    flags: tuple[str, ...] = ()
    kill_at: float | None = None
    """Kill -9 after this share of the steps, once a checkpoint exists; then `--resume`."""
    predict: bool = False
    """Also ask the result with `memfit predict`."""
    card: str = ""
    """The smaller card that this machine's card acts as; empty: none."""
    ranks: int = 1
    """Processes that train together, all of them on this machine's one card."""

    def command(self, table: str, model: str, folder: str) -> list[str]:
        """What follows `memfit`."""
        words = ["train", table, "--model", model, "--budget", self.budget, "--output-dir", folder]
        words += ["--max-length", str(self.length), "--epochs", str(self.epochs)]
        words += ["--gpus", str(self.ranks)] if self.ranks > 1 else []
        return [*words, *TASK_FLAGS[self.task], *self.flags]


ONE_LABEL = ("--text-column", "review", "--label-column", "label", "--positive-label", "1")
TASK_FLAGS: dict[str, tuple[str, ...]] = {
    "single": ONE_LABEL,
    "full": ONE_LABEL,
    "multi": ("--text-column", "review", "--label-column", "topics", "--task", "multi_label"),
    "regression": ("--text-column", "review", "--label-column", "score", "--task", "regression"),
    "pairs": (
        "--text-column", "review", "--text-pair-column", "other", "--label-column", "same",
    ),
}  # fmt: skip

KILLED = {"epochs": 2, "kill_at": 0.7}

CASES: tuple[Case, ...] = (
    # Lost when whole runs were first tried.
    Case(name="BERT-Large 2GB", model="bert-large", budget="2GB", predict=True),
    Case(name="BERT-Base 1.2GB", model="bert-base", budget="1.2GB", predict=True),
    Case(name="XLM-R-large 4GB", model="xlmr-large", budget="4GB"),
    Case(name="DeBERTa-v3-large 4GB", model="deberta-v3-large", budget="4GB"),
    Case(name="Qwen3-0.6B 6GB", model="qwen3-0.6b", budget="6GB", predict=True),
    # Tried with them.
    Case(name="RoBERTa-large length 512 4GB", model="roberta-large", budget="4GB", length=512),
    Case(name="BERT-Base --exact", model="bert-base", budget="6GB", flags=("--exact",)),
    Case(name="BERT-Large 4GB", model="bert-large", budget="4GB"),
    Case(name="BERT-Base 4GB", model="bert-base", budget="4GB"),
    Case(name="ModernBERT-large 4GB", model="modernbert-large", budget="4GB"),
    Case(name="BERT-Large 2GB killed", model="bert-large", budget="2GB", **KILLED),
    # BERT
    Case(name="BERT-Large 3GB multi-label", model="bert-large", budget="3GB", task="multi"),
    Case(name="BERT-Large 16GB --exact", model="bert-large", budget="16GB", flags=("--exact",)),
    Case(name="BERT-Large 2GB LoRA", model="bert-large", budget="2GB", length=256,
         flags=("--allow", "lora")),
    Case(name="BERT-Large 3 % of the card", model="bert-large", budget="3%"),
    Case(name="BERT-Base auto", model="bert-base", budget="auto"),
    Case(name="BERT-Base 2GB length 256 regression", model="bert-base", budget="2GB", length=256,
         task="regression", predict=True),
    Case(name="BERT-Base 2GB 8 x 4", model="bert-base", budget="2GB",
         flags=("--batch-size", "8", "--gradient-accumulation-steps", "4")),
    Case(name="BERT-Base 3GB fp16", model="bert-base", budget="3GB", flags=("--fp16",)),
    # RoBERTa
    Case(name="RoBERTa-base 2GB pairs", model="roberta-base", budget="2GB", task="pairs"),
    Case(name="RoBERTa-large 6GB length 256 multi-label", model="roberta-large", budget="6GB",
         length=256, task="multi"),
    # XLM-R
    Case(name="XLM-R-base 3GB killed", model="xlmr-base", budget="3GB", **KILLED),
    Case(name="XLM-R-base 2.5GB length 64", model="xlmr-base", budget="2.5GB", length=64),
    Case(name="XLM-R-large 8GB length 256", model="xlmr-large", budget="8GB", length=256),
    Case(name="XLM-R-large 4GB killed", model="xlmr-large", budget="4GB", **KILLED),
    # ELECTRA
    Case(name="ELECTRA-base 1.5GB", model="electra-base", budget="1.5GB"),
    Case(name="ELECTRA-large 4GB pairs", model="electra-large", budget="4GB", task="pairs",
         predict=True),
    # ALBERT
    Case(name="ALBERT-base 1.2GB length 512", model="albert-base-v2", budget="1.2GB", length=512),
    Case(name="ALBERT-xlarge 6GB", model="albert-xlarge-v2", budget="6GB"),
    # DistilBERT
    Case(name="DistilBERT 1.2GB length 32", model="distilbert", budget="1.2GB", length=32),
    Case(name="DistilBERT 16GB length 512 --exact", model="distilbert", budget="16GB", length=512,
         flags=("--exact",)),
    # DeBERTa
    Case(name="DeBERTa-v3-base 3GB multi-label", model="deberta-v3-base", budget="3GB",
         task="multi"),
    Case(name="DeBERTa-v3-base 4GB length 256 killed", model="deberta-v3-base", budget="4GB",
         length=256, **KILLED),
    # ERNIE
    Case(name="ERNIE-base 2GB regression", model="ernie-base", budget="2GB", task="regression"),
    Case(name="ERNIE-large 4GB killed", model="ernie-large", budget="4GB", **KILLED),
    # ModernBERT
    Case(name="ModernBERT-base 2GB length 256", model="modernbert-base", budget="2GB", length=256),
    Case(name="ModernBERT-large 16GB length 512 pairs", model="modernbert-large", budget="16GB",
         length=512, task="pairs"),
    # Qwen
    Case(name="Qwen3-0.6B 4GB LoRA", model="qwen3-0.6b", budget="4GB", flags=("--allow", "lora")),
    Case(name="Qwen3-0.6B 16GB length 256 pairs", model="qwen3-0.6b", budget="16GB", length=256,
         task="pairs"),
)  # fmt: skip

ACTED_CARDS = {
    "GTX 1650": "GTX 1650 4GB",
    "RTX 3050": "RTX 3050 Laptop 4GB",
    "RTX 4060 Laptop": "RTX 4060 Laptop 8GB",
    "RTX 3060": "RTX 3060 12GB",
    "T4": "T4 16GB",
}
"""What people call a card, and its name in memfit's table."""
# Cards of 4 GB were seen full at 3.1 GiB reserved: BERT-Large keeps to 3.0, the context included.
TIGHT = {"GTX 1650": "3GiB", "RTX 3050": "3GiB"}
ACTED_CASES: tuple[Case, ...] = tuple(
    Case(name=f"{called} as a {name}", model=model, card=card,
         budget=TIGHT.get(name, "auto") if model == "bert-large" else "auto")
    for name, card in ACTED_CARDS.items()
    for called, model in (("BERT-Large", "bert-large"), ("BERT-Base", "bert-base"))
)  # fmt: skip

RANK_CASES: tuple[Case, ...] = (
    Case(name="BERT-Base 4GB on 2 ranks", model="bert-base", budget="4GB", ranks=2, task="full"),
    Case(name="BERT-Large 2GB on 2 ranks", model="bert-large", budget="2GB", ranks=2),
)

SMALL = ("--batch-size", "16", "--learning-rate", "1e-3")
CPU_CASES: tuple[Case, ...] = (
    Case(name="BERT killed", model="bert-base", budget="60MB", epochs=4, kill_at=0.5, length=32,
         flags=(*SMALL, "--exact")),
    Case(name="Qwen3 multi-label killed", model="qwen3-0.6b", budget="30MB", epochs=4, kill_at=0.5,
         length=32, task="multi", flags=(*SMALL, "--exact"), predict=True),
    Case(name="RoBERTa regression", model="roberta-base", budget="20MB", length=64,
         task="regression", flags=SMALL),
    Case(name="XLM-R pairs", model="xlmr-base", budget="60MB", length=64, task="pairs",
         flags=SMALL),
    Case(name="ALBERT auto", model="albert-base-v2", budget="auto", length=64, flags=SMALL),
    Case(name="DeBERTa", model="deberta-v3-base", budget="100MB", length=32, flags=SMALL),
    Case(name="ModernBERT 8 x 2", model="modernbert-base", budget="60MB", length=64,
         flags=("--batch-size", "8", "--gradient-accumulation-steps", "2")),
    Case(name="DistilBERT killed", model="distilbert", budget="40MB", epochs=4, kill_at=0.5,
         length=32, flags=SMALL),
    Case(name="ELECTRA too small", model="electra-base", budget="1MB", length=32, flags=SMALL),
)  # fmt: skip


def real_cases(name: str) -> list[Case]:
    """What is run with pre-trained weights, for their F1: two epochs of all rows."""
    every: dict[str, Any] = {"model": name, "task": "full", "epochs": 2}
    return [
        Case(name=f"{name} 1.2GB", budget="1.2GB", **every),
        Case(name=f"{name} 2GB", budget="2GB", **every),
        Case(name=f"{name} 4GB", budget="4GB", **every, predict=True),
        Case(name=f"{name} 4GB --exact", budget="4GB", **every, flags=("--exact",)),
        Case(name=f"{name} 2GB killed", budget="2GB", **every, kill_at=0.7),
    ]


def model_config(name: str, *, vocabulary: int, tiny: bool) -> tuple[str, dict[str, Any]]:
    """The model type and config; `tiny` keeps the names and shrinks every size."""
    family, config = MADE_MODELS[name]
    config = {**config, "pad_token_id": 0}
    if tiny:
        from _memory_cases import _known

        small = {key: value for key, value in TINY.items() if key in config or _known(family, key)}
        config |= {**small, "vocab_size": vocabulary}
        if family == "modernbert":
            special = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
            config |= dict.fromkeys(special, 1)
    return family, config


def takes_segments(name: str) -> bool:
    """Whether the family's tokenizer hands the model a segment id a token."""
    family, config = MADE_MODELS[name]
    return family in SEGMENT_IDS and config.get("type_vocab_size") != 0
