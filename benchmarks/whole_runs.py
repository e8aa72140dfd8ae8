"""`memfit train` as a person runs it: whole runs, each a process of its own, watched from outside.

    python benchmarks/whole_runs.py --data ChnSentiCorp_htl_all.csv --vocab vocab.txt --jobs 4
    python benchmarks/whole_runs.py --cpu                    # small models, without a card
    python benchmarks/whole_runs.py --stock --data … --vocab …
    python benchmarks/whole_runs.py --only acted --jobs 5 --data … --vocab …
    python benchmarks/whole_runs.py --seeds 5 --data … --real m3e-small=FOLDER --plans 4GB 2GB

NVML is asked 200 times a second what a run holds, its terminal is read as it writes, some runs are
killed with -9 and resumed, and every result is loaded by plain transformers in another process.
Models have real shapes and random weights unless `--real NAME=FOLDER` gives pre-trained ones; a
NAME that is no model here adds cases of its own, on all rows, for their F1 beside that of the stock
Trainer in fp32 with the same rows, seed and learning rate (`--only real`).

`--only acted`: the card acts as smaller ones (MEMFIT_ACT_AS, memory/cards.py). What is compared is
what torch's allocator reserved, by its own counters; the limit is the budget less the small card's
predicted context, since the context here is this card's.

`--only ranks`: several ranks share the card, over gloo. What is compared is the most that a rank
held by its own count: torch's allocator and the context. Their time is not that of several cards.

Rows may be measured in several goes: `--append` keeps the rows of other names in the file, and
every row names its commit and date. With `--jobs` above 1, seconds are not comparable and marked
so. `--stock` and `--seeds` are explained in _whole_stock_pairs.py and
_whole_seeds.py.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import queue
import re
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _whole_cases import ACTED_CASES, CASES, CPU_CASES, MADE_MODELS, RANK_CASES, Case, real_cases
from _whole_process import Ended, kill_all, watched
from _whole_tables import make_reviews, make_vocabulary, read_reviews, write_tables
from _whole_watch import CardWatch

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
SENTENCE, OTHER = "服务人员都很亲切", "房间很脏，空调太吵"
DOES_NOT_FIT = 3
WORKER_SECONDS = 300
MAKERS = 3
"""Processes that make models: a large one takes some seconds."""
# The second of two readings has more digits: 0.01 GB (9.6 MiB).
_PREDICTED = re.compile(r"([\d.]+) ([KMGT]iB)\)? at the peak by prediction")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DURATION = r"(?:(\d+) h )?(?:(\d+) min ?)?(?:([\d.]+) (ms|s))?"
_ABOUT = re.compile(r"about " + _DURATION)


# ---- helpers in other processes ----


class Worker:
    """The process of _whole_worker.py. A request that hangs ends it; the next starts another."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self._environment = environment
        self._log = log
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer; an `error` where there is none."""
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                if select.select([process.stdout], [], [], WORKER_SECONDS)[0]:
                    line = process.stdout.readline()
                    if line:
                        found: dict[str, Any] = json.loads(line)
                        return found
            except OSError:
                pass
            self._end()
            return {"error": f"no answer to {request.get('do')}; see {self._log}"}

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            with self._log.open("a") as log:
                self._process = subprocess.Popen(
                    [sys.executable, str(HERE / "_whole_worker.py")], env=self._environment,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                )  # fmt: skip
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process = None


@dataclass
class Bench:
    """What all runs share: folders, tables, models, the card."""

    options: argparse.Namespace
    work: Path
    card: CardWatch | None
    environment: dict[str, str]
    tables: dict[str, Path] = field(default_factory=dict)
    vocabulary: Path = Path()
    real: dict[str, str] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # On two cores a second import of torch costs more than waiting for the first.
        count = 1 if self.options.cpu else MAKERS
        no_card = {**self.environment, "CUDA_VISIBLE_DEVICES": ""}
        self.makers = [Worker(no_card, self.work / f"maker-{at}.log") for at in range(count)]
        self.loader = self.makers[0]
        if not self.options.cpu:
            self.loader = Worker(self.environment, self.work / "loader.log")
        self._idle_makers: queue.Queue[Worker] = queue.Queue()
        for maker in self.makers:
            self._idle_makers.put(maker)
        self._stock_lock = threading.Lock()
        self._stock_f1: dict[tuple[str, int], float | None] = {}
        self.real = dict(one.split("=", 1) for one in self.options.real)
        self._prepare_data()

    def _prepare_data(self) -> None:
        options = self.options
        rows = options.rows if options.rows > 0 else None
        characters = 2_000 if options.cpu else 20_000
        if options.data:
            reviews = read_reviews(options.data)
        else:
            reviews = make_reviews(rows or 7_000, characters)
        self.tables = write_tables(reviews[:rows], self.work / "tables")
        if self.real or not options.cpu:
            self.tables["full"] = write_tables(reviews, self.work / "full")["single"]
        if options.vocab:
            self.vocabulary = options.vocab
        else:
            self.vocabulary = self.work / "vocab.txt"
            self.vocabulary.write_text("\n".join(make_vocabulary(characters)), encoding="utf-8")

    def make_models(self, names: list[str]) -> None:
        """Starts making the folders, in this order, in the background."""
        kind = "tiny" if self.options.cpu else "made"
        pool = ThreadPoolExecutor(len(self.makers))
        for name in dict.fromkeys(names):
            if name not in self.real and name not in self.made:
                self.made[name] = pool.submit(self._make, name, self.models / f"{kind}-{name}")
        pool.shutdown(wait=False)

    @property
    def models(self) -> Path:
        """Where made models are kept."""
        return self.options.models or self.work / "models"

    def _make(self, name: str, folder: Path) -> Path:
        if not (folder / "config.json").is_file():
            folder.parent.mkdir(parents=True, exist_ok=True)
            vocabulary = str(self.vocabulary)
            maker = self._idle_makers.get()
            try:
                answer = maker.ask(
                    do="make", model=name, folder=str(folder), vocabulary=vocabulary,
                    tiny=self.options.cpu,
                )  # fmt: skip
            finally:
                self._idle_makers.put(maker)
            if "error" in answer:
                raise RuntimeError(f"{name} was not made: {answer}")
        return folder

    def model(self, name: str) -> str:
        """The folder of a model, waited for."""
        return self.real.get(name) or str(self.made[name].result())

    def stock_f1(self, case: Case) -> float | None:
        """F1 of the stock Trainer in fp32 on the rows of this case; each is trained once."""
        from _whole_seeds import single_stock_f1

        key = case.model, case.epochs
        with self._stock_lock:
            if key not in self._stock_f1:
                table, model = str(self.tables[case.task]), self.real[case.model]
                self._stock_f1[key] = single_stock_f1(self, table, model, case.epochs)
            return self._stock_f1[key]

    def drop_model(self, name: str) -> None:
        """Frees the disk of a made model, unless a folder for them was named."""
        if name in self.made and self.options.models is None:
            with contextlib.suppress(RuntimeError):  # it was never made
                shutil.rmtree(self.made[name].result(), ignore_errors=True)

    def run(
        self, words: list[str], folder: Path, more: dict[str, str] | None = None, **how: Any
    ) -> Ended:
        """One process, watched; `more` is added to its environment."""
        return watched(
            words, folder=folder, card=self.card, environment=self.environment | (more or {}),
            timeout_seconds=self.options.timeout, **how,
        )  # fmt: skip

    def memfit(self, words: list[str], folder: Path, **how: Any) -> Ended:
        """`memfit ...`, watched."""
        return self.run([sys.executable, "-m", "memfit", *words], folder, **how)

    def close_workers(self) -> None:
        """Ends the helpers; a later request starts them again."""
        for worker in {*self.makers, self.loader}:
            worker.close()

    def close(self) -> None:
        """Ends what was started."""
        self.close_workers()
        if self.card is not None:
            self.card.close()


# ---- one case ----


def run_case(bench: Bench, case: Case) -> dict[str, Any]:
    """Trains, kills and resumes where asked, loads and asks the result; all that was seen."""
    folder = bench.work / "runs" / re.sub(r"[^\w.]+", "-", case.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    words = case.command(str(bench.tables[case.task]), bench.model(case.model), str(folder))
    noted = folder.with_name(folder.name + ".reserved")
    noted.unlink(missing_ok=True)
    more = acting(bench, case, noted) if case.card else {}
    more |= {"MEMFIT_SHARE_GPU": "1"} if case.ranks > 1 else {}
    processes = [bench.memfit(words, folder, more=more, kill_at=case.kill_at)]
    if processes[0].killed_at is not None:
        again = ["train", "--resume", "--output-dir", str(folder)]
        processes.append(bench.memfit(again, folder))
    found = described(case, folder, processes)
    if case.card:
        found |= reserved(folder, processes[0], noted)
    if case.ranks > 1:
        found |= held_by_ranks(folder, found)
    if found["exit_code"] == 0:
        found |= asked(bench, case, folder)
        if case.model in bench.real and case.task == "full" and case.ranks == 1:
            found["stock_f1"] = bench.stock_f1(case)
    found["outcome"] = outcome(case, found)
    if found["outcome"] == "lost" or bench.options.keep_output:
        found["output_tail"] = [one.said.text[-4000:] for one in processes]
    if not bench.options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def described(case: Case, folder: Path, processes: list[Ended]) -> dict[str, Any]:
    """What was measured of the run, beside what it said of itself."""
    first, last = processes[0], processes[-1]
    summary = read_json(folder / "summary.json")
    begun = first.progress.begun or summary
    memory, plan = summary.get("memory") or begun.get("memory") or {}, begun.get("plan") or {}
    final = summary.get("plan") or plan
    predicted = ((begun.get("memory") or {}).get("predicted") or {}).get("device_bytes")
    printed = printed_bytes(first)
    if printed is not None and (predicted is None or abs(printed / predicted - 1) > 0.02):
        predicted = printed
    held = [one.held["highest_bytes"] for one in processes if one.held]
    if held:
        held_bytes, by = max(held), (first.held or {})["by"]
    else:
        measured = memory.get("measured") or {}
        held_bytes, by = measured.get("device_bytes"), "the run's own count of tensors"
    budget_bytes = memory.get("budget_bytes") or asked_bytes(case.budget)
    said_seconds = said_beforehand(first)
    return {
        "case": asdict(case), "exit_code": last.exit_code,
        "processes": [one.as_json() for one in processes],
        "budget_bytes": budget_bytes, "predicted_bytes": predicted, "printed_bytes": printed,
        "held_bytes": held_bytes, "held_by": by,
        "held_over_predicted": ratio(held_bytes, predicted),
        "held_over_budget": ratio(held_bytes, budget_bytes),
        "time": {**said_seconds, "summary": summary.get("seconds")},
        "metrics": summary.get("metrics"), "steps": (summary.get("training") or {}).get("steps"),
        "max_steps": last.progress.max_steps,
        "fidelity": final.get("fidelity"), "strategies": final.get("strategies"),
        "micro_batching": final.get("micro_batching"), "planned_strategies": plan.get("strategies"),
        "plan_toml": read_text(folder / "plan.toml"),
        "adjustments": adjustments(folder), "notes": notes(processes),
    }  # fmt: skip


def acting(bench: Bench, case: Case, noted: Path) -> dict[str, str]:
    """The environment of a run on a card that acts as another and notes what torch reserves."""
    hook = f"{HERE / '_whole_hook'}{os.pathsep}{bench.environment['PYTHONPATH']}"
    return {"MEMFIT_ACT_AS": case.card, "WHOLE_RUNS_RESERVED": str(noted), "PYTHONPATH": hook}


def reserved(folder: Path, process: Ended, noted: Path) -> dict[str, Any]:
    """What torch's allocator reserved, beside what it might and what was predicted of it."""
    summary = read_json(folder / "summary.json")
    memory = (process.progress.begun or summary).get("memory") or {}
    predicted = memory.get("predicted") or {}
    measured = (summary.get("memory") or {}).get("measured") or {}
    peaks = [int(line) for line in (read_text(noted) or "").split()]
    peaks += [measured["reserved_bytes"]] if measured else []
    held_bytes, predicted_bytes = max(peaks, default=None), predicted.get("reserved_bytes")
    context_bytes = (predicted.get("components") or {}).get("context")
    limit_bytes = None
    if memory.get("budget_bytes") and context_bytes is not None:
        limit_bytes = memory["budget_bytes"] - context_bytes
    return {
        "budget_bytes": limit_bytes, "predicted_bytes": predicted_bytes,
        "held_bytes": held_bytes, "held_by": "torch's allocator",
        "predicted_context_bytes": context_bytes,
        "held_over_predicted": ratio(held_bytes, predicted_bytes),
        "held_over_budget": ratio(held_bytes, limit_bytes),
    }  # fmt: skip


