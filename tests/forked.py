"""Processes that have the libraries already: forks of the one that tests run in."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import NoReturn


def forked(work: Callable[[], object]) -> BaseProcess:
    """A process that does this and ends."""
    with warnings.catch_warnings():
        # Since Python 3.12 of threads, which may hold locks: the tests' own only wait.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
    return process


def run_at(terminal: int, work: Callable[[], int]) -> NoReturn:
    """In a fork: does this with a terminal for its streams, and ends with the code it returns."""
    code = 1
    try:
        os.setsid()
        for stream in range(3):
            os.dup2(terminal, stream)
        sys.stdin, sys.stdout, sys.stderr = (
            open(stream, mode, encoding="utf-8", buffering=1)  # noqa: SIM115
            for stream, mode in enumerate("rww")
        )
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
