"""Runs every rung in a process of its own and stores each result, so that none runs twice.

    ladder/ladder.toml          the settings
    ladder/rungs/NAME-KEY.json  a rung's result; KEY is a digest of all that decides it
    ladder/rungs/NAME-KEY.log   the output of its process
    ladder/ladder.json, .md     the table

A stored result is used again when its key is the same: after Ctrl-C the same command goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from memfit.config import RunConfig
from memfit.config.files import atomic_writer, read_json, write_json
from memfit.config.training_fields import check_training
from memfit.data.table_files import check_source
from memfit.errors import ConfigError, InputError, OutputError, nearest
from memfit.i18n import ENVIRONMENT, language, t
from memfit.ladders import show
from memfit.ladders.rungs import (
    AUTO,
    BASELINE,
    DOES_NOT_FIT,
    FAILED,
    HALF,
    NAMES,
    OK,
    PLAN,
    Ladder,
    Rung,
    RungOutcome,
    classic_rungs,
    plan_rungs,
)
from memfit.models.loading import check_model_folder
from memfit.records.results import versions
from memfit.run.resume import with_absolute_paths
from memfit.units import parse_budget
from memfit.waiting import doing

Say = Callable[[str], None]

_KILLED = -9

_STOP_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class LadderRequest:
    """The rungs to climb and how thoroughly, beside the run itself."""

    steps: int = 20
    quality: bool = False
    seeds: int = 3
    """Seeds of the metric, where quality is asked for."""
    rungs: Sequence[str] = ()
    """Names, also with commas; empty is all of them."""
    plan_budgets: Sequence[str] = ()
    fresh: bool = False

    def __post_init__(self) -> None:
        for flag, value in (("--steps", self.steps), ("--seeds", self.seeds)):
            if value < 1:
                raise ConfigError("{flag} is {value}; write 1 or more", flag=flag, value=value)
        for name in ("rungs", "plan_budgets"):
            words = ",".join(getattr(self, name)).split(",")
            object.__setattr__(self, name, tuple(word.strip() for word in words if word.strip()))
        for name in self.rungs:
            if name not in NAMES:
                raise ConfigError(
                    "there is no rung {name}; they are {known}.{hint}",
                    name=repr(name),
                    known=", ".join(NAMES),
                    hint=nearest(name, NAMES),
                )
        for budget in self.plan_budgets:
            if budget != HALF:
                parse_budget(budget)

    def wants(self, name: str) -> bool:
        """Whether a rung is climbed; the baseline always is, for comparison."""
        return not self.rungs or name in (*self.rungs, BASELINE)


def climb(config: RunConfig, asked: LadderRequest, say: Say) -> Ladder:
    """Runs the rungs without a stored result and writes the ladder after each of them."""
    config = with_absolute_paths(config).asked
    unused = {"class_weights": config.class_weights, "threshold": config.threshold,
              "early_stopping": config.early_stopping, "gpus": config.gpus,
              "positive_label": config.data.positive_label}  # fmt: skip
    for option, value in unused.items():
        if value is not None:
            raise ConfigError(
                "the ladder does not use {option}: its rungs compare memory, time and F1 of "
                "the plain training; leave it out",
                option=option,
            )
    # Checked here too: the first rung's process needs seconds before it can complain.
    check_model_folder(config.model)
    check_source(config.data.path)
    check_training(config.training)
    folder = Path(config.output_dir or "ladder")
    is_new = not folder.exists()
    _open(folder)
    climber = _Climber(config, asked, say, folder)
    try:
        climber.measure()
        climber.score()
    except InputError:
        if is_new:
            shutil.rmtree(folder)
        raise
    except KeyboardInterrupt:
        climber.write()
        say(
            t(
                "what is measured is kept in {folder}; the same command goes on from there",
                folder=folder,
            )
        )
        raise
    climber.write()
    return climber.ladder()


def _open(folder: Path) -> None:
    """Takes a new folder, an empty one, or one that holds a ladder."""
    if folder.exists() and not folder.is_dir():
        raise OutputError("cannot write to {folder}: it is a file; name a folder", folder=folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "rungs").is_dir():
        raise OutputError(
            "the folder {folder} holds something else; name another with --output-dir",
            folder=folder,
        )
    try:
        (folder / "rungs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            "cannot make the folder {folder}: {reason}", folder=folder, reason=error.strerror
        ) from None


@dataclass
class _Climber:
    config: RunConfig
    asked: LadderRequest
    say: Say
    folder: Path
    outcomes: dict[str, RungOutcome] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """What the processes reported about the machine, the data and the metric."""

    def __post_init__(self) -> None:
        with atomic_writer(self.folder / "ladder.toml") as file:
            file.write(self.config.to_toml())
        for rung in classic_rungs(self.config):
            if self.asked.wants(rung.name):
                self._add(rung)
        given = self.config.budget
        self._budgets = self.asked.plan_budgets or (() if given == AUTO else (given,))
        # A table or a model that was changed in place gives other results.
        data, model = self.config.data, Path(self.config.model.model)
        paths = [Path(path) for path in (data.path, data.validation_file or "") if path]
        paths += sorted(model.iterdir()) if model.is_dir() else []
        stats = [(path.name, path.stat()) for path in paths if path.is_file()]
        self._inputs = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]

    def _add(self, rung: Rung) -> None:
        self.outcomes[rung.name] = RungOutcome(rung=rung, fidelity=rung.fidelity)

    def measure(self) -> None:
        """Measures memory and time of every rung; the plans are for the baseline's needs."""
        self._measure(BASELINE)
        base, device = self.outcomes[BASELINE], self.facts.get("device", {})
        peak = base.predicted or base.measured
        for rung in plan_rungs(
            self._budgets,
            baseline_bytes=None if peak is None else peak.device_bytes,
            card_bytes=device.get("total_bytes") if device.get("type") == "cuda" else None,
        ):
            if self.asked.wants(PLAN):
                self._add(rung)
        for name in list(self.outcomes)[1:]:
            if self._is_unlimited_plan(self.outcomes[name].rung):
                del self.outcomes[name]
                continue
            self._measure(name)
            # Nobody asked for a default budget: one that no plan fits is no rung.
            one = self.outcomes[name]
            default = one.rung.kind == PLAN and one.rung.budget != AUTO and not self._budgets
            if default and one.status == DOES_NOT_FIT and one.predicted is None:
                del self.outcomes[name]

    def _is_unlimited_plan(self, rung: Rung) -> bool:
        """Whether the fastest plan of all fits this default budget, and would be chosen again."""
        fastest = self.outcomes.get(f"{PLAN}-{AUTO}")
        if self._budgets or rung.kind != PLAN or fastest is None or fastest.predicted is None:
            return False
        return fastest.predicted.device_bytes <= (parse_budget(rung.budget).bytes or 0)

    def _measure(self, name: str) -> None:
        rung = self.outcomes[name].rung
        names = list(self.outcomes)
        # The plans are known after the baseline.
        more = (len(self._budgets) or 2) * self.asked.wants(PLAN) if name == BASELINE else 0
        count = len(names) + more
        place = f"[{names.index(name) + 1}/{count}] {show.name_of(rung)}"
        found = self._result(rung, None, place)
        for fact in ("device", "rows", "budget_bytes"):
            if fact in found:
                self.facts.setdefault(fact, found[fact])
        if name == BASELINE and found.get("input_is_wrong"):
            raise InputError(found["why"])  # no rung would do better
        self.outcomes[name] = RungOutcome.from_json({"rung": asdict(rung), **found})
        self.say(t("{name}: {why}", name=place, why=show.in_short(self.outcomes[name])))
        self.write()

    def score(self) -> None:
        """Trains every rung that ran to its end, seed by seed, so that all have the first soon."""
        first = int(self.config.training.get("seed") or self.config.data.seed)
        for seed in range(first, first + (self.asked.seeds if self.asked.quality else 0)):
            for name, outcome in self.outcomes.items():
                if outcome.status != OK:
                    continue
                place = t("{rung}, seed {seed}", rung=show.name_of(outcome.rung), seed=seed)
                found = self._result(outcome.rung, seed, place)
                if found["status"] != OK:
                    self.say(t("{name}: {why}", name=place, why=found["why"]))
                    continue
                self.facts |= {"metric": found["metric"], "epochs": found["epochs"]}
                scores = {**outcome.scores, seed: float(found["value"])}
                self.outcomes[name] = replace(outcome, scores=scores)
                score = f"{show.metric_name(self.ladder())} {found['value']:.4f}"
                self.say(t("{name}: {why}", name=place, why=score))
                self.write()

    def ladder(self) -> Ladder:
        """Everything known so far."""
        return Ladder(
            model=self.config.model.model,
            data=self.config.data.path,
            outcomes=tuple(self.outcomes.values()),
            steps=self.asked.steps,
            seeds=self.asked.seeds if self.asked.quality else 0,
            versions=versions(),
            folder=str(self.folder),
            **self.facts,
        )

    def write(self) -> None:
        """Writes ladder.json and ladder.md, each whole at any moment."""
        found = self.ladder()
        write_json(self.folder / "ladder.json", found.as_json())
        with atomic_writer(self.folder / "ladder.md") as file:
            file.write(show.markdown(found))

    def _result(self, rung: Rung, seed: int | None, place: str) -> dict[str, Any]:
        """The stored result, or that of a new process; a failure is tried again."""
        end = "" if seed is None else f"-seed{seed}"
        path = self.folder / "rungs" / f"{rung.name}{end}-{self.key(rung, seed)}.json"
        with contextlib.suppress(OutputError):
            if not self.asked.fresh and path.is_file():
                stored = read_json(path)
                if stored.get("status") in (OK, DOES_NOT_FIT):
                    return stored
        path.unlink(missing_ok=True)
        self.say(f"{place} …")
        request = {
            "config": str(self.folder / "ladder.toml"),
            "rung": asdict(rung),
            "steps": self.asked.steps,
            "seed": seed,
            # A plan is made once, and every seed trains by it.
            "plan_file": str(self.folder / "rungs" / f"{rung.name}-{self.key(rung, None)}.toml"),
        }
        timing = t("loading libraries and timing {steps} steps …", steps=self.asked.steps)
        with doing(timing if seed is None else t("training to the end …")):
            return run_process(request, path)

    def key(self, rung: Rung, seed: int | None) -> str:
        """A digest of all that decides a result."""
        decides: dict[str, Any] = {
            "config": {k: v for k, v in self.config.to_tables().items() if k != "output_dir"},
            "rung": asdict(replace(rung, targets=(), words={})),
            "inputs": self._inputs,
            "versions": versions(),
            "device": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            **({"steps": self.asked.steps} if seed is None else {"seed": seed}),
        }
        text = json.dumps(decides, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def run_process(request: dict[str, Any], path: Path) -> dict[str, Any]:
    """Runs one rung in a new process and returns its result, however the process ends."""
    environment = {**os.environ, ENVIRONMENT: language()}
    # The stock Trainer would split batches over several cards.
    environment.setdefault("CUDA_VISIBLE_DEVICES", "0")
    # Without -P a file in the current folder could take the place of a module.
    command = [
        sys.executable,
        "-P",
        "-m",
        "memfit.ladders.run_rung",
        json.dumps(request),
        str(path),
    ]
    log = path.with_suffix(".log")
    with log.open("w", encoding="utf-8", errors="replace") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise
    if path.is_file():
        return read_json(path)
    if code == _KILLED:
        status, why = DOES_NOT_FIT, t(
            "the system ended its process, as it does where memory runs out"
        )  # fmt: skip
    else:
        why = t("its process ended with code {code}; see {log}", code=code, log=log)
        status = FAILED
    found = {"status": status, "why": why}
    write_json(path, found)
    return found