def held_by_ranks(folder: Path, found: dict[str, Any]) -> dict[str, Any]:
    """The most that one of several ranks held, as each counts itself."""
    told = read_json(folder / "summary.json").get("ranks") or []
    each = [one["peak_bytes"] for one in told]
    held_bytes = max(each, default=None)
    return {
        "rank_bytes": each, "held_bytes": held_bytes, "held_by": "each rank's own count",
        "held_over_predicted": ratio(held_bytes, found["predicted_bytes"]),
        "held_over_budget": ratio(held_bytes, found["budget_bytes"]),
    }  # fmt: skip


def asked(bench: Bench, case: Case, folder: Path) -> dict[str, Any]:
    """What plain transformers and, for some, `memfit predict` make of the result."""
    pair = OTHER if case.task == "pairs" else None
    found: dict[str, Any] = {}
    if bench.card is not None and not bench.card.tells_apart:
        bench.loader.close()  # its memory would be the next run's
    found["loaded"] = bench.loader.ask(do="load", folder=str(folder), text=SENTENCE, pair=pair)
    if case.predict or bench.options.predict_all:
        words = [sys.executable, "-m", "memfit", "predict", str(folder), "--json"]
        done = subprocess.run(
            [*words, *predict_words(case, bench.work)], capture_output=True, text=True,
            env=bench.environment, timeout=bench.options.timeout, check=False,
        )  # fmt: skip
        answer = done.stdout[-2000:] or done.stderr[-2000:]
        with contextlib.suppress(ValueError):
            answer = json.loads(done.stdout)
        found["predicted"] = {"exit_code": done.returncode, "answer": answer}
    return found


