"""`memfit push`: a trained model with its tokenizer and a model card, on a hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from memfit.cli import console
from memfit.cli.options import Json, PlainCommand
from memfit.i18n import t


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(cls=PlainCommand)(push)


def push(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The output folder of a run.")],
    repo: Annotated[str, typer.Argument(metavar="USER/NAME", help="The repository; made if new.")],
    to: Annotated[str, typer.Option(help="hub (Hugging Face) or modelscope.")] = "hub",
    private: Annotated[bool, typer.Option("--private", help="Only you can see it.")] = False,
    licence: Annotated[
        str | None,
        typer.Option(
            "--licence",
            "--license",
            help="The licence others get: apache-2.0, mit, ...; asked for.",
        ),
    ] = None,
    intended_use: Annotated[
        str | None, typer.Option(help="For the model card: which texts it is for.")
    ] = None,
    limitations: Annotated[
        str | None, typer.Option(help="For the model card: what it must not be used for.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Upload model, tokenizer and a model card; texts of the data stay here."""
    from memfit import api
    from memfit.models.hubs import check_hub
    from memfit.run.publish import check_repo

    check_hub(to)
    check_repo(repo)
    if licence is None and sys.stdin.isatty() and sys.stderr.isatty():
        licence = _ask_for_licence(folder)
        if licence is not None:  # somebody is there to answer
            intended_use = _ask_for_words(t("intended use"), intended_use)
            limitations = _ask_for_words(t("limitations"), limitations)
    with console.only_results_on_stdout():
        pushed = api.push(
            folder, repo, to=to, private=private, licence=licence,
            intended_use=intended_use or "", limitations=limitations or "",
        )  # fmt: skip
    if as_json:
        console.show_json(pushed)
        return
    from memfit.units import format_bytes

    size = format_bytes(pushed.uploaded_bytes)
    console.show(
        t(
            "uploaded {count} files ({size}) to {url}",
            count=len(pushed.files),
            size=size,
            url=pushed.url,
        )
    )


def _ask_for_words(section: str, given: str | None) -> str:
    """A section of the card; Enter leaves it to fill in."""
    if given is not None:
        return given
    asked = t("{section} (Enter leaves it to fill in)", section=section)
    return str(typer.prompt(asked, default="", show_default=False, err=True))


def _ask_for_licence(folder: str) -> str | None:
    """Nobody may use a model that says nothing; a card that says something needs no question."""
    from memfit.errors import ConfigError
    from memfit.report.model_card import COMMON, checked_licence, has_licence
    from memfit.run.publish import files_to_push

    path = Path(folder).expanduser()
    files_to_push(path)
    if has_licence(path):
        return None
    console.say(
        t("Under which licence may others use the model? {common}, ...", common=", ".join(COMMON))
    )
    while True:
        answer: str = typer.prompt(t("licence"), err=True)
        try:
            return checked_licence(answer)
        except ConfigError as error:
            console.say(str(error))
