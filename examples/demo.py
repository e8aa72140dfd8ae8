"""`make demo`: a real Chinese encoder on real reviews, through the commands a user would type."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from assets import m3e_small, reviews_csv

OUTPUT = Path("demo-run")
SENTENCES = ("服务人员都很亲切", "服务人员都不亲切", "书的内容很精彩,值得一读")


def main() -> None:
    print("Fetching m3e-small (24 M parameters, for research use) and a sample of real reviews ...")
    model, reviews = m3e_small(), reviews_csv(rows=2400)
    shutil.rmtree(OUTPUT, ignore_errors=True)
    memfit(
        "train", reviews, "--model", model, "--budget", "1GB", "--output-dir", OUTPUT,
        "--epochs", "1", "--learning-rate", "5e-5", "--max-length", "64",
        "--label-names", "0=差评", "1=好评",
    )  # fmt: skip
    memfit("predict", OUTPUT, *SENTENCES)
    print(f"\nThe report: {(OUTPUT / 'report.html').resolve()}")


def memfit(*arguments: str | Path) -> None:
    """Shows the command as a user would type it, then runs it."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ memfit {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "memfit", *words], check=True)


if __name__ == "__main__":
    main()