def predict_words(case: Case, work: Path) -> list[str]:
    """The sentence, or a file of a pair."""
    if case.task != "pairs":
        return [SENTENCE]
    table = work / "pair.csv"
    table.write_text(f'review,other\n{SENTENCE},"{OTHER}"\n', encoding="utf-8")
    return ["--file", str(table)]


def outcome(case: Case, found: dict[str, Any]) -> str:
    """`finished`, `does not fit` (said before the first step), or `lost`."""
    begun = any(one["seconds"]["first_step"] is not None for one in found["processes"])
    if found["exit_code"] == DOES_NOT_FIT and not begun:
        return "does not fit"
    loads = "error" not in found.get("loaded", {"error": "never loaded"})
    answers = found.get("predicted", {}).get("exit_code", 0) == 0
    whole = found["steps"] is not None and found["steps"] == found["max_steps"]
    ended = found["exit_code"] == 0 and loads and answers and whole
    if ended and case.kill_at is not None and len(found["processes"]) == 1:
        return "finished, never killed"
    return "finished" if ended else "lost"


# ---- what a run said ----


def printed_bytes(process: Ended) -> int | None:
    """The prediction as it was printed, the last time before the first step."""
    found = None
    for at, line in process.said.lines:
        match = _PREDICTED.search(line)
        if match and before_first_step(process, at):
            found = round(float(match[1]) * _UNITS[match[2]])
    return found


