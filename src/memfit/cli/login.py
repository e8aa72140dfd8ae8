"""`memfit login`: the hub's own login, which keeps the token where its other tools find it."""

from __future__ import annotations

import getpass
import sys
from typing import Annotated

import typer

from memfit.cli import console
from memfit.cli.options import Json, PlainCommand
from memfit.i18n import t


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(cls=PlainCommand)(login)


def login(
    to: Annotated[str, typer.Option(help="hub (Hugging Face) or modelscope.")] = "hub",
    force: Annotated[bool, typer.Option("--force", help="Log in anew.")] = False,
    as_json: Json = False,
) -> None:
    """Log in to a hub; in a pipe the token is read from the input, never from an option."""
    from memfit.models import hubs

    hubs.check_hub(to)
    if not sys.stdin.isatty():
        token = sys.stdin.readline().strip() or None  # empty, as a scheduler leaves it
    else:
        token = _asked_token(to, force=force) if to == "modelscope" else None
    with console.only_results_on_stdout():
        user = hubs.login(to, token=token, force=force)
    where = hubs.endpoint(to)
    if as_json:
        console.show_json({"hub": where, "user": user})
    else:
        console.show(t("logged in to {hub} as {user}", hub=where, user=user))


def _asked_token(to: str, *, force: bool) -> str | None:
    """ModelScope's client has no login of its own to show; a token it has is tried first."""
    from memfit.errors import ConfigError
    from memfit.models import hubs

    if not force:
        try:
            hubs.login(to)
        except ConfigError:
            pass
        else:
            return None
    console.say(
        t(
            "Make a token at {address} and paste it here.",
            address="https://modelscope.cn/my/myaccesstoken",
        )
    )
    return getpass.getpass(t("token (not shown): ")).strip() or None
