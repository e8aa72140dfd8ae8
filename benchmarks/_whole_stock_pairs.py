"""From the command to the saved model, memfit beside a stock bf16 script, in the order A B B A.

    python benchmarks/whole_runs.py --stock --data ChnSentiCorp_htl_all.csv --vocab vocab.txt

After a warm-up. memfit's runs also note when their imports were done, and so how long the first
step of a task that was run before takes to come.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _whole_cases import Case
from _whole_process import Ended

if TYPE_CHECKING:
    from whole_runs import Bench, ResultFile

HERE = Path(__file__).resolve().parent
PAIRS = (
    Case(name="BERT-Large, one epoch, 4GB", model="bert-large", budget="4GB"),
    Case(name="BERT-Base, two epochs, 4GB", model="bert-base", budget="4GB", epochs=2),
)
SMALL_PAIRS = (
    Case(name="tiny BERT, one epoch, 60MB", model="bert-base", budget="60MB", length=32),
)
ORDER = "ABBA"
"""A is memfit, B the stock script."""


def compare(bench: Bench, results: ResultFile) -> None:
    """Every pair, and a line for each."""
    pairs = SMALL_PAIRS if bench.options.cpu else PAIRS
    names = bench.options.only.split(";") if bench.options.only else [one.name for one in pairs]
    pairs = tuple(one for one in pairs if one.name in names)
    if not pairs:
        raise SystemExit(f"--only names none of {'; '.join(one.name for one in PAIRS)}")
    bench.make_models([pair.model for pair in pairs])
    for pair in pairs:
        bench.model(pair.model)  # nothing else may run while the clock does
    results.machine(bench.loader.ask(do="stamp"))
    bench.close_workers()
    for pair in pairs:
        found = compared(bench, pair)
        results.add(found, "stock")
        print(json.dumps(found["said"], indent=1), flush=True)


def compared(bench: Bench, pair: Case) -> dict[str, Any]:
    """A warm-up, which compiles memfit's kernels, then both in turns."""
    runs: list[dict[str, Any]] = []
    for kind in ("A", *ORDER):
        run = one_run(bench, pair, kind)
        run["warm_up"] = not runs
        runs.append(run)
        print(f"{pair.name}: {run['who']} {run['seconds']:.1f} s", flush=True)
    timed = [run for run in runs if not run["warm_up"]]
    ours = [run for run in timed if run["who"] == "memfit"]
    stock = [run for run in timed if run["who"] == "stock"]
    seconds = [[run["seconds"] for run in side] for side in (ours, stock)]
    said = {
        "memfit_seconds": seconds[0], "stock_seconds": seconds[1],
        "ratio": round(sum(seconds[0]) / sum(seconds[1]), 3),
        "failed": [run["exit_code"] for run in runs if run["exit_code"] != 0],
        "first_step_after_imports_seconds": [run["after_imports_seconds"] for run in ours],
        "memfit_held_bytes": [run["held_bytes"] for run in ours],
        "stock_held_bytes": [run["held_bytes"] for run in stock],
        "said_over_taken": [run["time"].get("said_over_taken") for run in ours],
    }  # fmt: skip
    return {"name": pair.name, "said": said, "runs": runs}


def one_run(bench: Bench, pair: Case, kind: str) -> dict[str, Any]:
    """One process, whose folder is removed."""
    folder = bench.work / "runs" / f"pair-{kind}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    table, model = str(bench.tables["single"]), bench.model(pair.model)
    if kind == "A":
        with _imports_noted(bench) as noted:
            started = time.time()
            ended = bench.memfit(pair.command(table, model, str(folder)), folder)
        more = {
            "f1": _f1(folder), "detail": ended.as_json(), "time": _said(ended),
            **_after_imports(ended, noted, started),
        }  # fmt: skip
    else:
        words = [table, model, str(folder), str(pair.epochs), str(pair.length)]
        ended = bench.run([sys.executable, str(HERE / "_whole_stock.py"), *words], folder)
        more = {"detail": ended.as_json(), **_told(ended)}
    shutil.rmtree(folder, ignore_errors=True)
    found = {"who": "memfit" if kind == "A" else "stock", "seconds": round(ended.seconds, 2)}
    held = ended.held["highest_bytes"] if ended.held else None
    if ended.exit_code != 0:
        more["output_tail"] = ended.said.text[-3000:]
    return {**found, "exit_code": ended.exit_code, "held_bytes": held, **more}


@contextlib.contextmanager
def _imports_noted(bench: Bench) -> Iterator[Path]:
    """Runs started inside write down when their imports were done."""
    noted = bench.work / "imports.txt"
    noted.unlink(missing_ok=True)
    before = dict(bench.environment)
    bench.environment |= {
        "WHOLE_RUNS_IMPORTS": str(noted),
        "PYTHONPATH": f"{HERE / '_whole_hook'}:{before['PYTHONPATH']}",
    }
    try:
        yield noted
    finally:
        bench.environment.clear()
        bench.environment.update(before)


def _after_imports(ended: Ended, noted: Path, started: float) -> dict[str, Any]:
    """Seconds from the end of its imports to the end of its first step."""
    first_step = ended.progress.first_step_at
    lines = [line.split() for line in noted.read_text().splitlines()] if noted.is_file() else []
    imports = {name: round(float(at) - started, 2) for name, at in lines}
    done = max((at for at in imports.values() if at <= (first_step or 0.0)), default=None)
    after = None if done is None or first_step is None else round(first_step - done, 2)
    return {"imports_done_at": imports, "after_imports_seconds": after}


def _told(ended: Ended) -> dict[str, Any]:
    for _, line in ended.said.lines:
        if "STOCK {" in line:
            found: dict[str, Any] = json.loads(line.partition("STOCK ")[2])
            return found
    return {}


def _said(ended: Ended) -> dict[str, Any]:
    """How long training would take, as said beforehand, and how long it took."""
    from whole_runs import said_beforehand

    return said_beforehand(ended)


def _f1(folder: Path) -> float | None:
    from whole_runs import read_json

    metrics = read_json(folder / "summary.json").get("metrics") or {}
    found: float | None = metrics.get("f1")
    return found