def said_beforehand(process: Ended) -> dict[str, Any]:
    """How long it would take, as said last before the first step, and how long it took."""
    told: list[dict[str, Any]] = []
    for at, line in process.said.lines:
        for match in _ABOUT.finditer(line):
            seconds = duration(match)
            if seconds is not None and before_first_step(process, at):
                told.append({"at": round(at, 2), "seconds": seconds, "line": line.strip()})
    found: dict[str, Any] = {"said": told}
    last = process.progress.last_step_at
    if told and last is not None and process.killed_at is None:
        taken = last - told[-1]["at"]
        found |= {
            "said_seconds": told[-1]["seconds"],
            "taken_seconds": round(taken, 2),
            "to_the_end_seconds": round(process.seconds - told[-1]["at"], 2),
            "said_over_taken": ratio(told[-1]["seconds"], taken),
        }
    return found


def duration(match: re.Match[str]) -> float | None:
    """Seconds of '2 h 05 min', '3 min 20 s', '12 s', '40 ms'."""
    hours, minutes, rest, unit = match.groups()
    if hours is None and minutes is None and rest is None:
        return None
    seconds = float(rest or 0) / (1000 if unit == "ms" else 1)
    return int(hours or 0) * 3600 + int(minutes or 0) * 60 + seconds


