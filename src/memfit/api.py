"""The Python interface: the same names and the same work as the commands.

    result = memfit.finetune("reviews.csv", model="hfl/chinese-macbert-large", budget="4GB",
                             output_dir="run", epochs=2)
    memfit.load("run").predict(["服务人员都很亲切"])

Nothing here imports torch before it is called.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from memfit.config import DataConfig, ModelConfig, RunConfig
from memfit.errors import ConfigError, OutputError
from memfit.i18n import t
from memfit.models.loading import check_model_folder
from memfit.waiting import doing

if TYPE_CHECKING:
    from memfit.ladders.rungs import Ladder
    from memfit.memory.cards import DeviceProfile
    from memfit.memory.stock_estimate import MemoryEstimate
    from memfit.planner.plan import Plan
    from memfit.planner.search import Planning
    from memfit.records.evaluation import Evaluation
    from memfit.records.export_results import Export
    from memfit.report.comparison import Comparison
    from memfit.run.inference import Classifier
    from memfit.run.publish import PushResult
    from memfit.run.train import RunResult

PathLike = str | os.PathLike[str]

Data = PathLike | Any
"""A path, a Hub id, or the rows themselves: a pandas DataFrame, a Dataset or DatasetDict, a dict of
columns, a list of dicts, or (texts, labels)."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _data_in_one(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Refuses texts and labels given apart, and says how they are given together."""

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if len(args) > 1 or {"texts", "labels"} & kwargs.keys():
            raise ConfigError(
                "{function} takes its data as one: write {function}((texts, labels), ...), and "
                "all else by its name (model=..., budget=...)",
                function=function.__name__,
            )
        return function(*args, **kwargs)

    return checked


@_data_in_one
def finetune(
    data: Data | None = None,
    *,
    model: PathLike | None = None,
    budget: str | int | None = None,
    output_dir: PathLike | None = None,
    resume: bool = False,
    config: PathLike | None = None,
    quiet: bool = False,
    watch: bool = False,
    callbacks: Sequence[Any] = (),
    plan: PathLike | Plan | None = None,
    gpus: int | str | None = None,
    **options: Any,
) -> RunResult:
    """Trains a classifier on a table inside a memory budget and saves it with its report.

    `data` is a path, a Hub id, a pandas DataFrame, a Dataset, or (texts, labels).
    `options` are fields of DataConfig, ModelConfig and TrainingArguments under their own
    names. What is given here wins over the TOML file `config`; None means not given.
    `plan` is one that `memfit.plan` made, or its file; without it the fastest inside the budget
    is made. `resume` continues the run that `output_dir` holds, and begins it where there is none
    if data and model are named. `watch` serves the report on
    localhost while it trains. `gpus` is a number or `auto`: so many processes train together, in a
    script as in a notebook.
    """
    from memfit.run.launching import ranks_to_start, train_on_ranks
    from memfit.run.resume import is_begun, is_finished, resumed_config, with_absolute_paths
    from memfit.run.train import finished_run, train_classifier
    from memfit.serve.watching import watch_run

    made = None if plan is None or isinstance(plan, (str, os.PathLike)) else plan
    given = {
        **_sources(data, options), "model": model, "budget": budget, "output_dir": output_dir,
        "gpus": gpus,
    }  # fmt: skip
    if made is None:
        given["plan"] = plan
    if resume:
        if output_dir is None:
            raise OutputError("name the run to resume with --output-dir")
        is_named = config is not None or (data is not None and model is not None)
        # So that a scheduler may run the same command again and again.
        resume = not is_named or is_begun(output_dir)
    if resume and output_dir is not None:
        run = resumed_config(os.fspath(output_dir), config, given)
    else:
        run = RunConfig.build(config, **given)
    how: dict[str, Any] = {
        "resume": resume, "quiet": quiet, "watch": watch_run if watch else None,
        "callbacks": callbacks, "plan": made,
    }  # fmt: skip
    ranks = ranks_to_start(run)
    if ranks == 1 or (resume and is_finished(str(run.output_dir))):
        return train_classifier(run, **how)
    run = with_absolute_paths(run)
    train_on_ranks(ranks, run, **how)
    return finished_run(Path(str(run.output_dir)))


@_data_in_one
def plan(
    data: Data | None = None,
    *,
    model: PathLike | None = None,
    budget: str | int | None = None,
    gpu: str | None = None,
    config: PathLike | None = None,
    **options: Any,
) -> Planning:
    """The fastest way of training inside the budget, without loading any weights.

    Takes what `finetune` takes, with `exact` and `allow`; `gpu` is a card by name or `cpu`, and
    without it this machine's. `.chosen` is the plan: `.sentences()` are its reasons,
    `.write("plan.toml")` keeps it, `.training_arguments()` are for the stock Trainer.
    """
    import memfit.report.notebook  # noqa: F401 - draws plans in notebooks
    from memfit.run.prepare import prepare_to_plan

    given = {**_sources(data, options), "model": model, "budget": budget}
    return prepare_to_plan(RunConfig.build(config, **given), gpu).plan()


