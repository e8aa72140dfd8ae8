"""`memfit serve`: a trained classifier behind HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memfit.cli import console
from memfit.cli.options import Backend, Json, PlainCommand
from memfit.errors import ConfigError
from memfit.i18n import t


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(cls=PlainCommand)(serve)


def serve(
    run: Annotated[str, typer.Argument(metavar="RUN", help="An output folder or a hub id.")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    backend: Backend = "torch",
    api_key_file: Annotated[
        str | None, typer.Option(help="A file of keys, one a line; clients must send one of them.")
    ] = None,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="Serve other machines without a key.")
    ] = False,
    budget: Annotated[
        str | None, typer.Option(help="Memory the model may take of the GPU, such as 1GB.")
    ] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens that go through the model at once.")
    ] = None,
    max_texts: Annotated[int, typer.Option(help="Texts of one request.")] = 256,
    max_waiting: Annotated[int, typer.Option(help="Texts that wait before 429 is sent.")] = 2048,
    max_body: Annotated[int, typer.Option(help="Bytes of one request.")] = 2_000_000,
    request_seconds: Annotated[float, typer.Option(help="Seconds before 504 is sent.")] = 60.0,
    max_length: Annotated[
        int | None, typer.Option(help="Cut texts here; where the training did if not given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve a classifier: /predict as text-embeddings-inference has it, /classify as vLLM."""
    from memfit.serve.server import (
        bound_socket,
        hold_to_budget,
        require_server,
        serve_until_stopped,
    )

    require_server()
    from memfit.serve.protection import Protection, is_loopback, read_keys

    for name, value in (
        ("--max-texts", max_texts), ("--max-waiting", max_waiting), ("--max-body", max_body),
        ("--max-batch-tokens", max_batch_tokens or 1), ("--request-seconds", request_seconds),
    ):  # fmt: skip
        if value <= 0:
            raise ConfigError("{name} is {value}; write a number above 0", name=name, value=value)
    keys = read_keys(api_key_file) if api_key_file is not None else ()
    if not is_loopback(host) and not keys and not no_key:
        raise ConfigError(
            "--host {host} lets other machines in: give the keys they must send with "
            "--api-key-file, or say --no-key",
            host=host,
        )
    bound = bound_socket(host, port)
    with console.working():
        from memfit.run.inference import BATCH_TOKENS, CPU_BATCH_TOKENS, Classifier
        from memfit.serve.http_api import Limits, make_app

        if budget is not None:
            hold_to_budget(budget)
        classifier = Classifier.load(run, backend=backend, max_length=max_length)
        usual = CPU_BATCH_TOKENS if classifier.on_cpu else BATCH_TOKENS
        limits = Limits(
            batch_tokens=max_batch_tokens or usual,
            texts=max_texts,
            waiting_texts=max_waiting,
            seconds=request_seconds,
        )
        name = Path(run).name or run
        app = make_app(classifier, name, backend, limits)
        guarded = Protection(app, most_body_bytes=max_body, keys=keys, loopback=is_loopback(host))

    def say(url: str) -> None:
        if as_json:
            console.show_json({"url": url})
        else:
            console.show(url)
            console.say(t("POST /predict answers texts; /docs shows the rest; Ctrl-C ends it"))

    serve_until_stopped(guarded, bound, say)