def before_first_step(process: Ended, at: float) -> bool:
    """Whether that second was before the first step ended."""
    first = process.progress.first_step_at
    return first is None or at <= first


def notes(processes: list[Ended]) -> list[str]:
    """Lines that tell of a changed plan, memory that ran out, or an error."""
    told = re.compile(r"^(note|warning|memfit:)|out of memory|instead|again|bug in memfit", re.I)
    lines = (line.strip() for one in processes for _, line in one.said.lines)
    return list(dict.fromkeys(line[:300] for line in lines if told.search(line)))[:20]


def adjustments(folder: Path) -> list[Any]:
    """What the guard changed while it trained."""
    found = []
    for line in (read_text(folder / "progress.jsonl") or "").splitlines():
        with contextlib.suppress(ValueError):
            logged = json.loads(line).get("logged") or {}
            found += [value for key, value in logged.items() if "adjust" in key]
    return found


def asked_bytes(budget: str) -> int | None:
    """A budget that names bytes; of others only the run knows what they come to."""
    from memfit.units import parse_budget

    return parse_budget(budget).bytes


def ratio(one: float | None, other: float | None) -> float | None:
    """Rounded; None where one is unknown."""
    return round(one / other, 4) if one is not None and other else None


def read_json(path: Path) -> dict[str, Any]:
    """What the file says; nothing where there is none."""
    text = read_text(path)
    try:
        found: dict[str, Any] = json.loads(text) if text else {}
    except ValueError:
        return {}
    return found


