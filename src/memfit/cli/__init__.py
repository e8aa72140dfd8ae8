"""The `memfit` command. One file a command; torch is imported only when one runs.

Exit codes: 0 done, 1 the run failed, 2 the input is wrong, 3 nothing fits; 130 after Ctrl-C and 143
after SIGTERM, once a checkpoint is saved.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from memfit._version import __version__
from memfit.cli import (
    compare,
    console,
    doctor,
    estimate,
    evaluate,
    export,
    ladder,
    login,
    options,
    plan,
    predict,
    push,
    report,
    serve,
    train,
)
from memfit.cli.options import CommandStopped, SpokenGroup, take_language
from memfit.config.launched import launched_rank
from memfit.errors import MemfitError
from memfit.i18n import speaking, t
from memfit.run.launching import (
    RanksEndedError,
    end_with_launcher,
    first_rank_speaks,
    kept_for_launcher,
)
from memfit.run.signals import INTERRUPTED

app = typer.Typer(
    name="memfit",
    cls=SpokenGroup,
    help="Fine-tune a transformer text classifier inside the memory you have.",
    epilog="memfit COMMAND --help tells more about a command.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

for module in (
    train,
    plan,
    evaluate,
    predict,
    estimate,
    doctor,
    report,
    compare,
    export,
    serve,
    push,
    login,
    ladder,
):
    module.add_to(app)


def _show_version(asked: bool) -> None:
    if asked:
        console.show(f"memfit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    # Taken out of the arguments before, wherever it stands; here for the help.
    _lang: Annotated[
        str | None,
        typer.Option("--lang", help="en or zh, before or after the command; else the locale's."),
    ] = None,
) -> None:
    pass


def main() -> NoReturn:
    """The entry point."""
    end_with_launcher()
    console.set_up_streams()
    console.quiet_libraries()
    _leave(run(sys.argv[1:]))


def _leave(code: int) -> NoReturn:
    """Ends the process without taking apart what was loaded.

    Python would visit every object of torch and transformers once more: 1 to 6 s, to free what
    the system frees at once.
    """
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody reads any more: Python has an exit code for that
        sys.exit(code)
    os._exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code; every error becomes one sentence on stderr."""
    try:
        words, spoken = take_language(arguments)
    except MemfitError as error:
        return _failed(str(error), error.exit_code)
    with speaking(spoken):
        return _run(words)


def _run(words: list[str]) -> int:
    try:
        with first_rank_speaks():
            # A command that starts itself again as several ranks finds its words in
            # `ctx.find_root().obj`.
            code = app(words, prog_name="memfit", standalone_mode=False, obj=words)
    except CommandStopped as stopped:
        return _interrupted(stopped.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(INTERRUPTED)
    except RanksEndedError as ended:
        return ended.exit_code  # they have said why
    except MemfitError as error:
        return _failed(str(error), error.exit_code)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            console.say(str(error))
            return 2
        if hasattr(error, "format_message"):  # typer's own usage errors
            return _failed(options.refusal_sentence(error), 2)
        name = type(error).__name__
        what = str(error).strip() or t("no message")
        if library := _refusing(error):
            return _failed(
                t("{library} refuses what was given: {reason}", library=library, reason=what), 2
            )
        return _failed(
            t(
                "this should not have happened: {error}\nThis is a bug in memfit: run it again "
                "with MEMFIT_DEBUG=1 and report the traceback in the project's issues",
                error=f"{name}: {what}",
            ),
            1,
        )
    return code if isinstance(code, int) else 0


_LIBRARIES = ("transformers", "accelerate", "peft", "torch", "torchao", "bitsandbytes")


def _refusing(error: Exception) -> str:
    """The library that says in words what is wrong with an argument; empty for any other error."""
    if type(error).__module__.startswith("huggingface_hub."):
        return "huggingface_hub"
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not isinstance(error, ValueError | ImportError):
        return ""
    library = str(last.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    return library if library in _LIBRARIES else ""


def _interrupted(code: int) -> int:
    if launched_rank().is_first:
        console.say("memfit: " + t("interrupted"))
    return code


def _failed(sentence: str, code: int) -> int:
    if console.debugging():
        traceback.print_exc()
    if not kept_for_launcher(sentence):
        console.say(f"memfit: {sentence}")
    return code
