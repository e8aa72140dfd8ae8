"""F1 of `memfit train` as a user runs it: the command, several seeds, one result file.

    python benchmarks/train_f1.py --table ChnSentiCorp_htl_all.csv --model m3e-small --out F.json

90/10 split, two epochs, 2e-5, batch 32, length 128. The two sentences of the tutorials are
labelled by every model that comes out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _machine import stamp

SENTENCES = ("服務人員都很親切", "服務人員都不親切")
FLAGS = "--epochs 2 --learning-rate 2e-5 --batch-size 32 --max-length 128 --weight-decay 0.01"


def memfit(*words: str) -> Any:
    """Run a command; its JSON."""
    command = [sys.executable, "-m", "memfit", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def one(table: Path, model: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train and ask."""
    output = str(folder / f"seed-{seed}")
    names = ["--label-names", "0=負評", "1=正評"]
    words = [str(table), "--model", model, "--output-dir", output, "--seed", str(seed), *names]
    memfit("train", *words, *FLAGS.split())
    summary = json.loads((Path(output) / "summary.json").read_text(encoding="utf-8"))
    return {
        "seed": seed, "metrics": summary["metrics"], "seconds": summary["seconds"],
        "memory": summary["memory"], "answers": memfit("predict", output, *SENTENCES),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--note", default="", help="what is special about the model's files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("train_f1.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        jobs = [
            pool.submit(one, options.table, options.model, seed, Path(folder))
            for seed in range(options.seeds)
        ]
        runs = [job.result() for job in jobs]
    scores = [run["metrics"]["f1"] for run in runs]
    result = {
        "machine": stamp(), "model": Path(options.model).name, "note": options.note,
        "flags": FLAGS, "f1": scores, "f1_mean": sum(scores) / len(scores), "runs": runs,
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False))
    print(f"F1 {', '.join(f'{score:.4f}' for score in scores)}; mean {result['f1_mean']:.4f}")
    print(json.dumps([run["answers"] for run in runs], ensure_ascii=False))


if __name__ == "__main__":
    main()