def read_text(path: Path) -> str | None:
    """The file's text; None where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


# ---- the result file ----


class ResultFile:
    """Rows by their names; written after each, so that a cut-off go loses nothing."""

    def __init__(self, path: Path, *, append: bool, commit: str) -> None:
        self.path = path
        self.commit = commit
        self.values: dict[str, Any] = read_json(path) if append else {}
        self.values.setdefault("machine", None)
        self.values.setdefault("runs", [])
        self._lock = threading.Lock()

    def machine(self, stamp: dict[str, Any]) -> None:
        """Where it is measured; every row of this go names its time and commit beside."""
        with self._lock:
            self.values["machine"] = stamp
            self._write()

    def add(self, row: dict[str, Any], part: str = "runs") -> None:
        """In the place of an earlier row of that name."""
        row = {"name": row["name"], "commit": self.commit, "date": now(), **row}
        with self._lock:
            rows = self.values.setdefault(part, [])
            names = [one["name"] for one in rows]
            if row["name"] in names:
                rows[names.index(row["name"])] = row
            else:
                rows.append(row)
            self._write()

    def _write(self) -> None:
        self.values["summary"] = summarize(self.values["runs"]) | real_points(self.values["runs"])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.values, indent=1, ensure_ascii=False)
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(self.path)


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """How many were lost or above their budget, and how far predictions were off."""
    off = sorted(
        abs(run["held_over_predicted"] - 1)
        for run in runs
        if run["held_over_predicted"] is not None
    )
    timed = [run["time"].get("said_over_taken") for run in runs]
    timed = sorted(abs(one - 1) for one in timed if one is not None)
    plans = Counter(
        ", ".join(run["strategies"] or ()) for run in runs if run["outcome"].startswith("finished")
    )
    return {
        "runs": len(runs),
        "lost": [run["name"] for run in runs if run["outcome"] == "lost"],
        "does_not_fit": [run["name"] for run in runs if run["outcome"] == "does not fit"],
        "over_budget": [run["name"] for run in runs if (run["held_over_budget"] or 0) > 1],
        "prediction_off_median": statistics.median(off) if off else None,
        "prediction_off_worst": off[-1] if off else None,
        "time_off_worst": timed[-1] if timed else None,
        "longest_silence_seconds": max(
            (one["longest_silence_seconds"] for run in runs for one in run["processes"]),
            default=None,
        ),
        "plans_most_often_chosen": plans.most_common(5),
    }


def real_points(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Points of F1 of single runs with pre-trained weights above the stock Trainer's in fp32."""
    return {
        "points_from_stock": {
            run["name"]: round(100 * (run["metrics"]["f1"] - run["stock_f1"]), 2)
            for run in runs
            if run.get("stock_f1") is not None and "f1" in (run["metrics"] or {})
        }
    }


def now() -> str:
    """The minute, in UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def commit_here() -> str:
    """The commit of the tree, marked where files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=HERE, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    found = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src")
    return (found or "unknown") + ("+changes" if changed else "")


# ---- all of them ----


