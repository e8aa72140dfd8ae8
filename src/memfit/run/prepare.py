"""What a run is before weights are loaded: its rows, its arguments and the task of its plan."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.config import RunConfig
from memfit.config.launched import cards_are_shared
from memfit.config.training_fields import check_training, training_arguments
from memfit.errors import ConfigError
from memfit.i18n import t
from memfit.memory.device import kind_of
from memfit.records.evaluation import best_metric
from memfit.records.scoring import Scoring, class_weights_of_run, scoring_of_run
from memfit.run.launching import count_of
from memfit.units import Budget, parse_budget
from memfit.waiting import doing

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, TrainingArguments

    from memfit.data import LabelSpace, TextData, TokenizedData
    from memfit.engine.ranks import Ranks
    from memfit.memory.cards import CardPlace, DeviceProfile
    from memfit.planner.plan import Plan
    from memfit.planner.search import Planning
    from memfit.planner.task import Task


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run before its weights are loaded: its rows, its arguments, and what is planned for."""

    config: RunConfig
    text: TextData
    tokens: TokenizedData
    settings: PretrainedConfig
    """The model's own, with a head for these labels."""
    tokenizer: PreTrainedTokenizerBase
    arguments: TrainingArguments
    scoring: Scoring
    class_weights: list[float] | None = None
    """What a row of each class counts in the loss, by label id; None where all count alike."""
    gpu: str | None = None
    """A card by name, or cpu; None is what this machine trains on."""
    place: CardPlace | None = None
    """The machine that card is in; like this one if None."""
    most_bytes: int | None = None
    """What every rank may hold; None of a run on one."""
    ranks: int | None = None
    """How many to plan for; as many as there are now if None."""

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of every training row."""
        from memfit.engine.micro_batches import row_lengths

        return row_lengths(self.tokens.train)

    @cached_property
    def task(self) -> Task:
        """What a plan is made for, inside the budget as it is in bytes now."""
        from memfit.planner.task import task_of_run

        trained = task_of_run(
            self.config,
            self.settings,
            self.arguments,
            self.text.labels,
            self.lengths,
            eval_rows=len(self.tokens.validation),
            ranks=self.ranks,
        )
        task = trained.placed(
            parse_budget(self.config.budget),
            _named_card(self.gpu, self.place) or self.arguments.device,
            exact=self.config.exact,
            allow=self.config.allowed,
        )
        if self.most_bytes is None:
            return task
        return replace(task, budget_bytes=min(task.budget_bytes, self.most_bytes))

    def plan(self) -> Planning:
        """The fastest plan inside the budget, or DoesNotFitError with what would fit instead."""
        from memfit.planner.search import plan_for

        planning = plan_for(self.task, fresh=True)
        return replace(planning, chosen=self.signed(planning.chosen))

    def signed(self, plan: Plan) -> Plan:
        """Adds the run's settings to the plan, so that its file alone can be checked."""
        tables = dict(self.config.to_tables())
        if self.gpu is not None:
            tables["gpu"] = self.gpu
        if self.place is not None:
            given = asdict(self.place).items()
            tables["place"] = {key: value for key, value in given if value is not None}
        return replace(plan, run=tables)


