"""What a training may be asked for: one case a seed."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from differential.models import (
    CLASSIFIER_HEADS,
    DECODERS,
    FAMILIES,
    TASKS,
    WITHOUT_OWN_HEAD,
    has_task,
)

OPTIMIZERS = ("sgd", "adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop")
"""All that TrainingArguments name and that run on a CPU with torch and transformers alone."""
NEEDS_MORE = {
    "adamw_torch_xla": "torch_xla", "adamw_torch_npu_fused": "torch_npu",
    "adamw_anyprecision": "torchdistx", "adamw_torch_4bit": "torchao",
    "adamw_torch_8bit": "torchao", "ademamix": "bitsandbytes", "adamw_bnb_8bit": "bitsandbytes",
    "adamw_8bit": "bitsandbytes", "ademamix_8bit": "bitsandbytes", "lion_8bit": "bitsandbytes",
    "lion_32bit": "bitsandbytes", "paged_adamw_32bit": "bitsandbytes",
    "paged_adamw_8bit": "bitsandbytes", "paged_ademamix_32bit": "bitsandbytes",
    "paged_ademamix_8bit": "bitsandbytes", "paged_lion_32bit": "bitsandbytes",
    "paged_lion_8bit": "bitsandbytes", "rmsprop_bnb": "bitsandbytes",
    "rmsprop_bnb_8bit": "bitsandbytes", "rmsprop_bnb_32bit": "bitsandbytes",
    "galore_adamw": "galore_torch", "galore_adamw_8bit": "galore_torch",
    "galore_adafactor": "galore_torch", "galore_adamw_layerwise": "galore_torch",
    "galore_adamw_8bit_layerwise": "galore_torch", "galore_adafactor_layerwise": "galore_torch",
    "lomo": "lomo_optim", "adalomo": "lomo_optim", "grokadamw": "grokadamw",
    "schedule_free_radam": "schedulefree", "schedule_free_adamw": "schedulefree",
    "schedule_free_sgd": "schedulefree", "apollo_adamw": "apollo_torch",
    "apollo_adamw_layerwise": "apollo_torch", "stable_adamw": "torch-optimi",
}  # fmt: skip
"""The others, and the package each needs."""
OWN_OPTIMIZERS = ("given", "class", "counting")
"""Made by the user, by its class, or one that counts steps per group as schedule-free ones do."""
RATES = {"sgd": 0.05, "given": 0.05, "counting": 0.05}
LOSSES = (
    "model", "rows", "body", "weighted", "func", "mean_func", "class_weights", "smoothing",
)  # fmt: skip
SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt")
COLLATORS = ("dynamic", "max_length", "left", "multiple", "maskless")
EXACT = (
    "Packing()", "FusedAttention()", "Checkpointing()", "Checkpointing(layers=1)",
    "ActivationOffload(min_bytes=1)", "OptimizerOffload()",
    "SmallWorkspace()", "FusedLayers()", "FusedLayers(mlp_pieces=2)",
)  # fmt: skip
ROUNDING = (
    "HalfPrecision()", "LowBitAdamW()", "LowBitAdamW(master_bits=16)",
    "OptimizerOffload(dtype='bfloat16')", "StateOffload()",
)  # fmt: skip
RELEASES = ("GradientRelease('kept8')", "GradientRelease('host')")
OTHER = (
    "Freezing('encoder')", "Freezing('embeddings')", "Freezing(1)", "Lora(rank=2)",
    "SmallStateOptimizer()", "FrozenFeatures()", "Truncation(max_length=8)",
)  # fmt: skip
ARGUMENTS: tuple[tuple[str, Any], ...] = (
    ("dataloader_drop_last", True), ("include_num_input_tokens_seen", "all"),
    ("include_num_input_tokens_seen", "non_padding"), ("logging_first_step", True),
    ("logging_steps", 2), ("logging_strategy", "epoch"), ("gradient_checkpointing", True),
    ("torch_empty_cache_steps", 1), ("remove_unused_columns", False), ("data_seed", 7),
    ("adam_beta2", 0.9), ("optim_args", "momentum=0.9"), ("warmup_steps", 0.4),
)  # fmt: skip
"""Settings one of which a case may have beside all others."""
EVALUATION_ARGUMENTS: tuple[tuple[str, Any], ...] = (
    ("prediction_loss_only", True), ("eval_on_start", True), ("eval_accumulation_steps", 1),
    ("include_for_metrics", ["inputs", "loss"]), ("eval_do_concat_batches", False),
    ("eval_strategy", "epoch"), ("eval_delay", 2),
)  # fmt: skip
_CLASSIFYING = ("single", "multi", "regression")
_CROSS_ENTROPY = ("single", "token", "masked_lm", "choice")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training; whatever is not said is as simple as it can be."""

    seed: int = 0
    task: str = "single"
    family: str = "bert"
    head: str = "own"
    collator: str = "dynamic"
    ignored: bool = False
    """Whether some labels are -100."""
    loss: str = "model"
    optim: str = "sgd"
    schedule: str = "linear"
    warmup: int = 0
    clip: float = 1.0
    decay: float = 0.0
    neftune: float | None = None
    batch: int = 4
    accumulation: int = 1
    rows: int = 19
    steps: int | None = 3
    """None: one epoch and a half."""
    data: str = "list"
    sampling: str = "random"
    model_init: bool = False
    callback: str = ""
    """stop: ends the run after two steps; gradients: reads them before each update."""
    evaluate: bool = False
    save: int = 0
    """After so many steps."""
    limit: int | None = None
    best: bool = False
    only_model: bool = False
    resume: bool = False
    """A second trainer goes on from the first checkpoint."""
    again: str = ""
    """trainer: a second trainer on the same model; train: the same trainer once more."""
    trial: int = 0
    """The batch size that a hyperparameter search tries."""
    strategies: tuple[str, ...] = ()
    micro_rows: int | None = None
    micro_tokens: int | None = None
    budget: str | None = None
    failing: tuple[int, ...] = ()
    """Operators of steps, counted from the start, that find no memory."""
    wide: bool = False
    """Whether matrices are large to the low-bit optimizer."""
    argument: tuple[str, Any] | None = None
    """One more of the TrainingArguments."""
    outputs: str = ""
    """hidden_states or attentions: asked of the model in its config."""

    @property
    def effective(self) -> int:
        """Rows of one optimizer step."""
        return self.batch * self.accumulation

    def __repr__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"Case({', '.join(changed)})"

    def script(self) -> str:
        """What reproduces it, from the top of the repository."""
        return (
            "import sys\n\nsys.path.insert(0, 'tests')\n"
            f"from differential import Case, check\n\ncheck({self!r})\n"
        )


