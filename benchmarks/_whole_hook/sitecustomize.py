"""Writes down what only a process itself knows: when imports ended, what torch reserved.

Python imports this module by itself when its folder is on PYTHONPATH.

$WHOLE_RUNS_IMPORTS    each line: a package that takes long, and when its import was finished
$WHOLE_RUNS_RESERVED   each line: the most bytes torch's allocator had reserved on the card, up to
                       when its counters were reset or the process ended
"""

import atexit
import importlib.abc
import importlib.machinery
import os
import sys
import time

PACKAGES = frozenset(
    ("torch", "transformers", "transformers.trainer", "accelerate", "datasets", "sklearn", "peft")
)
IMPORTS = os.environ.get("WHOLE_RUNS_IMPORTS")
RESERVED = os.environ.get("WHOLE_RUNS_RESERVED")


class Noted(importlib.abc.MetaPathFinder):
    """Finds what others find, and notes when it has been executed."""

    def find_spec(self, name, path=None, target=None):
        """The spec of a package in the list, its loader wrapped; None for all others."""
        if name not in PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def noted(module):
                execute(module)
                if IMPORTS:
                    note(IMPORTS, f"{name} {time.time()}")
                if RESERVED and name == "torch":
                    note_reserved(module)

            spec.loader.exec_module = noted
        return spec


def note(path, line):
    """Adds a line to a file."""
    with open(path, "a") as file:
        file.write(f"{line}\n")


def note_reserved(torch):
    """Notes the allocator's peak before every reset of its counters, and at the end."""
    reset = torch.cuda.memory.reset_peak_memory_stats

    def peak():
        if torch.cuda.is_initialized():
            note(RESERVED, torch.cuda.max_memory_reserved())

    def noted(*args, **kwargs):
        peak()
        return reset(*args, **kwargs)

    torch.cuda.reset_peak_memory_stats = torch.cuda.memory.reset_peak_memory_stats = noted
    atexit.register(peak)


if IMPORTS or RESERVED:
    sys.meta_path.insert(0, Noted())
