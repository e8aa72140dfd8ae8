"""Every rung in a process of its own; what is done is kept, and not done again.

    ladder/ladder.toml          the settings
    ladder/rungs/NAME-KEY.json  a rung's result; KEY is a digest of all that decides it
    ladder/rungs/NAME-KEY.log   what its process said
    ladder/ladder.json, .md, .png, .svg

A result is taken from the folder when its key is the same: after Ctrl-C the same command goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.config import RunConfig
from memfit.config.files import atomic_writer, read_json, why_not_written, write_json
from memfit.config.training_fields import check_training
from memfit.data.table_files import check_source
from memfit.errors import ConfigError, InputError, OutputError
from memfit.i18n import ENVIRONMENT, language, t
from memfit.ladders import show
from memfit.ladders import show as picture
from memfit.ladders.rungs import (
    AUTO,
    BASELINE,
    DOES_NOT_FIT,
    FAILED,
    NOT_RUN,
    OK,
    PLAN,
    Ladder,
    Rung,
    RungOutcome,
    check_choice,
    classic_rungs,
)
from memfit.ladders.rungs import plan_rungs as plans_for
from memfit.models.loading import check_model_folder
from memfit.records.results import stored_peak, versions
from memfit.run.prepare import with_absolute_paths
from memfit.units import parse_budget
from memfit.waiting import doing

_KILLED = -9

_STOP_SECONDS = 10


def rung_inputs(config: RunConfig) -> list[Any]:
    """Files that are read: a table or a model changed in place is another one."""
    paths = [Path(one) for one in (config.data.path, config.data.validation_file or "") if one]
    model = Path(config.model.model)
    paths += sorted(model.iterdir()) if model.is_dir() else []
    stats = [(one.name, one.stat()) for one in paths if one.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def kept_result(path: Path) -> dict[str, Any] | None:
    """A result that need not be made again; what failed may work now."""
    if not path.is_file():
        return None
    with contextlib.suppress(OutputError):
        found = read_json(path)
        return found if found.get("status") in (OK, DOES_NOT_FIT) else None
    return None


def run_process(request: dict[str, Any], path: Path) -> dict[str, Any]:
    """One process; however it ends, there is a result."""
    asked = write_json(path.with_suffix(".request"), request)
    environment = {**os.environ, ENVIRONMENT: language()}
    # Several cards would make the stock Trainer split batches over them.
    environment.setdefault("CUDA_VISIBLE_DEVICES", "0")
    # Without -P a file in the current folder could take the place of a module.
    command = [sys.executable, "-P", "-m", "memfit.ladders.run_rung", str(asked), str(path)]
    log = path.with_suffix(".log")
    with log.open("w", encoding="utf-8", errors="replace") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            code = process.wait()
        except BaseException:
            _stop(process)
            raise
        finally:
            asked.unlink(missing_ok=True)
    if path.is_file():
        return read_json(path)
    if code == _KILLED:
        found: dict[str, Any] = {
            "status": DOES_NOT_FIT,
            "why": t("the system ended its process, as it does where memory runs out"),
        }
    else:
        found = {
            "status": FAILED,
            "why": t("its process ended with code {code}; see {log}", code=code, log=log),
        }
    write_json(path, found)
    return found


def _stop(process: subprocess.Popen[Any]) -> None:
    """Ctrl-C reaches the process too; one that does not end is ended."""
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LadderRequest:
    """What is to be climbed, beside the run itself."""

    steps: int = 20
    seeds: int = 0
    """Seeds of the metric; 0 measures memory and time only."""
    rungs: tuple[str, ...] = ()
    """Names; empty is all of them."""
    plan_budgets: tuple[str, ...] = ()
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(
                t("{flag} is {value}; write 1 or more", flag="--steps", value=self.steps)
            )
        if self.seeds < 0:
            raise ConfigError(
                t("{flag} is {value}; write 1 or more", flag="--seeds", value=self.seeds)
            )
        check_choice(self.rungs, self.plan_budgets)

    @property
    def wants_plans(self) -> bool:
        """Whether memfit's own plans are part of it."""
        return not self.rungs or PLAN in self.rungs

    def wants(self, rung: Rung) -> bool:
        """The baseline always: the others are compared with it."""
        if rung.kind == PLAN:
            return self.wants_plans
        return not self.rungs or rung.name in (*self.rungs, BASELINE)


def _check_options(config: RunConfig) -> None:
    """Options of a run that no rung uses; the command line has none of them."""
    not_used = {
        "class_weights": config.class_weights,
        "threshold": config.threshold,
        "early_stopping": config.early_stopping,
        "gpus": config.gpus,
        "positive_label": config.data.positive_label,
    }
    for name, value in not_used.items():
        if value is not None:
            raise ConfigError(
                t(
                    "the ladder does not use {option}: its rungs compare memory, time and F1 of "
                    "the plain training; leave it out",
                    option=name,
                )
            )