def _sources(data: Data | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with data given in Python as files."""
    from memfit.data.in_memory import path_of, source_of

    sources = {**source_of(data), **options}
    if "validation_file" in sources:
        sources["validation_file"] = path_of(sources["validation_file"])
    return sources


def load(model: PathLike, **options: Any) -> Classifier:
    """A trained classifier from its output folder or the hub."""
    from memfit.run.inference import Classifier

    return Classifier.load(os.fspath(model), **options)


def evaluate(
    model: PathLike,
    data: Data,
    *,
    max_length: int | None = None,
    backend: str = "torch",
    **options: Any,
) -> Evaluation:
    """How good a trained classifier is on all rows of a labelled table.

    `options` are fields of DataConfig: the columns, the label names, the encoding.
    """
    from memfit.run.inference import Classifier, evaluate_table

    config = DataConfig.build(**_sources(data, options))
    classifier = Classifier.load(os.fspath(model), max_length=max_length, backend=backend)
    return evaluate_table(classifier, config)


def estimate(
    model: PathLike,
    *,
    batch_size: int = 32,
    max_length: int = 128,
    gpu: str | DeviceProfile | None = None,
    **options: Any,
) -> MemoryEstimate:
    """Every byte of the stock Trainer's step with these flags, without running it.

    `model` is a hub id or a folder, which may hold only a config.json. `options` are fields of
    ModelConfig (dtype, freeze, lora, attn_implementation) and TrainingArguments (optim, bf16,
    gradient_checkpointing, ...), and num_labels, task and padding. `gpu` is a card by name or
    `cpu`; without it this machine's card, or an H200 where there is none.
    """
    from memfit.memory.stock_estimate import estimate_memory
    from memfit.run import stock_flags

    names = {item.name for item in dataclasses.fields(ModelConfig)}
    asked = {key: options.pop(key) for key in names & options.keys()}
    config = ModelConfig.build(**{**asked, "model": model, "from_scratch": True})
    check_model_folder(config)
    steps = {"batch_size": batch_size, "max_length": max_length, **options}
    with doing(t("estimating …")):
        return estimate_memory(stock_flags.step_spec(config, steps), stock_flags.device_for(gpu))


def ladder(
    data: PathLike | None = None,
    *,
    model: PathLike | None = None,
    budget: str | int | None = None,
    output_dir: PathLike = "ladder",
    steps: int = 20,
    rungs: Sequence[str] = (),
    plan_budgets: Sequence[str] = (),
    quality: bool = False,
    seeds: int = 3,
    fresh: bool = False,
    config: PathLike | None = None,
    quiet: bool = False,
    **options: Any,
) -> Ladder:
    """The usual memory savings one on top of the other, and memfit's plans, measured here.

    Each rung trains `steps` timed steps in a process of its own; `quality` trains every one to its
    end with `seeds` seeds. `options` are as for `finetune`. What `output_dir` already holds is not
    measured again unless `fresh`.
    """
    from memfit.ladders import climb
    from memfit.run import announcements

    given = {"data": data, "model": model, "budget": budget, "output_dir": output_dir, **options}
    asked = climb.LadderRequest(
        steps=steps, quality=quality, seeds=seeds, rungs=rungs, plan_budgets=plan_budgets,
        fresh=fresh,
    )  # fmt: skip
    return climb.climb(RunConfig.build(config, **given), asked, announcements.voice(quiet))


def compare(*runs: PathLike) -> Comparison:
    """Runs beside each other: settings that differ, metrics, memory, time and curves.

    A run is its output folder; a folder that holds runs stands for all of them. Printed it is a
    table, `.write_page("comparison.html")` makes a page, `.to_dict()` has the numbers.
    """
    from memfit.report.comparison import compare_runs

    return compare_runs(runs)


def export(
    run: PathLike,
    *,
    int8: bool = False,
    output: PathLike | None = None,
    data: str | None = None,
    most_lost: float = 0.5,
    **options: Any,
) -> Export:
    """Writes a trained classifier as ONNX, scored on the run's validation rows or on `data`.

    `.variants` has size, speed and score of each beside torch's. A file that loses more than
    `most_lost` points of the headline metric is not written: `.refused` says so. `options` are
    fields of DataConfig for `data`.
    """
    from memfit.run.onnx_export import export as export_run

    return export_run(
        os.fspath(run),
        int8=int8,
        output=None if output is None else os.fspath(output),
        data=data,
        most_lost=most_lost,
        **options,
    )


def push(
    folder: PathLike,
    repo: str,
    *,
    to: str = "hub",
    private: bool = False,
    licence: str | None = None,
    intended_use: str = "",
    limitations: str = "",
) -> PushResult:
    """Uploads a trained model, its tokenizer and a model card to a hub or to ModelScope.

    `repo` is user/name and is made where it is new. The card holds counts, metrics, memory and
    time; no text of the data leaves the folder. `licence` is asked for unless a README.md of
    yours in the folder names one. `intended_use` and `limitations` are the card's sections of
    that name; without them they are left to fill in, with what the figures tell.
    """
    from memfit.run.publish import push as push_to

    return push_to(
        folder, repo, to=to, private=private, licence=licence, intended_use=intended_use,
        limitations=limitations,
    )  # fmt: skip