def drawn(seed: int) -> Case:
    """The case of a seed; of what does not go together the rarer wish is kept."""
    draw = random.Random(f"differential {seed}")
    made: dict[str, Any] = {"seed": seed}
    made |= _model(draw)
    made |= _loss(draw, made)
    made |= _training(draw)
    made |= _memory(draw, made)
    made |= _run(draw, made)
    if made.get("head") == "module" and made.get("loss") == "smoothing":
        made["loss"] = "model"  # the Trainer asks for a config then
    if made.get("head") == "module" and made.get("loss", "model") != "model":
        made["evaluate"] = False  # without labels its tuple has no loss to be left out
    if made.get("outputs") and made["evaluate"]:
        made["collator"] = "max_length"  # the Trainer joins them only where all are of one width
    asked = made.get("strategies", ())
    if "Freezing('encoder')" in asked and _only_encoder_learns(made):
        made["strategies"] = asked = ()
    made["wide"] = any(one.startswith("LowBit") for one in asked)
    if "GradientRelease('kept8')" in asked and draw.random() < 0.5:
        # Gradients that come late in a step are what such a sink may get wrong.
        made |= {"task": "single", "family": "bert", "head": "branches", "loss": "model",
                 "collator": "dynamic", "micro_rows": 1, "outputs": ""}  # fmt: skip
    if draw.random() < 0.25:
        asks = made["evaluate"] and not made.get("best") and draw.random() < 0.7
        name, value = draw.choice(EVALUATION_ARGUMENTS if asks else ARGUMENTS)
        checkpointing = made.get("head", "own") == "own" and made.get("family") not in (
            "albert", "mpnet"
        )  # fmt: skip
        fits = {"optim_args": made["optim"] == "sgd", "gradient_checkpointing": checkpointing}
        if fits.get(name, True):
            made["argument"] = (name, value)
        if name == "include_for_metrics" and made["task"] == "choice":
            made["collator"] = "max_length"  # the Trainer joins such inputs only of one width
    return Case(**made)


def _only_encoder_learns(made: dict[str, Any]) -> bool:
    """Whether nothing else has a part in the loss, so that nobody trains with it frozen."""
    tied = made["task"] == "causal_lm" and made["family"] in WITHOUT_OWN_HEAD
    return bool(tied or made.get("loss") == "body")