def climb(config: RunConfig, asked: LadderRequest, say: Say) -> Ladder:
    """Runs what is not known yet and writes the ladder after every rung."""
    config = with_absolute_paths(config).asked
    _check_options(config)
    check_model_folder(config.model)
    check_source(config.data.path)  # the first rung's process would take seconds to say it
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
        say(
            t(
                "what is measured is kept in {folder}; the same command goes on from there",
                folder=folder,
            )
        )
        raise
    finally:
        _finish(climber)
    return climber.ladder()


def _finish(climber: _Climber) -> None:
    """Files and picture of what is there; that they cannot be written hides nothing else."""
    if not climber.climbed:
        return
    try:
        climber.write()
        if not picture.draw_ladder(climber.ladder(), climber.folder):
            climber.say(
                t(
                    "no picture: matplotlib is missing; install it with: pip install "
                    "'memfit[report]'"
                )
            )
    except OSError as error:
        climber.say(
            t("the ladder could not be written: {why}", why=why_not_written(error, climber.folder))
        )


def _open(folder: Path) -> None:
    """A new folder, an empty one, or one that holds a ladder."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(t("cannot write to {folder}: it is a file; name a folder", folder=folder))
    with contextlib.suppress(FileNotFoundError):
        if any(folder.iterdir()) and not (folder / "rungs").is_dir():
            raise OutputError(
                t(
                    "the folder {folder} holds something else; name another with --output-dir",
                    folder=folder,
                )
            )
    try:
        (folder / "rungs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            t("cannot make the folder {folder}: {reason}", folder=folder, reason=error.strerror)
        ) from None


@dataclass
class _Climber:
    config: RunConfig
    asked: LadderRequest
    say: Say
    folder: Path
    outcomes: dict[str, RungOutcome] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """What the processes said of the machine and the data."""
    metric: str = "f1"
    epochs: float | None = None

    def __post_init__(self) -> None:
        with atomic_writer(self.folder / "ladder.toml") as file:
            file.write(self.config.to_toml())
        rungs = [one for one in classic_rungs(self.config) if self.asked.wants(one)]
        self.outcomes = {one.name: RungOutcome(rung=one, fidelity=one.fidelity) for one in rungs}
        self._inputs = rung_inputs(self.config)

    @property
    def climbed(self) -> bool:
        """Whether there is anything to show."""
        return any(one.status != NOT_RUN for one in self.outcomes.values())

    def measure(self) -> None:
        """Memory and time of every rung; the baseline tells for what plans are made."""
        for name in list(self.outcomes):
            self._measure(name)
            if name == BASELINE:
                self._add_plans()
        for name, outcome in list(self.outcomes.items()):
            if outcome.rung.kind != PLAN:
                continue
            if self._is_unlimited_plan(outcome.rung):
                del self.outcomes[name]
            else:
                self._measure(name)

    def _is_unlimited_plan(self, rung: Rung) -> bool:
        """The fastest plan of all fits this budget: it would be the same one again."""
        fastest = self.outcomes.get(f"{PLAN}-{AUTO}")
        if self._budgets() or fastest is None or fastest.predicted is None or rung.budget == AUTO:
            return False
        limit_bytes = parse_budget(rung.budget).bytes
        return limit_bytes is not None and fastest.predicted.device_bytes <= limit_bytes

    @property
    def _count(self) -> int:
        """How many rungs there will be, as far as can be said before the baseline has run."""
        known = any(one.rung.kind == PLAN for one in self.outcomes.values())
        expected = 0 if known or not self.asked.wants_plans else len(self._budgets()) or 2
        return len(self.outcomes) + expected

    def _budgets(self) -> list[str]:
        given = list(self.asked.plan_budgets)
        return given or ([self.config.budget] if self.config.budget != AUTO else [])

    def _add_plans(self) -> None:
        base = self.outcomes[BASELINE]
        peak = base.predicted or base.measured
        device = self.facts.get("device", {})
        made = plans_for(
            self._budgets(),
            baseline_bytes=None if peak is None else peak.device_bytes,
            card_bytes=device.get("total_bytes") if device.get("type") == "cuda" else None,
        )
        for rung in made:
            if self.asked.wants(rung):
                self.outcomes[rung.name] = RungOutcome(rung=rung)

    def _measure(self, name: str) -> None:
        rung = self.outcomes[name].rung
        number = list(self.outcomes).index(name) + 1
        place = f"[{number}/{self._count}] {show.name_of(rung)}"
        found = self._result(rung, None, place)
        for fact in ("device", "rows", "budget_bytes"):
            if fact in found:
                self.facts.setdefault(fact, found[fact])
        if name == BASELINE and found.get("input_is_wrong"):
            raise InputError(found["why"])  # no rung would do better
        targets = tuple(found.get("targets", rung.targets))
        self.outcomes[name] = RungOutcome(
            rung=dataclasses.replace(rung, targets=targets),
            status=found["status"],
            why=found.get("why", ""),
            fidelity=found.get("fidelity", rung.fidelity),
            strategies=tuple(found.get("strategies", ())),
            predicted=stored_peak(found, "predicted"),
            measured=stored_peak(found, "measured"),
            step_seconds=tuple(found.get("step_seconds", ())),
            steps_per_epoch=int(found.get("steps_per_epoch", 0)),
        )
        self.say(t("{name}: {why}", name=place, why=show.in_short(self.outcomes[name])))
        self.write()

    def score(self) -> None:
        """The metric of every rung that ran, seed by seed, so that all have the first soon."""
        first = int(self.config.training.get("seed") or self.config.data.seed)
        for seed in range(first, first + self.asked.seeds):
            for name, outcome in list(self.outcomes.items()):
                if outcome.status != OK:
                    continue
                place = t("{rung}, seed {seed}", rung=show.name_of(outcome.rung), seed=seed)
                found = self._result(outcome.rung, seed, place)
                if found["status"] != OK:
                    self.say(t("{name}: {why}", name=place, why=found["why"]))
                    continue
                self.metric, self.epochs = found["metric"], found["epochs"]
                scores = {**outcome.scores, seed: float(found["value"])}
                self.outcomes[name] = dataclasses.replace(outcome, scores=scores)
                score = f"{show.METRICS.get(self.metric, self.metric)} {found['value']:.4f}"
                self.say(t("{name}: {why}", name=place, why=score))
                self.write()

    def ladder(self) -> Ladder:
        """What is known until now."""
        return Ladder(
            model=self.config.model.model,
            data=self.config.data.path,
            outcomes=tuple(self.outcomes.values()),
            steps=self.asked.steps,
            seeds=self.asked.seeds,
            metric=self.metric,
            epochs=self.epochs,
            device=self.facts.get("device", {}),
            budget_bytes=self.facts.get("budget_bytes"),
            rows=int(self.facts.get("rows", 0)),
            versions=versions(),
            folder=str(self.folder),
        )

    def write(self) -> None:
        """ladder.json and ladder.md are whole at any moment."""
        found = self.ladder()
        write_json(self.folder / "ladder.json", found.as_json())
        with atomic_writer(self.folder / "ladder.md") as file:
            file.write(show.markdown(found))

    # ---- one process ----

    def _result(self, rung: Rung, seed: int | None, place: str) -> dict[str, Any]:
        """From the folder, where it is there; otherwise run."""
        key = self._key(rung, seed)
        stem = f"{rung.name}{'' if seed is None else f'-seed{seed}'}-{key}"
        path = self.folder / "rungs" / f"{stem}.json"
        if not self.asked.fresh and (kept := kept_result(path)) is not None:
            return kept
        path.unlink(missing_ok=True)
        self.say(f"{place} …")
        request = {
            "config": str(self.folder / "ladder.toml"),
            "rung": dataclasses.asdict(rung),
            "steps": self.asked.steps,
            "seed": seed,
            # A plan is made once, and every seed trains by it.
            "plan_file": str(self.folder / "rungs" / f"{rung.name}-{self._key(rung, None)}.toml"),
        }
        steps = self.asked.steps
        timing = t("loading libraries and timing {steps} steps …", steps=steps)
        with doing(timing if seed is None else t("training to the end …")):
            return run_process(request, path)

    def _key(self, rung: Rung, seed: int | None) -> str:
        """A digest of all that decides a result."""
        decides: dict[str, Any] = {
            "config": {k: v for k, v in self.config.to_tables().items() if k != "output_dir"},
            "rung": dataclasses.asdict(dataclasses.replace(rung, targets=(), words={})),
            "inputs": self._inputs,
            "versions": versions(),
            "device": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        }
        decides |= {"steps": self.asked.steps} if seed is None else {"seed": seed}
        text = json.dumps(decides, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def asked_for(
    *,
    steps: int,
    quality: bool,
    seeds: int,
    rungs: Sequence[str],
    plan_budgets: Sequence[str],
    fresh: bool,
) -> LadderRequest:
    """From the command's options; lists may be written with commas."""
    if quality and seeds < 1:
        raise ConfigError(t("{flag} is {value}; write 1 or more", flag="--seeds", value=seeds))

    def split(words: Sequence[str]) -> tuple[str, ...]:
        return tuple(one.strip() for word in words for one in word.split(",") if one.strip())

    for budget in (one for one in split(plan_budgets) if one != "half"):
        parse_budget(budget)
    return LadderRequest(
        steps=steps,
        seeds=seeds if quality else 0,
        rungs=split(rungs),
        plan_budgets=split(plan_budgets),
        fresh=fresh,
    )
