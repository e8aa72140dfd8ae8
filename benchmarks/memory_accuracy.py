"""Predictions beside the measured runs: how far off `memfit estimate` is, run by run.

    python benchmarks/memory_accuracy.py            # predict every run of memory_h200.json
    python benchmarks/memory_accuracy.py --only 'bert-large/*'

Needs no GPU. Reads benchmarks/results/memory_h200.json, which benchmarks/memory_gpu.py measured,
and writes memory_accuracy.json beside it; benchmarks/document.py puts the figures into the docs.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _machine import stamp

RESULTS = Path(__file__).resolve().parent / "results"
MEASURED = RESULTS / "memory_h200.json"
PREDICTED = RESULTS / "memory_accuracy.json"
CARD = "H200 141GB"
SIZES = ("allocated_bytes", "reserved_bytes", "device_bytes")


def predict(run: Mapping[str, Any]) -> dict[str, Any]:
    """One run's predicted peak, and how long the prediction took."""
    from memfit.memory.cards import find_card
    from memfit.memory.estimate import estimate_memory

    began = time.perf_counter()
    expandable = run["case"]["expandable_segments"]
    found = estimate_memory(spec_of(run), find_card(CARD), expandable_segments=expandable)
    peak = found.peak
    return {
        "id": run["case"]["id"],
        "measured": measured_sizes(run),
        "predicted": {name: getattr(peak, name) for name in SIZES},
        "components": {str(name): size for name, size in peak.components.items()},
        "seconds": round(time.perf_counter() - began, 2),
    }


def measured_sizes(run: Mapping[str, Any]) -> dict[str, int]:
    """The same three sizes from the run: the allocator's two counters and the driver's."""
    found = run["measured"]
    return {
        "allocated_bytes": found["max_memory_allocated"],
        "reserved_bytes": found["max_memory_reserved"],
        "device_bytes": found["nvml_peak_bytes"],
    }


def spec_of(run: Mapping[str, Any]) -> Any:
    """The measured run as the step that is predicted; the widest batch it saw decides."""
    from memfit.memory.spec import StepSpec

    case = run["case"]
    pure = {"bfloat16": "pure_bf16", "float16": "pure_fp16"}.get(case["dtype"], "fp32")
    lora = case["lora"] or {}
    return StepSpec(
        config={**case["config"], "model_type": case["model_type"]},
        rows=case["batch"],
        length=max(width for _, width in run["measured"]["micro_batches"]),
        num_labels=case["num_labels"],
        precision="bf16" if case["bf16"] else "fp16" if case["fp16"] else pure,
        optim=case["optim"],
        gradient_accumulation_steps=case["accumulation"],
        gradient_checkpointing=case["gradient_checkpointing"],
        freeze=case["freeze"],
        lora=lora.get("r"),
        lora_dropout=lora.get("lora_dropout", 0.0),
        attn_implementation=case["attn_implementation"],
        # A batch of one row is as long as itself, unless all rows are padded to one length.
        padded=case["padding"] == "max_length"
        or (case["padding"] == "longest" and case["batch"] > 1),
    )


def error(record: Mapping[str, Any], size: str) -> float:
    """The prediction against the measurement: +0.01 is one percent too much."""
    return float(record["predicted"][size] / record["measured"][size] - 1)


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The median and the worst error of each size, signs left out."""
    found = {}
    for size in SIZES:
        errors = [abs(error(record, size)) for record in records]
        found[size] = {"median": statistics.median(errors), "worst": max(errors)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="ids or patterns (bert-large/*)")
    parser.add_argument("--out", type=Path, default=PREDICTED)
    args = parser.parse_args()
    records = []
    for run in json.loads(MEASURED.read_text())["runs"]:
        name = run["case"]["id"]
        if args.only and not any(fnmatch.fnmatch(name, pattern) for pattern in args.only):
            continue
        records.append(predict(run))
        errors = "  ".join(f"{size[:-6]} {error(records[-1], size):+.2%}" for size in SIZES)
        print(f"{name}: {errors}", flush=True)
    for size, found in summary(records).items():
        print(f"{size}: median {found['median']:.2%}, worst {found['worst']:.2%}")
    if not args.only:
        lines = ",\n".join(json.dumps(record) for record in records)
        head = json.dumps({"machine": stamp()}, indent=1)[:-2]
        args.out.write_text(f'{head},\n "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
