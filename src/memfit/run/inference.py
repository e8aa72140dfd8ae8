"""The trained classifier: texts or a file in, label names and scores out, in bounded memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memfit.config import DataConfig, ModelConfig
from memfit.config.launched import launched_rank
from memfit.config.schema import DTYPES
from memfit.data import LabelSpace, read_labelled
from memfit.data.in_memory import source_of as data_source
from memfit.data.in_memory import texts_of
from memfit.data.labels import ids_of
from memfit.data.table_files import open_source
from memfit.data.tables import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from memfit.data.working_files import quiet_datasets
from memfit.engine.half_on_cpu import half_on_cpu
from memfit.errors import ConfigError, DataError, ModelError, nearest
from memfit.i18n import N_, t
from memfit.models.hubs import source_of
from memfit.models.layers import position_limit
from memfit.models.loading import (
    WEIGHT_FILES,
    check_model_folder,
    load_config,
    load_tokenizer,
    loading_error,
)
from memfit.models.onnx_model import BACKENDS, ONNX_FILES, OnnxModel
from memfit.records.evaluation import Evaluation, evaluate_predictions, probabilities
from memfit.records.results import RunFolder, read_summary, trained_label_names
from memfit.records.scoring import Array, Scoring, answers, kept_scoring, scoring_of_table
from memfit.run.file_predictions import FilePredictions, check_target, predict_file, row_bar
from memfit.waiting import doing

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Text = str | tuple[str, str]
"""One text, or a pair of them."""

BATCH_TOKENS = 8192
"""Tokens on a card at once, padding included: 64 texts of 128."""

CPU_BATCH_TOKENS = 2048
"""The same on a CPU: what a layer makes of 8192 no longer fits its cache, and takes a third longer.
"""

CHUNK_TEXTS = 8192
"""Texts that are tokenized and sorted together; more would hold all their tokens in memory."""

UNLIMITED_LENGTH = 512
"""Where neither the run, the tokenizer nor the positions limit a text."""

_TASKS = {
    LabelSpace(task, ()).problem_type: task for task in (SINGLE_LABEL, MULTI_LABEL, REGRESSION)
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """One answer.

    Several labels (those from a probability of 0.5 on, or from the model's threshold) are joined by
    "|" as the data may have them; a regression's label is its value written out. `score` is the
    probability of the label, the highest of several labels, or the value.
    """

    label: str
    score: float
    scores: Mapping[str, float]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """A model with its tokenizer and label names, on a device."""

    model: PreTrainedModel | OnnxModel
    tokenizer: PreTrainedTokenizerBase
    labels: LabelSpace
    max_length: int
    pairs: bool | None = None
    """Whether it was trained on pairs of texts; None where that is not known."""
    scoring: Scoring | None = None
    """The positive class, the leading metric and the threshold, where the model came with them."""

    @classmethod
    def load(
        cls,
        path_or_id: str | os.PathLike[str],
        *,
        device: str | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        backend: str = "torch",
    ) -> Classifier:
        """From an output folder, one of its checkpoints, or the hub.

        Texts are cut where the training cut them, so that answers are those that were evaluated.
        `backend` is torch, or a file that `memfit export` wrote: onnx, onnx-int8.
        """
        config = ModelConfig(model=os.fspath(path_or_id))
        if backend == "torch":
            _check_trained(config)
            model = _load_torch(config, device, dtype)
            positions = position_limit(model)
        else:
            model = _load_onnx(config, backend)
            positions = model.positions
        tokenizer = load_tokenizer(config)
        if model.config.pad_token_id is None:  # decoders find a text's end by it
            model.config.pad_token_id = tokenizer.pad_token_id
        labels = label_space(model.config)
        has_summary = RunFolder(Path(config.model)).summary.is_file()
        summary = read_summary(config.model) if has_summary else None
        trained = None if summary is None else summary.lengths.get("max_length")
        pairs: bool | None = None
        if summary is not None and "text_pair_column" in summary.data:
            pairs = summary.data["text_pair_column"] is not None
        return cls(
            model=model,
            tokenizer=tokenizer,
            labels=labels,
            scoring=kept_scoring(model.config, labels),
            max_length=_max_length(config.model, positions, tokenizer, max_length, trained),
            pairs=pairs,
        )

    @property
    def on_cpu(self) -> bool:
        """Whether a processor computes the answers."""
        return isinstance(self.model, OnnxModel) or self.model.device.type == "cpu"

    def fingerprint(self) -> str:
        """Returns a digest of the weights, by a few numbers of each."""
        if isinstance(self.model, OnnxModel):
            return self.model.fingerprint()
        digest = hashlib.sha256()
        for name, value in self.model.state_dict().items():
            sample = value.detach().flatten()[:16].float().cpu().numpy()
            digest.update(f"{name} {tuple(value.shape)}".encode() + sample.tobytes())
        return digest.hexdigest()

    def predict(
        self,
        texts: str | tuple[str, str] | Sequence[Text] | Any,
        *,
        text_column: str | None = None,
        text_pair_column: str | None = None,
        batch_tokens: int | None = None,
        progress: bool = True,
    ) -> list[Prediction]:
        """Answers in the order of the texts; one text, or one pair as a tuple, may come alone.

        Of a DataFrame, a Dataset or a dict of columns the columns named are taken, or found.
        `progress` shows a bar on a terminal for anything over two seconds. `batch_tokens` go
        through the model at once; without it as many as suit the device.
        """
        texts = texts_of(texts, text_column, text_pair_column)
        single = isinstance(texts, str) or (
            isinstance(texts, tuple) and len(texts) == 2 and isinstance(texts[0], str)
        )
        several: Sequence[Text] = [texts] if single else texts
        with doing(t("predicting …")):
            logits = self.logits(several, batch_tokens=batch_tokens, progress=progress)
        return self.predictions(logits)

    def predictions(self, logits: Array) -> list[Prediction]:
        """Answers from raw outputs, a row a text."""
        names, task = self.labels.names, self.labels.task
        rows = probabilities(logits, task)
        scores = [dict(zip(names, map(float, row), strict=True)) for row in rows]
        if task == REGRESSION:
            values = [max(row.values()) for row in scores]
            return [
                Prediction(f"{value:.6g}", value, row)
                for value, row in zip(values, scores, strict=True)
            ]
        chosen = answers(rows, self.labels, self.scoring or Scoring())
        if task == SINGLE_LABEL:
            labels = [names[int(index)] for index in chosen]
            return [
                Prediction(label, row[label], row, (label,))
                for label, row in zip(labels, scores, strict=True)
            ]
        several = [tuple(name for name, yes in zip(names, of, strict=True) if yes) for of in chosen]
        return [
            Prediction("|".join(labels), max(row.values()), row, labels)
            for labels, row in zip(several, scores, strict=True)
        ]

    def evaluate(
        self,
        texts: Sequence[Text] | Any,
        labels: Any = None,
        *,
        batch_tokens: int | None = None,
        **options: Any,
    ) -> Evaluation:
        """How good the answers are on texts with known labels, or on a labelled table.

        Labels are names as strings, or the model's ids as numbers, one for each text.

        A table is all that `memfit.evaluate` takes, with the same `options`.
        """
        if labels is None:
            config = DataConfig.build(**{**data_source(texts), **options})
            return evaluate_table(self, config, batch_tokens=batch_tokens)
        if options:
            raise ConfigError(
                "{option} is for a table; leave it out beside labels", option=next(iter(options))
            )
        # A dataset column gives its values much faster at once than one by one.
        known = labels[:]
        if len(known) != len(texts):
            said = {"texts": f"{len(texts):,}", "labels": f"{len(known):,}"}
            raise DataError("{texts} texts and {labels} labels; give one label a text", **said)
        parts = [
            part for row in known for part in (row if isinstance(row, list | tuple) else (row,))
        ]
        are_names = not parts or any(isinstance(part, str) for part in parts)
        ids = np.asarray(ids_of(known, self.labels) if are_names else known)
        with doing(t("evaluating …")):
            logits = self.logits(texts, batch_tokens=batch_tokens)
        return evaluate_predictions(logits, ids, self.labels, self.scoring)

    def logits(
        self,
        texts: Sequence[Text],
        *,
        batch_tokens: int | None = None,
        progress: bool = True,
        update: Callable[[int], object] | None = None,
    ) -> Array:
        """Raw outputs, a row a text; each batch leaves the device before the next begins.

        `update` gets the rows of each batch when they are done; without it a bar does.
        """
        if update is None and progress:
            with row_bar(len(texts)) as update:
                return self.logits(texts, batch_tokens=batch_tokens, update=update)
        batch_tokens = batch_tokens or (CPU_BATCH_TOKENS if self.on_cpu else BATCH_TOKENS)
        out = np.empty((len(texts), self.labels.num_labels), dtype=np.float32)
        for start in range(0, len(texts), CHUNK_TEXTS):
            chunk = list(texts[start : start + CHUNK_TEXTS])
            encoded = self.encode(chunk, start)
            lengths = [len(ids) for ids in encoded["input_ids"]]
            for rows in token_batches(lengths, batch_tokens):
                batch = [{name: column[row] for name, column in encoded.items()} for row in rows]
                out[[start + row for row in rows]] = self.forward(batch)
                if update is not None:
                    update(len(rows))
        return out

    def predict_file(
        self,
        source: str | os.PathLike[str],
        target: str | os.PathLike[str],
        *,
        text_column: str | None = None,
        text_pair_column: str | None = None,
        encoding: str | None = None,
        header: bool | None = None,
        batch_tokens: int | None = None,
    ) -> FilePredictions:
        """The rows of a table with label and score beside them, in a new file.

        The rows stream: no more than a few thousand lie in memory. A call that was killed leaves
        `target` with .partial behind its name; the same call goes on from it. Under torchrun or
        `accelerate launch` the ranks share the rows, and the first writes the file.
        """
        columns = (text_column, text_pair_column)
        if launched_rank().is_first:
            check_target(Path(target), Path(source))
        with quiet_datasets():
            table, _ = open_source(os.fspath(source), encoding, header, only_texts=not any(columns))
        return predict_file(self, table, source, target, columns, batch_tokens=batch_tokens)

    def encode(
        self, texts: list[Text], start: int = 0, *, cut: bool = True
    ) -> dict[str, list[list[int]]]:
        """Returns the tokens of each text, cut at `max_length`; `start` counts texts in errors."""
        pairs = [isinstance(text, tuple | list) for text in texts]
        if any(pairs) and not all(pairs):
            raise DataError("some of the texts are pairs and some are not; give one kind")
        # Answers of a model of the other kind would look right.
        if self.pairs and not any(pairs):
            raise DataError(
                "this model was trained on pairs of texts and got single ones; give both: "
                "--file with --text-column and --text-pair-column, or tuples of two in "
                "Python"
            )
        if self.pairs is False and any(pairs):
            raise DataError(
                "this model was trained on single texts and got pairs; name the column to "
                "use with --text-column"
            )
        for number, text in enumerate(texts, start + 1):
            parts = text if isinstance(text, tuple | list) else (text,)
            if len(parts) not in (1, 2) or not all(isinstance(part, str) for part in parts):
                raise DataError(
                    "text {number} is {text}; give a text or a pair of texts",
                    number=number,
                    text=f"{text!r:.60}",
                )
        columns = [list(column) for column in zip(*texts, strict=True)] if any(pairs) else [texts]
        encoded = self.tokenizer(*columns, truncation=cut, max_length=self.max_length)
        return dict(encoded)

    def forward(self, rows: list[dict[str, list[int]]]) -> Array:
        """Returns the logits of tokenized rows, padded to one batch."""
        if isinstance(self.model, OnnxModel):
            padded: Any = self.tokenizer.pad(rows, return_tensors="np")
            return self.model(**padded).logits
        import torch
        from transformers import DataCollatorWithPadding

        batch: Any = DataCollatorWithPadding(self.tokenizer)(rows)
        batch = batch.to(self.model.device)
        with torch.inference_mode():
            logits: torch.Tensor = self.model(**batch).logits
        return np.asarray(logits.float().cpu().numpy())


def evaluate_table(
    classifier: Classifier, config: DataConfig, *, batch_tokens: int | None = None
) -> Evaluation:
    """How good the answers are on all rows of a labelled table."""
    if not config.label_names:
        names = trained_label_names(classifier.model.name_or_path or "")
        config = replace(config, label_names=names)
    with doing(t("reading the table …")):
        table, counts = read_labelled(config, classifier.labels)
    texts = table["text"]
    if "text_pair" in table.column_names:
        texts = list(zip(texts, table["text_pair"], strict=True))
    found = counts.validation_class_counts
    scoring = scoring_of_table(classifier.scoring, config, classifier.labels, found)
    scored = replace(classifier, scoring=scoring)
    evaluation = scored.evaluate(texts, table["label"], batch_tokens=batch_tokens)
    dropped = {"no_text": counts.dropped_no_text, "no_label": counts.dropped_no_label}
    return replace(evaluation, dropped=dropped)


def token_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Rows sorted by length, as many together as stay within `batch_tokens` once padded.

    The longest come first, so that a batch too large for the device fails at once.
    """
    rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    start = 0
    while start < len(rows):
        count = max(batch_tokens // max(lengths[rows[start]], 1), 1)
        yield rows[start : start + count]
        start += count


def label_space(config: Any) -> LabelSpace:
    """The task and the label names a model's config holds."""
    names = tuple(str(config.id2label[index]) for index in range(config.num_labels))
    # What the loss of transformers itself assumes where a config does not say.
    task = REGRESSION if config.num_labels == 1 else SINGLE_LABEL
    return LabelSpace(_TASKS.get(config.problem_type, task), names)


def _check_trained(config: ModelConfig) -> None:
    """Refuses a folder without a model, and says what it holds instead."""
    folder = Path(config.model)
    run = RunFolder(folder)
    weights = any((folder / name).is_file() for name in WEIGHT_FILES)
    if folder.is_dir() and not weights and run.config.is_file():
        if done := run.checkpoints():
            raise ModelError(
                "the run in {folder} has not finished; continue it with memfit train "
                "--resume --output-dir {folder}, or name a checkpoint of it ({checkpoint})",
                folder=folder,
                checkpoint=done[-1],
            )
        raise ModelError(
            "the run in {folder} has not finished; continue it with memfit train --resume "
            "--output-dir {folder}",
            folder=folder,
        )
    if folder.is_dir() and not weights and (folder / "config.json").is_file():
        raise ModelError(
            "the model folder {folder} has no weights; it needs model.safetensors or "
            "pytorch_model.bin beside config.json",
            folder=folder,
        )
    check_model_folder(config)


def _load_torch(config: ModelConfig, device: str | None, dtype: str | None) -> Any:
    where = _device(device)
    with doing(t("loading the weights …")):
        model = _load_weights(config, dtype).eval()
    halved = where.type == "cpu" and model.dtype.itemsize < 4
    if halved and (dtype is None or not half_on_cpu().works(dtype)):
        # Half precision is slower on a CPU, and no smaller on disk; some CPUs trap on it.
        model = model.float()
    return model.to(where)


def _load_onnx(config: ModelConfig, backend: str) -> OnnxModel:
    if backend not in ONNX_FILES:
        raise ConfigError(
            "the backend is {backend}; it is one of {choices}.{hint}",
            backend=repr(backend),
            choices=", ".join(BACKENDS),
            hint=nearest(backend, BACKENDS),
        )
    file = Path(source_of(config.model)) / ONNX_FILES[backend]
    if not file.is_file():
        raise ModelError(
            "{model} has no {file}; write it with memfit export {model}{int8}",
            model=config.model,
            file=ONNX_FILES[backend],
            int8=" --int8" if backend == "onnx-int8" else "",
        )
    with doing(t("loading the weights …")):
        return OnnxModel(file, load_config(config))


def _load_weights(config: ModelConfig, dtype: str | None) -> Any:
    from transformers import AutoModelForSequenceClassification

    from memfit.run.announcements import no_progress_bars

    if dtype not in (None, *DTYPES):
        raise ConfigError(
            "dtype is {dtype}; it is one of {choices}.{hint}",
            dtype=repr(dtype),
            choices=", ".join(DTYPES),
            hint=nearest(str(dtype), DTYPES),
        )
    settings = load_config(config)
    kinds = settings.architectures or []
    untrained = N_(
        "{model} has no trained classifier, only {found}; train one with memfit train DATA "
        "--model {model}"
    )
    if kinds and not any("ForSequenceClassification" in kind for kind in kinds):
        raise ModelError(untrained, model=config.model, found=kinds[0])
    try:
        with no_progress_bars():
            model, report = AutoModelForSequenceClassification.from_pretrained(
                source_of(config.model),
                config=settings,
                dtype=dtype or "auto",
                output_loading_info=True,
                trust_remote_code=False,
            )
    except Exception as error:
        raise loading_error(error, config.model) from None
    if missing := sorted(report["missing_keys"]):
        # transformers would fill these with random numbers and only log it.
        found = t("weights without {name}", name=missing[0])
        raise ModelError(untrained, model=config.model, found=found)
    return model


def _device(name: str | None) -> torch.device:
    import torch

    from memfit.memory.device import best_device

    if name is None:
        name = best_device().type
        ranks = launched_rank()
        if name == "cuda" and ranks.local_world_size > 1:  # each rank has a card of its own
            name = f"cuda:{ranks.local_rank % torch.cuda.device_count()}"
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:  # CUDA's absence is an assertion
        reason = str(error).splitlines()[0]
        raise ConfigError(
            "the device {name} cannot be used ({reason}); leave it out, or write cpu",
            name=repr(name),
            reason=reason,
        ) from None


def _max_length(
    name: str,
    positions: int | None,
    tokenizer: PreTrainedTokenizerBase,
    wanted: int | None,
    trained: Any,
) -> int:
    """What is wanted, or what the run trained with; never beyond the model's positions."""
    if wanted is not None:
        if positions is not None and wanted > positions:
            raise ConfigError(
                "max_length {length} is beyond the {limit} positions of {model}; write "
                "{limit} or less",
                length=wanted,
                limit=positions,
                model=name,
            )
        return wanted
    limit = min(limit for limit in (positions, tokenizer.model_max_length) if limit)
    if isinstance(trained, int):
        return min(trained, limit)
    return limit if limit < 10**6 else UNLIMITED_LENGTH