def run_all(bench: Bench, cases: list[Case], results: ResultFile) -> None:
    """Side by side as far as asked for and as the driver can tell processes apart."""
    options, jobs = bench.options, bench.options.jobs
    alone = bench.card is not None and not bench.card.tells_apart
    if alone and jobs > 1:
        print("the driver does not tell processes apart: one run at a time", flush=True)
        jobs = 1
    bench.make_models([case.model for case in cases])
    stamped = ThreadPoolExecutor(1).submit(lambda: bench.loader.ask(do="stamp"))
    if alone:
        results.machine(stamped.result())
        bench.loader.close()
    deadline = time.monotonic() + options.deadline if options.deadline else None
    done = 0
    lock = threading.Lock()
    still = Counter(case.model for case in cases)

    def one(case: Case) -> None:
        nonlocal done
        if deadline is not None and time.monotonic() > deadline:
            print(f"not begun, for lack of time: {case.name}", flush=True)
            return
        started = time.monotonic()
        try:
            found = run_case(bench, case)
        except Exception as error:
            found = failed(case, error)
        found |= {"name": case.name, "jobs": jobs, "bench_seconds": time.monotonic() - started}
        found["weights"] = "real" if case.model in bench.real else "random"
        results.add(found, "acted" if case.card else "ranks" if case.ranks > 1 else "runs")
        with lock:
            done += 1
            still[case.model] -= 1
            if not still[case.model]:
                bench.drop_model(case.model)
            print(f"[{done}/{len(cases)}] {sentence(found)}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, cases))
    if not alone:
        results.machine(stamped.result())


def failed(case: Case, error: Exception) -> dict[str, Any]:
    """A row for a case that this script could not run."""
    nothing = dict.fromkeys(
        ("exit_code", "budget_bytes", "predicted_bytes", "held_bytes", "held_over_predicted",
         "held_over_budget", "metrics", "steps", "fidelity", "strategies")
    )  # fmt: skip
    told = f"{type(error).__name__}: {error}"
    more: dict[str, Any] = {"processes": [], "time": {}, "adjustments": [], "notes": [told]}
    return {"case": asdict(case), **nothing, **more, "outcome": "lost"}


def sentence(run: dict[str, Any]) -> str:
    """One line for who waits."""
    sizes = f"held {gb(run['held_bytes'])} of {gb(run['budget_bytes'])} GB"
    sizes += f", predicted {gb(run['predicted_bytes'])}"
    told = f"{run['name']}: {run['outcome']}, {sizes}, {run['bench_seconds']:.0f} s"
    if run["outcome"] == "lost":
        told += "".join(f"\n    {line}" for line in run["notes"][-4:])
    return told


def gb(size: int | None) -> str:
    """For a table whose head names the unit."""
    if size is None:
        return "-"
    return f"{size / 1e9:.2f}" if size >= 5e8 else f"{size / 1e9:.4f}"


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("run", lambda run: str(run["name"])),
    ("outcome", lambda run: str(run["outcome"])),
    ("budget", lambda run: gb(run["budget_bytes"])),
    ("said", lambda run: gb(run["predicted_bytes"])),
    ("held", lambda run: gb(run["held_bytes"])),
    ("held/said", lambda run: told_ratio(run["held_over_predicted"])),
    ("silent s", lambda run: seconds_of(run, "longest_silence_seconds")),
    ("1st step s", lambda run: seconds_of(run, "seconds", "first_step")),
    ("end s", lambda run: seconds_of(run, "seconds", "end")),
    ("said/took", lambda run: told_ratio(run["time"].get("said_over_taken"))),
    ("metric", lambda run: metric(run)),
    ("adjusted", lambda run: str(len(run["adjustments"]))),
    ("plan", lambda run: f"{run['fidelity']}: {', '.join(run['strategies'] or ())}"),
)


def told_ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def seconds_of(run: dict[str, Any], *keys: str) -> str:
    """The largest of the run's processes."""
    found = []
    for process in run["processes"]:
        value: Any = process
        for key in keys:
            value = value[key]
        if value is not None:
            found.append(value)
    return f"{max(found):.1f}" if found else "-"


def metric(run: dict[str, Any]) -> str:
    metrics = run["metrics"] or {}
    name = next((one for one in ("f1", "mse") if one in metrics), None)
    return f"{name} {metrics[name]:.3f}" if name else "-"


