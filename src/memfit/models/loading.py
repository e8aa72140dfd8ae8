"""Loading a model and its tokenizer for training, with every way that fails told apart."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config import ModelConfig
from memfit.errors import ConfigError, MemfitError, ModelError
from memfit.i18n import N_, t
from memfit.models.hubs import MODELSCOPE_PREFIX, source_of
from memfit.models.layers import add_lora, base_of, freeze, position_limit

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from memfit.data import LabelSpace

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

_COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

_CONFUSED = (TypeError, AttributeError, KeyError, IndexError, ZeroDivisionError)
"""What reading values of the wrong kind ends in, deep inside a library."""

FOREIGN_WEIGHT_FILES = ("tf_model.h5", "flax_model.msgpack", "model.onnx", "bert_model.ckpt.index")


def check_model_folder(config: ModelConfig) -> None:
    """What a look into the folder can tell, before torch is imported."""
    folder = Path(config.model)
    if not folder.is_dir():
        if folder.exists():
            raise ModelError(
                "the model {model} is a file; give the folder it lies in", model=config.model
            )
        # A model beside it under nearly its name: a slip of the pen, and no reason to ask the hub.
        beside: list[str] = []
        with contextlib.suppress(OSError):
            found = folder.parent.iterdir()
            beside = [item.name for item in found if (item / "config.json").is_file()]
        if close := difflib.get_close_matches(folder.name, beside, n=1, cutoff=0.8):
            raise ModelError(
                "there is no model folder {model}; did you mean {similar}?",
                model=config.model,
                similar=folder.with_name(close[0]),
            )
        name = config.model
        if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
            raise ModelError("there is no model folder {model}; check the path", model=name)
        return
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(
                "the folder {folder} holds a LoRA adapter only; merge it into its model first",
                folder=folder,
            )
        raise ModelError(
            "the model folder {folder} has no config.json; give the folder that "
            "save_pretrained wrote, or download the model's files into it",
            folder=folder,
        )
    if config.from_scratch or any((folder / name).is_file() for name in WEIGHT_FILES):
        return
    foreign = [name for name in FOREIGN_WEIGHT_FILES if (folder / name).is_file()]
    if foreign:
        raise ModelError(
            "the model folder {folder} has no weights ({foreign} is not PyTorch's); it "
            "needs model.safetensors or pytorch_model.bin, or --from-scratch to train from "
            "random weights",
            folder=folder,
            foreign=foreign[0],
        )
    raise ModelError(
        "the model folder {folder} has no weights; it needs model.safetensors or "
        "pytorch_model.bin, or --from-scratch to train from random weights",
        folder=folder,
    )


def start_reading_weights(config: ModelConfig) -> None:
    """Has the weights of a folder read from the disk while there is something else to do.

    Only into the system's cache, where whoever loads them finds them.
    """
    if config.from_scratch or not hasattr(os, "posix_fadvise"):
        return
    files = [*Path(config.model).glob("*.safetensors"), *Path(config.model).glob("*.bin")]

    def read_ahead() -> None:
        for file in files:
            with contextlib.suppress(OSError), file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    threading.Thread(target=read_ahead, daemon=True).start()


def load_settings(
    config: ModelConfig, labels: LabelSpace
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """The model's configuration with a head for these labels, and its tokenizer: no weights."""
    check_model_folder(config)
    # One file, and so the shortest wait for a hub that does not answer.
    settings: Any = load_config(config)
    settings.problem_type = labels.problem_type
    settings.id2label, settings.label2id = labels.id2label, labels.label2id
    tokenizer = load_tokenizer(config)
    text = settings.get_text_config()
    if getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = tokenizer.pad_token_id
    if getattr(settings, "pad_token_id", None) is None:
        settings.pad_token_id = text.pad_token_id
    if tokenizer.model_max_length > 10**9:  # its files name no longest text; the model does
        import torch
        from transformers import AutoModelForSequenceClassification as Classifier

        with contextlib.suppress(Exception), torch.device("meta"):  # loading says what is wrong
            model = Classifier.from_config(  # type: ignore[no-untyped-call]
                settings, trust_remote_code=config.trust_remote_code
            )
            if limit := position_limit(model):
                tokenizer.model_max_length = limit
    return settings, tokenizer