def prepare(
    config: RunConfig,
    output_dir: Path,
    text: TextData | None = None,
    *,
    tokens: TokenizedData | None = None,
    gpu: str | None = None,
    place: CardPlace | None = None,
    has_weights: bool = True,
) -> Prepared:
    """Reads and tokenizes the table; of the model only its settings are read.

    `text` is the table, where it was read before, and `tokens` are its rows, where they were made.
    A model without weights can only be planned for.
    """
    from memfit.data import read_table, tokenize
    from memfit.engine.half_on_cpu import half_on_cpu
    from memfit.models.loading import load_settings

    if text is None:
        with doing(t("reading the table …")):
            text = read_table(config.data)
    arguments = arguments_of(config, text.labels, output_dir)
    batch_rows, held_rows = arguments.per_device_eval_batch_size, len(text.validation)
    if arguments.dataloader_drop_last and 0 < held_rows < batch_rows:
        raise ConfigError(
            "--dataloader-drop-last leaves out all {rows} validation rows, which are less than a "
            "batch; leave it out, or write --per-device-eval-batch-size {rows} or less",
            rows=held_rows,
        )
    scoring = scoring_of_run(config, text, arguments)
    class_weights = class_weights_of_run(config, text)
    if kind_of(arguments.device) == "cpu":
        with doing(t("trying half precision on this CPU, which is done once …")):
            half_on_cpu()
    model = config.model if has_weights else replace(config.model, from_scratch=True)
    settings, tokenizer = load_settings(model, text.labels)
    if tokens is None:
        rows = f"{len(text.train) + len(text.validation):,}"
        with doing(t("tokenizing {rows} rows …", rows=rows)):
            tokens = tokenize(text, tokenizer, config.data.max_length)
    return Prepared(
        config=config,
        text=text,
        tokens=tokens,
        settings=settings,
        tokenizer=tokenizer,
        arguments=arguments,
        scoring=scoring,
        class_weights=class_weights,
        gpu=gpu,
        place=place,
    )


def budget_of_rank(prepared: Prepared, ranks: Ranks) -> int:
    """The budget of this rank in bytes; ranks on one device share what is free of it."""
    from memfit.planner.task import budget_bytes

    device = prepared.arguments.device
    own_bytes = budget_bytes(device, parse_budget(prepared.config.budget))
    if kind_of(device) != "cpu" and not cards_are_shared():
        return own_bytes
    return min(own_bytes, budget_bytes(device, Budget()) // ranks.local_count)


def arguments_of(config: RunConfig, labels: LabelSpace, output_dir: Path) -> TrainingArguments:
    """The Trainer's arguments for a run on rows with these labels."""
    arguments = training_arguments(
        config.training,
        output_dir,
        best_metric(labels.task)[0],
        head_only=config.model.freeze == "encoder",
        task=labels.task,
    )
    if config.early_stopping is not None and not arguments.load_best_model_at_end:
        raise ConfigError(
            "--early-stopping goes back to the best model, so it needs evaluations "
            "(--eval-strategy epoch or steps) and --load-best-model-at-end"
        )
    return arguments


def prepare_to_plan(
    config: RunConfig, gpu: str | None = None, place: CardPlace | None = None
) -> Prepared:
    """Prepares a run that is only planned: a config.json and a tokenizer are enough of a model."""
    import torch

    from memfit.models.loading import check_positions
    from memfit.planner.task import budget_bytes
    from memfit.planner.traced_setup import build_model, full_config

    config = config.asked
    check_training(config.training)
    _named_card(gpu)  # a name that no card has is refused before the table is read
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(config, Path(folder), gpu=gpu, place=place, has_weights=False)
    ranks = 1
    if config.gpus is not None:
        # Of a card that is not here there may be any number.
        is_here = gpu is None or config.gpus == "auto"
        ranks = count_of(config.gpus) if is_here else int(config.gpus)
    prepared = replace(prepared, ranks=ranks)
    if ranks > 1 and prepared.task.card is None:  # they share the computer's memory
        free_bytes = budget_bytes(torch.device("cpu"), Budget())
        prepared = replace(prepared, most_bytes=free_bytes // ranks)
    with doing(t("planning …")):
        whole = replace(prepared.task, lora=None, freeze=None)
        model = build_model(whole, full_config(whole))
    check_positions(model, config.data.max_length, config.model.model)
    return prepared


def _named_card(
    gpu: str | None, place: CardPlace | None = None
) -> DeviceProfile | torch.device | None:
    """The card of that name, or this machine's CPU; None where none is named."""
    if gpu is None:
        return None
    if gpu.strip().lower() == "cpu":
        import torch

        return torch.device("cpu")
    from memfit.memory.cards import find_card

    return find_card(gpu, place)