def table(runs: list[dict[str, Any]]) -> str:
    """All rows in columns."""
    rows = [[head for head, _ in COLUMNS], *([make(run) for _, make in COLUMNS] for run in runs)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def environment() -> dict[str, str]:
    """As a person's shell has it, with this checkout's memfit, in English and offline."""
    source = str(HERE.parent / "src")
    paths = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    paths = [str(Path(one).resolve()) for one in paths]
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([source, *paths])),
        "MEMFIT_LANG": "en", "HF_HUB_OFFLINE": "1", "TERM": "xterm-256color",
    }  # fmt: skip


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases asked for; an unknown name is an error."""
    names = [one.partition("=")[0] for one in options.real]
    more = [case for name in names if name not in MADE_MODELS for case in real_cases(name)]
    usual = CPU_CASES if options.cpu else (*CASES, *ACTED_CASES, *RANK_CASES)
    cases = {case.name: case for case in (*more, *usual)}
    if not options.only:
        return list(cases.values())
    names = [name.strip() for name in options.only.split(",")]
    # All of them, whatever they are called.
    groups = {"real": more, "acted": ACTED_CASES, "ranks": RANK_CASES}
    names = [
        one for name in names for one in ([case.name for case in groups.get(name, ())] or [name])
    ]
    unknown = [name for name in names if name not in cases]
    if unknown:
        raise SystemExit(f"no such case: {', '.join(unknown)}; there are: {', '.join(cases)}")
    return [cases[name] for name in names]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="a CSV with `label` (0 or 1) and `review`; else one is made up")
    add("--vocab", type=Path, help="a BERT vocabulary; else one of made-up texts' characters")
    add("--rows", type=int, help="of the table (0: all; else 1600, with --cpu 96)")
    add("--real", action="append", default=[], metavar="NAME=FOLDER", help="pre-trained weights")
    groups = "or all of a kind: real, acted, ranks"
    add("--only", help=f"names of cases, separated by commas (of --stock by ;), {groups}")
    add("--jobs", type=int, default=1)
    add("--out", type=Path, help="the result file")
    add("--append", action="store_true", help="keep the file's other rows")
    add("--commit", help="where this is no git checkout")
    add("--timeout", type=float, default=240.0, help="seconds of one process")
    add("--deadline", type=float, help="seconds after which no further case begins")
    add("--models", type=Path, help="a folder that keeps made models")
    add("--work", type=Path, help="a folder for tables and runs, else a temporary one")
    add("--keep", action="store_true", help="keep the run folders")
    add("--keep-output", action="store_true", help="keep the end of every run's output")
    add("--predict-all", action="store_true", help="`memfit predict` after every case")
    add("--cpu", action="store_true", help="small models, without a card")
    add("--list", action="store_true", help="only name the cases")
    add("--stock", action="store_true", help="the time of two runs beside a stock bf16 script's")
    add("--seeds", type=int, help="paired seeds: F1 of --plans beside stock fp32 AdamW")
    add("--first-seed", type=int, default=0, help="of --seeds")
    add("--no-dropout", action="store_true", help="with --seeds: both sides without dropout")
    add("--learning-rate", type=float, default=2e-5, help="of --seeds")
    add("--plans", nargs="*", default=["4GB"], help="budgets, with flags, or plan.toml files")
    options = parser.parse_args()
    if options.rows is None:
        whole = options.stock or options.seeds
        options.rows = 0 if whole else 96 if options.cpu else 1600
    if options.out is None:
        options.out = RESULTS / ("whole_runs_cpu.json" if options.cpu else "whole_runs_h200.json")
    return options


def stopped(number: int, _: object) -> None:
    """Leaves nothing running; what was measured is in the file."""
    kill_all()
    os._exit(128 + number)


def main() -> None:
    options = parsed()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stopped)
    if options.list:
        print("\n".join(case.name for case in chosen(options)))
        return
    cases = [] if options.stock or options.seeds else chosen(options)
    card = None if options.cpu else CardWatch()
    if card is not None and card.problem:
        raise SystemExit(
            f"NVML (pip install nvidia-ml-py) shows no card, {card.problem}; try --cpu"
        )
    results = ResultFile(options.out, append=options.append, commit=options.commit or commit_here())
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        shell = environment()
        shell.setdefault("MEMFIT_CACHE", str(work / "cache"))
        if options.cpu:
            shell["CUDA_VISIBLE_DEVICES"] = ""
        if options.jobs > 1:  # side by side, each as if it had all cores, they only wait
            threads = max((os.cpu_count() or 1) // options.jobs, 1)
            shell.setdefault("OMP_NUM_THREADS", str(threads))
        bench = Bench(options, work, card, shell)
        stack.callback(bench.close)
        if options.seeds:
            import _whole_seeds

            _whole_seeds.compare(bench, results)
        elif options.stock:
            import _whole_stock_pairs

            _whole_stock_pairs.compare(bench, results)
        else:
            run_all(bench, cases, results)
            parts = ("runs", "acted", "ranks")
            print(table([run for part in parts for run in results.values.get(part, [])]))
            print(json.dumps(results.values["summary"], indent=1))


if __name__ == "__main__":
    main()
