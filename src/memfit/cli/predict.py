"""`memfit predict`: labels for sentences, or for every row of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli import console
from memfit.cli.options import Backend, Json, PlainCommand
from memfit.config.launched import launched_rank
from memfit.errors import ConfigError
from memfit.i18n import N_, t
from memfit.run.launching import count_of, start_ranks
from memfit.waiting import doing

if TYPE_CHECKING:
    from memfit.run.inference import Prediction

Text = str | tuple[str, str]


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(cls=PlainCommand)(predict)


def predict(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="An output folder or a hub id.")],
    texts: Annotated[list[str] | None, typer.Argument(help="The sentences to label.")] = None,
    file: Annotated[
        str | None, typer.Option(help="A table of texts instead: CSV, TSV, Excel, JSONL, Parquet.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(help="Write the file's rows with label and score here: .csv, .tsv, .jsonl."),
    ] = None,
    text_column: Annotated[str | None, typer.Option(help="The column of texts.")] = None,
    text_pair_column: Annotated[str | None, typer.Option(help="The pair's second text.")] = None,
    encoding: Annotated[str | None, typer.Option(help="The file's encoding.")] = None,
    header: Annotated[
        bool | None, typer.Option(help="Whether the first line names the columns.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Cut texts here; where the training did if not given.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="Processes that share the rows of --file, one on each GPU; auto takes all GPUs of "
            "this machine."
        ),
    ] = None,
    backend: Backend = "torch",
    as_json: Json = False,
) -> None:
    """Label sentences, or every row of a file.

    With --output the rows stream, and a command that was stopped goes on when it is given again.
    """
    if bool(texts) == (file is not None):
        raise ConfigError("give either sentences or --file")
    if output is not None and file is None:
        raise ConfigError("--output goes with --file; sentences are answered on the screen")
    if gpus is not None:
        if output is None:
            raise ConfigError("--gpus shares the rows of a file; it goes with --output")
        if launched_rank().world_size == 1 and (count := count_of(gpus)) > 1:
            raise typer.Exit(start_ranks(count, ctx.find_root().obj))
    reading: dict[str, Any] = {
        "text_column": text_column,
        "text_pair_column": text_pair_column,
        "encoding": encoding,
        "header": header,
    }
    with console.working():
        from memfit import api

        asked: Sequence[Text] | None = texts
        if file is not None and output is None:
            from memfit.data import read_texts

            with doing(t("reading the table …")):
                table = read_texts(file, **reading)
            columns = [table[name] for name in ("text", "text_pair") if name in table.column_names]
            asked = list(columns[0] if len(columns) == 1 else zip(*columns, strict=True))
        classifier = api.load(model, max_length=max_length, backend=backend)
        if asked is not None:
            answers = classifier.predict(asked, progress=file is not None)
        else:
            done = classifier.predict_file(str(file), str(output), **reading)
    if asked is not None:
        _show(asked, answers, as_json=as_json)
    elif as_json:
        console.show_json(done)
    else:
        sentence = N_("wrote {rows} rows to {path}; {empty} without text")
        sentence = sentence if done.empty_rows else N_("wrote {rows} rows to {path}")
        said = {"rows": f"{done.rows:,}", "path": done.path, "empty": f"{done.empty_rows:,}"}
        console.show(t(sentence, **said))


def _show(texts: Sequence[Text], answers: Sequence[Prediction], *, as_json: bool) -> None:
    if as_json:
        rows = []
        for text, answer in zip(texts, answers, strict=True):
            parts = [text] if isinstance(text, str) else text
            row: dict[str, Any] = dict(zip(("text", "text_pair"), parts, strict=False))
            row |= {"label": answer.label, "score": answer.score, "scores": answer.scores}
            rows.append(row)
        console.show_json(rows)
        return
    from memfit.printing import clean
    from memfit.report import terminal

    shown = terminal.table(t("label"), t("score"), t("text"))
    shown.columns[2].justify = "left"
    for text, answer in zip(texts, answers, strict=True):
        words = " / ".join([text] if isinstance(text, str) else text)
        shown.add_row(clean(answer.label), f"{answer.score:.4f}", terminal.shorten(words, 60))
    terminal.console().print(shown)
