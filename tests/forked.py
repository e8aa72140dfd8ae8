"""Processes that have the libraries already: forks of the one that tests run in.

Not for texts that are tokenized: threads of the tokenizer's and of Arrow's pools are not forked.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess


def forked(work: Callable[[], object]) -> BaseProcess:
    """A process that does this and ends."""
    with warnings.catch_warnings():
        # Since Python 3.12 of threads, which may hold locks: the tests' own only wait.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
    return process
