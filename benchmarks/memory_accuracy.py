"""Predictions beside the measured runs: how far off `memfit estimate` is, run by run.

    python benchmarks/memory_accuracy.py            # every run that was measured
    python benchmarks/memory_accuracy.py --only 'bert-large/*'

Needs no GPU. Reads what benchmarks/memory_gpu.py measured, benchmarks/results/memory_h200.json and,
of models the prediction was not written for, memory_h200_heldout.json. Writes memory_accuracy.json
and memory_accuracy_heldout.json beside them; benchmarks/document.py puts them into the docs.
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
HELD_OUT = RESULTS / "memory_h200_heldout.json"
PREDICTED = {
    MEASURED: RESULTS / "memory_accuracy.json",
    HELD_OUT: RESULTS / "memory_accuracy_heldout.json",
}
CARD = "H200 141GB"
SIZES = ("allocated_bytes", "reserved_bytes", "device_bytes")


def predict(run: Mapping[str, Any]) -> dict[str, Any]:
    """One run's predicted peak, and how long the prediction took."""
    from memfit.memory.cards import find_card
    from memfit.memory.stock_estimate import estimate_memory

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
        # The driver is asked a few times a second: a short run may end in between.
        "device_bytes": max(found["nvml_peak_bytes"], found["device_used_bytes"]),
    }


def spec_of(run: Mapping[str, Any]) -> Any:
    """The measured run as the step that is predicted; the widest batch it saw decides."""
    from memfit.memory.stock_step import StepSpec

    case = run["case"]
    if case["torch_compile"]:
        raise ValueError(f"{case['id']}: torch_compile fuses operators and is not predicted")
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


def predict_all(measured: Path, only: Sequence[str]) -> list[dict[str, Any]]:
    """Every run of a file whose id matches; a line is printed for each."""
    records = []
    for run in json.loads(measured.read_text())["runs"]:
        name = run["case"]["id"]
        if only and not any(fnmatch.fnmatch(name, pattern) for pattern in only):
            continue
        records.append(predict(run))
        errors = "  ".join(f"{size[:-6]} {error(records[-1], size):+.2%}" for size in SIZES)
        print(f"{name}: {errors}", flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="ids or patterns; writes nothing")
    args = parser.parse_args()
    for measured, out in PREDICTED.items():
        records = predict_all(measured, args.only)
        if not records:
            continue
        for size, found in summary(records).items():
            print(f"{size}: median {found['median']:.2%}, worst {found['worst']:.2%}")
        if not args.only:
            lines = ",\n".join(json.dumps(record) for record in records)
            head = json.dumps({"machine": stamp()}, indent=1)[:-2]
            out.write_text(f'{head},\n "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