def load_weights(
    config: ModelConfig,
    settings: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
) -> PreTrainedModel:
    """The model these settings describe, frozen or adapted as asked."""
    model: Any
    model, fresh = _load_model(config, settings)
    embedded = int(model.get_input_embeddings().weight.shape[0])
    if len(tokenizer) > embedded:
        raise ModelError(
            "the tokenizer of {model} knows {known} tokens but the model embeds "
            "{embedded}; they do not belong together",
            model=config.model,
            known=len(tokenizer),
            embedded=embedded,
        )
    check_positions(model, max_length, config.model)
    # The heads take **kwargs and ignore num_items_in_batch: without this the stock Trainer
    # would not divide the loss by the accumulation steps (transformers#47688).
    model.accepts_loss_kwargs = False
    if config.lora is not None:
        model = add_lora(model, config.lora, fresh=fresh)
        model.accepts_loss_kwargs = False
    elif config.freeze is not None:
        freeze(model, config.freeze)
    loaded: PreTrainedModel = model
    return loaded


def load_config(config: ModelConfig) -> PretrainedConfig:
    """The model's configuration from a folder or the hub; no weights are read."""
    from transformers import AutoConfig

    try:
        loaded: PretrainedConfig = AutoConfig.from_pretrained(
            _source(config), trust_remote_code=config.trust_remote_code
        )
    except Exception as error:
        raise loading_error(error, config.model) from None
    for key in _COUNTS:
        count = getattr(loaded, key, None)
        if isinstance(count, int) and count < 1:
            raise ModelError(
                "the config.json of {model} has {key} {count}; download it again",
                model=config.model,
                key=key,
                count=count,
            )
    return loaded


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer; one without a vocabulary is an error, not five special tokens."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            _source(config), trust_remote_code=config.trust_remote_code
        )
    except Exception as error:
        raise loading_error(error, config.model, part="tokenizer") from None
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ModelError(
            "the model {model} has no tokenizer; put its vocabulary (tokenizer.json or "
            "vocab.txt) beside config.json",
            model=config.model,
        )
    if tokenizer.pad_token is None:  # decoders were pre-trained without padding
        if tokenizer.eos_token is None:
            raise ModelError(
                "the tokenizer of {model} has no padding token; add a pad_token to its "
                "tokenizer_config.json",
                model=config.model,
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _source(config: ModelConfig) -> str:
    """Where to read from; random weights need no weights fetched."""
    return source_of(config.model, weights=not config.from_scratch)


def _load_model(
    config: ModelConfig, settings: PretrainedConfig
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The model and the names of the weights that were not in the checkpoint."""
    import torch
    from transformers import AutoModelForSequenceClassification as Classifier

    # A checkpoint saved in half precision would otherwise train in it, and stall.
    options: dict[str, Any] = {"dtype": getattr(torch, config.dtype or "float32")}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    try:
        if config.from_scratch:
            scratch: PreTrainedModel = Classifier.from_config(  # type: ignore[no-untyped-call]
                settings, trust_remote_code=config.trust_remote_code, **options
            )
            return scratch, tuple(name for name, _ in scratch.named_parameters())
        model, info = Classifier.from_pretrained(
            _source(config),
            config=settings,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # another number of labels: a new head
            **options,
        )
    except (ImportError, ValueError) as error:
        if config.attn_implementation is not None and "attention" in str(error).lower():
            said = {"name": config.attn_implementation, "reason": _first_sentence(error)}
            raise ConfigError(
                "--attn-implementation {name} does not work here: {reason}", **said
            ) from None
        raise loading_error(error, config.model) from None
    except Exception as error:
        raise loading_error(error, config.model) from None
    return model, _check_loaded(model, info, config.model)


def _check_loaded(model: PreTrainedModel, info: dict[str, Any], name: str) -> tuple[str, ...]:
    """A new head is expected; a base model that did not load is an error."""
    mismatched = {str(item[0]) for item in info["mismatched_keys"]}
    prefix = f"{model.base_model_prefix}."
    wrong = sorted(key for key in mismatched if key.startswith(prefix))
    if wrong:
        raise ModelError(
            "the weights of {model} do not match its config.json: {name} has another shape",
            model=name,
            name=wrong[0],
        )
    missing = {str(key) for key in info["missing_keys"]} | mismatched
    base = {prefix + key for key, _ in base_of(model).named_parameters()}
    if base and len(base & missing) > len(base) // 2:
        said = {"kind": type(model).__name__, "missing": len(base & missing), "count": len(base)}
        raise ModelError(
            "the weights of {model} are not those of a {kind}: {missing} of {count} of the "
            "model's weights are not among them",
            model=name,
            **said,
        )
    return tuple(sorted(missing))


def check_positions(model: PreTrainedModel, max_length: int, name: str) -> None:
    """Texts may not be longer than the model can read."""
    limit = position_limit(model)
    if limit is not None and max_length > limit:
        said = {"length": max_length, "limit": limit, "model": name}
        raise ConfigError(
            "max_length {length} is beyond the {limit} positions of {model}; write "
            "--max-length {limit} or less",
            **said,
        )


def loading_error(error: Exception, name: str, part: str = "model") -> MemfitError:
    """One sentence for what transformers and the hub raise in many ways."""
    if isinstance(error, MemfitError):
        return error
    text = str(error)
    local = Path(name).is_dir()
    if "custom code" in text:
        return ModelError(
            "{model} needs code of its own; --trust-remote-code runs it, at your risk", model=name
        )
    if "not recognize this architecture" in text or "Unrecognized model" in text:
        return ModelError(
            "the model {model} is of a type this transformers does not know{kind}",
            model=name,
            kind=_type_in(name),
        )
    if "Unrecognized configuration class" in text:
        return ModelError(
            "the model {model} is of a type that has no text classifier{kind}",
            model=name,
            kind=_type_in(name),
        )
    if not local and not name.startswith(MODELSCOPE_PREFIX) and isinstance(error, OSError):
        kind = (
            N_("cannot get the model {model}: {reason}")
            if part == "model"
            else N_("cannot get the tokenizer {model}: {reason}")
        )
        return ModelError(kind, model=name, reason=_hub_reason(text, name))
    damaged = (
        N_("cannot load the model of {model}: {reason}; download it again")
        if part == "model"
        else N_("cannot load the tokenizer of {model}: {reason}; download it again")
    )
    if local and (broken := _broken_json(Path(name))):
        return ModelError(damaged, model=name, reason=broken)
    if isinstance(error, _CONFUSED):
        what = f"{type(error).__name__}: {_first_sentence(error)}"
        return ModelError(
            damaged,
            model=name,
            reason=t("its files hold values that cannot be ({reason})", reason=what),
        )
    kind = (
        N_("cannot load the model of {model}: {reason}")
        if part == "model"
        else N_("cannot load the tokenizer of {model}: {reason}")
    )
    return ModelError(kind, model=name, reason=_first_sentence(error))


def _broken_json(folder: Path) -> str:
    """Which of a model's small files is cut off or something else, since no library says it."""
    for path in sorted(folder.glob("*.json")):
        try:
            values = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return t("{file} is not a valid JSON file", file=path.name)
        if not isinstance(values, dict):
            return t("{file} holds no JSON object", file=path.name)
        if "weight_map" in values and not isinstance(values["weight_map"], dict):
            return t("{file} lists no weights", file=path.name)
    return ""


def _hub_reason(text: str, name: str) -> str:
    from memfit.models.huggingface import is_off, why_silent

    if source_of(name) != name:
        return t("the cache holds only parts of it, and the hub {why}", why=why_silent())
    why = t("has none, or does not let you read it")
    if is_off() or "connect" in text.lower():
        why = why_silent()
    return t("there is no folder of that name, and the hub {why}", why=why)


def _type_in(name: str) -> str:
    try:
        kind = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f" ({kind})"


def _first_sentence(error: Exception) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line.rstrip(" .:")
