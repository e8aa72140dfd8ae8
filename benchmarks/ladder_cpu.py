"""`memfit ladder` on a CPU: m3e-small on hotel reviews, for the README's table.

    python benchmarks/ladder_cpu.py --table ChnSentiCorp_htl_all.csv --steps 4

The machine may be busy with other things, so times are told as ratios within the run, and the load
is written beside them. Memory is counted to the byte and does not mind. Rungs that the folder
already holds are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from assets import m3e_small

from _machine import stamp

RESULT = Path(__file__).resolve().parent / "results" / "ladder_cpu.json"


def without_paths(found: dict[str, Any], table: Path, model: Path) -> dict[str, Any]:
    """The names of table and model; where they lay is nobody's business."""
    del found["folder"], found["versions"]
    return {**found, "model": model.name, "data": table.name}


def main() -> None:
    import torch

    import memfit

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("ladder-cpu"))
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    model, before = m3e_small(), os.getloadavg()
    climbed = memfit.ladder(
        options.table, model=model, steps=options.steps, output_dir=options.folder
    )
    after = os.getloadavg()
    busy = max(before[0], after[0]) > 1.5 * (os.cpu_count() or 1)
    result = {
        "machine": stamp(),
        "threads": torch.get_num_threads(),
        "load": {"before": before, "after": after},
        "note": "run under load: compare times within the run only" if busy else "",
        **without_paths(climbed.as_json(), options.table, model),
    }
    options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