def _model(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.2:
        head, task = draw.choice(CLASSIFIER_HEADS), draw.choice(_CLASSIFYING)
        collator = "max_length" if head == "flatten" else draw.choice(COLLATORS)
        if head == "flatten" or (head == "masked_mean" and collator == "maskless"):
            collator = "max_length"
        return {"task": task, "head": head, "collator": collator}
    task = draw.choice(("single", "single", *TASKS))
    family = draw.choice([name for name in FAMILIES if has_task(name, task)])
    collators = list(COLLATORS)
    if family in DECODERS:  # without a mask, or with padding first, their heads look elsewhere
        collators = ["dynamic", "max_length", "multiple"]
    outputs = draw.choice(("hidden_states", "attentions")) if draw.random() < 0.05 else ""
    return {
        "task": task,
        "family": family,
        "collator": draw.choice(collators),
        "outputs": outputs,
        "ignored": task == "single" and draw.random() < 0.15,
    }


def _loss(draw: random.Random, made: dict[str, Any]) -> dict[str, Any]:
    task, own_head = made["task"], made.get("head", "own") == "own"
    if draw.random() < 0.55 or task in ("question", "causal_lm"):
        return {}
    kinds = ["func", "mean_func"]
    if task in _CLASSIFYING:
        kinds += ["rows"]
        if own_head and made["family"] not in DECODERS:
            kinds += ["body"]
    if task in ("single", "multi"):
        kinds += ["class_weights"]
    if task == "single":
        kinds += ["weighted"]
    if task in _CROSS_ENTROPY:
        kinds += ["smoothing"]
    if made.get("ignored"):
        kinds = ["func", "class_weights", "smoothing"]
    return {"loss": draw.choice(kinds)}


def _training(draw: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {}
    optimizer = draw.random()
    if optimizer < 0.5:
        made["optim"] = "sgd"
    else:
        made["optim"] = draw.choice(OPTIMIZERS if optimizer < 0.88 else OWN_OPTIMIZERS)
    made["schedule"] = draw.choice(SCHEDULES)
    made["warmup"] = draw.choice((0, 0, 1))
    made["clip"] = draw.choice((0.0, 0.1, 1.0, 1.0))
    made["decay"] = draw.choice((0.0, 0.0, 0.1))
    made["batch"], made["accumulation"] = draw.choice(((4, 1), (8, 1), (2, 4), (1, 6), (3, 2)))
    made["steps"] = draw.choice((2, 3, 3, 4, None))
    made["rows"] = draw.choice((16, 19, 24))
    return made


def _memory(draw: random.Random, made: dict[str, Any]) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    cut = draw.random()
    if cut < 0.35:
        asked["micro_rows"] = draw.choice((1, 2, 3, 5))
    elif cut < 0.6:
        asked["micro_tokens"] = draw.choice((16, 30, 60, 100))
    wish = draw.random()
    if wish < 0.3:
        chosen = draw.sample(EXACT, draw.choice((1, 1, 2)))
        kinds = [text.partition("(")[0] for text in chosen]
        asked["strategies"] = tuple(chosen if len(set(kinds)) == len(kinds) else chosen[:1])
    elif wish < 0.42:
        asked["strategies"] = _rounding(draw)
        asked["optim"] = "adamw_torch"
    elif wish < 0.5:
        asked["strategies"] = (draw.choice(OTHER),)
    elif wish < 0.56:
        asked = {"budget": draw.choice(("3GB", "64GB"))}
    if draw.random() < 0.12:
        asked["failing"] = tuple(draw.randrange(5, 900) for _ in range(draw.choice((1, 1, 2))))
    own_head = made.get("head", "own") == "own"
    if made["task"] in _CLASSIFYING and own_head and draw.random() < 0.06:
        asked["neftune"] = 5.0
        if draw.random() < 0.4 and not asked.get("budget"):
            asked["strategies"] = ("Packing()",)
    return asked


def _rounding(draw: random.Random) -> tuple[str, ...]:
    chosen = [draw.choice(ROUNDING)]
    if chosen[0].startswith("LowBit") and draw.random() < 0.6:
        chosen.append(draw.choice(RELEASES))
    if chosen[0] == "StateOffload()":
        chosen.insert(0, "LowBitAdamW()")
    if draw.random() < 0.3:
        chosen.append("Packing()")
    return tuple(chosen)


def _run(draw: random.Random, made: dict[str, Any]) -> dict[str, Any]:
    asked: dict[str, Any] = {"evaluate": draw.random() < 0.25}
    if draw.random() < 0.15:
        asked["data"] = "iterable"
        made["steps"] = made["steps"] or 3
    elif draw.random() < 0.1:
        asked["sampling"] = draw.choice(("group_by_length", "sequential"))
    asked["model_init"] = draw.random() < 0.12 and not made.get("strategies")
    asked["callback"] = draw.choice(("stop", "gradients")) if draw.random() < 0.1 else ""
    kind = draw.random()
    if kind < 0.12:
        asked |= {"save": draw.choice((1, 2)), "limit": draw.choice((None, 1, 2))}
        asked["resume"] = draw.random() < 0.5
        asked["only_model"] = not asked["resume"] and draw.random() < 0.3
        asked["best"] = asked["evaluate"] and not asked["resume"] and draw.random() < 0.5
        if asked["resume"]:
            asked |= {"limit": None, "callback": ""}
    elif kind < 0.22:
        asked["again"] = draw.choice(("trainer", "trainer", "train"))
    elif kind < 0.26 and asked.get("data") is None:
        # Evaluations of a trial are reported to optuna, which is not here.
        asked |= {"trial": draw.choice((2, 6)), "model_init": True, "strategies": ()}
        asked["evaluate"] = False
    return asked
