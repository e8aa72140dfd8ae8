"""The plans of two versions of memfit for the same 131 tasks: step times side by side.

    python benchmarks/plan_recipes.py --table ChnSentiCorp_htl_all.csv --vocab vocab.txt
        --work FOLDER --out old.json                       # with each version on PYTHONPATH
    python benchmarks/plan_recipes.py --compare old.json new.json
        --out benchmarks/results/plan_recipes.json

Eleven cards people own, five models, lengths 128 and 512, each card's whole memory as the budget;
then three models in seven budgets on an H200. Nothing is trained: step times are those the plans
say, computed from data sheets. `planning_seconds` is comparable only on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _machine import stamp
from _whole_cases import MADE_MODELS, takes_segments

CARDS = (
    "MX450", "GTX 1050 Ti", "GTX 1060 6GB", "GTX 1650 4GB", "GTX 1660 Super", "RTX 2060 6GB",
    "RTX 3050 Laptop 4GB", "RTX 3060 12GB", "T4", "RTX 4060 Laptop", "RTX 4090",
)  # fmt: skip
MODELS = ("bert-base", "bert-large", "xlmr-large", "deberta-v3-base", "qwen3-0.6b")
LENGTHS = (128, 512)
H200_MODELS = ("bert-base", "bert-large", "xlmr-large")
H200_BUDGETS = ("1.5GB", "2GB", "3GB", "4GB", "6GB", "8GB", "16GB")


def tasks() -> Iterator[dict[str, Any]]:
    """Each task as the keyword arguments of memfit.plan, with the model's name."""
    for model in MODELS:
        for length in LENGTHS:
            for card in CARDS:
                yield {"model": model, "gpu": card, "max_length": length, "budget": None}
    for model in H200_MODELS:
        for budget in H200_BUDGETS:
            yield {"model": model, "gpu": "H200", "max_length": 128, "budget": budget}


def model_folder(name: str, work: Path, vocab: Path) -> Path:
    """A config.json of the real shape with a BERT tokenizer; a plan needs no weights."""
    from transformers import AutoConfig

    folder = work / name
    if not (folder / "vocab.txt").is_file():
        family, settings = MADE_MODELS[name]
        config = AutoConfig.for_model(family, **{**settings, "pad_token_id": 0})
        config.save_pretrained(folder)
        shutil.copy(vocab, folder / "vocab.txt")
        inputs = ["input_ids", *(["token_type_ids"] if takes_segments(name) else [])]
        settings = {
            "tokenizer_class": "BertTokenizer",
            "model_max_length": 512,
            "model_input_names": [*inputs, "attention_mask"],
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def planned(task: dict[str, Any], table: Path, folder: Path) -> dict[str, Any]:
    """The plan for a task: what it uses, its step time and its peak."""
    import memfit
    from memfit.errors import DoesNotFitError

    began = time.perf_counter()
    try:
        made = memfit.plan(str(table), **{**task, "model": str(folder)})
    except DoesNotFitError:
        return {**task, "fits": False, "planning_seconds": round(time.perf_counter() - began, 2)}
    except Exception as error:  # a task that cannot be planned is a row, too
        return {**task, "fits": False, "error": f"{type(error).__name__}: {error}"[:300]}
    chosen = made.chosen.as_json()
    return {
        **task,
        "fits": True,
        "step_seconds": chosen["step_seconds"],
        "device_peak_bytes": chosen["device_peak_bytes"],
        "fidelity": chosen["fidelity"],
        "strategies": chosen["strategies"],
        "micro_batching": chosen["micro_batching"],
        "planning_seconds": round(time.perf_counter() - began, 2),
        "plan": made.chosen.to_toml("en"),
    }


def compared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Rows of both versions side by side, and the figures over all of them."""
    key = ("model", "gpu", "max_length", "budget")
    old = {tuple(row[name] for name in key): row for row in before["rows"]}
    rows = []
    for row in after["rows"]:
        other = old[tuple(row[name] for name in key)]
        ratio = (
            row["step_seconds"] / other["step_seconds"] if row["fits"] and other["fits"] else None
        )
        names = (
            "fits",
            "error",
            "step_seconds",
            "device_peak_bytes",
            "strategies",
            "micro_batching",
        )
        sides = {
            side: {name: one[name] for name in names if name in one}
            for side, one in (("before", other), ("after", row))
        }
        rows.append({**{name: row[name] for name in key}, "ratio": ratio, **sides})
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    return {
        "machine": {"before": before["machine"], "after": after["machine"]},
        "tasks": len(rows),
        "fit_before": sum(row["before"]["fits"] for row in rows),
        "fit_after": sum(row["after"]["fits"] for row in rows),
        "lost": [
            [row[name] for name in key]
            for row in rows
            if row["before"]["fits"] and not row["after"]["fits"]
        ],
        "median_ratio": round(statistics.median(ratios), 4),
        "worst_ratio": round(max(ratios), 4),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--vocab", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--cards", nargs="+")
    parser.add_argument("--compare", type=Path, nargs=2)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if asked.compare:
        before, after = (json.loads(path.read_text()) for path in asked.compare)
        found = compared(before, after)
        print({name: found[name] for name in found if name not in ("machine", "rows")})
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
        return
    rows = []
    for task in tasks():
        if task["model"] not in asked.models or (asked.cards and task["gpu"] not in asked.cards):
            continue
        folder = model_folder(task["model"], asked.work / "models", asked.vocab)
        rows.append(planned(task, asked.table, folder))
        print({name: one for name, one in rows[-1].items() if name != "plan"}, flush=True)
        asked.out.write_text(json.dumps({"machine": stamp(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
