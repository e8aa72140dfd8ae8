"""How long `memfit plan --gpu` takes for the cards people own: a plan or a clear no, in seconds.

    python benchmarks/plan_seconds.py --table ChnSentiCorp_htl_all.csv --models bert-base bert-large
        --out benchmarks/results/plan_seconds.json

Each command is a process of its own, as a user starts it; a model is a folder with config.json and
a tokenizer. Run it on a machine that does nothing else: `load` is the load before each command.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _machine import stamp

CARDS = (
    "GTX 1050 Ti", "GTX 1060 6GB", "GTX 1080 Ti", "GTX 1650 4GB", "GTX 1660 Super", "RTX 2060 6GB",
    "RTX 3050 Laptop 4GB", "RTX 3060", "RTX 4060 Laptop", "RTX 4090", "RTX 5090", "MX450", "T4",
    "P100", "V100 16GB", "L4", "A10", "A100 40GB",
    "GTX 1650 4GB --windows", "RTX 4060 Laptop --windows --display",
)  # fmt: skip


def planned(table: Path, model: Path, card: str) -> dict[str, Any]:
    """One command: its seconds, those of all its processes' CPU time, and what it chose."""
    name, *flags = card.split(" --")
    command = [sys.executable, "-m", "memfit", "plan", str(table), "--model", str(model)]
    command += ["--gpu", name, *(f"--{flag}" for flag in flags), "--json"]
    load, before = os.getloadavg()[0], _cpu_seconds()
    began = time.perf_counter()
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - began
    if run.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}")
    chosen = json.loads(run.stdout)["chosen"]
    return {
        "model": model.name,
        "card": card,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(_cpu_seconds() - before, 2),
        "load": round(load, 2),
        "strategies": sorted(chosen["strategies"]) if chosen else None,
    }


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--cards", nargs="+", default=CARDS)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    rows = []
    for model in asked.models:
        for card in asked.cards:
            rows.append(planned(asked.table, model, card))
            print(json.dumps(rows[-1]), flush=True)
    asked.out.write_text(json.dumps({"machine": stamp(), "plans": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
