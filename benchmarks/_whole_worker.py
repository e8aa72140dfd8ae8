"""A process that makes model folders and loads results, so that torch is imported once for all.

Reads one JSON request a line and answers each with one line of JSON:

    {"do": "stamp"}
    {"do": "make", "model": NAME, "folder": F, "vocabulary": FILE, "tiny": false}
    {"do": "load", "folder": F, "text": "...", "pair": null}

It never touches the card but for the stamp's name of it: what is measured there is the run's own.
"""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _whole_cases import model_config, takes_segments

RANDOM_VALUES = 2**24


def make(model: str, folder: str, vocabulary: str, *, tiny: bool) -> dict[str, Any]:
    """Random weights in a folder as a hub has it: config, fp32 safetensors, tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModel
    from transformers.initialization import no_init_weights

    family, settings = model_config(model, vocabulary=_tokens(Path(vocabulary)), tiny=tiny)
    config = AutoConfig.for_model(family, **settings)
    with no_init_weights():
        made = AutoModel.from_config(config, dtype=torch.float32)
    fill(made)
    target = Path(folder)
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    made.save_pretrained(part)
    _save_tokenizer(part, Path(vocabulary), segments=takes_segments(model))
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    return {"parameters": sum(one.numel() for one in made.parameters())}


def fill(model: Any) -> None:
    """Weights as an initialisation draws them, out of one block: drawing billions takes minutes."""
    import torch

    generator = torch.Generator().manual_seed(0)
    biggest = max(one.numel() for one in model.parameters())
    block = torch.randn(min(RANDOM_VALUES, 2 * biggest), generator=generator) * 0.02
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                continue
            flat = parameter.view(-1)
            at = int(torch.randint(len(block), (), generator=generator))
            place = 0
            while place < len(flat):
                size = min(len(block) - at, len(flat) - place)
                flat[place : place + size] = block[at : at + size]
                place, at = place + size, 0


def _save_tokenizer(folder: Path, vocabulary: Path, *, segments: bool) -> None:
    """The BERT tokenizer for every family, as tokenizer.json: all of them load that."""
    from transformers import AutoTokenizer

    source = folder / "tokenizer-source"
    source.mkdir()
    shutil.copy(vocabulary, source / "vocab.txt")
    names = ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"]
    settings = {
        "tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512,
        "model_input_names": names,
    }  # fmt: skip
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "config.json").write_text(json.dumps({"model_type": "bert"}))
    tokenizer = AutoTokenizer.from_pretrained(source)
    if len(tokenizer) != (lines := _tokens(vocabulary)):
        raise RuntimeError(f"the tokenizer has {len(tokenizer)} tokens of {lines} in {vocabulary}")
    tokenizer.save_pretrained(folder)
    shutil.rmtree(source)


def _tokens(vocabulary: Path) -> int:
    """Lines end with \\n alone: some tokens are line separators of Unicode."""
    return len(vocabulary.read_text(encoding="utf-8").rstrip("\n").split("\n"))


def load(folder: str, text: str, pair: str | None) -> dict[str, Any]:
    """What plain transformers makes of a result folder: a label and its score for one text."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(text, pair, truncation=True, max_length=32, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[0].float()
    missing = [str(info[kind]) for kind in ("missing_keys", "mismatched_keys") if info[kind]]
    if missing or not bool(torch.isfinite(logits).all()):
        raise RuntimeError(f"missing: {missing}; logits: {logits.tolist()}")
    return {
        "class": type(model).__name__, "logits": logits.tolist(),
        "label": model.config.id2label[int(logits.argmax())],
    }  # fmt: skip


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """One answer; an error is an answer, too."""
    what = request.pop("do")
    try:
        if what == "stamp":
            from _machine import stamp

            return stamp()
        found: dict[str, Any] = {"make": make, "load": load}[what](**request)
        return found
    except Exception as error:
        return {
            "error": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc()[-2000:],
        }


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # nothing else may be said between the answers
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
