"""Writes down when a process has imported the packages that take long, into $WHOLE_RUNS_IMPORTS.

Python imports this module by itself when its folder is on PYTHONPATH. Each line of the file is a
package and the time at which its import was finished.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time

PACKAGES = frozenset(
    ("torch", "transformers", "transformers.trainer", "accelerate", "datasets", "sklearn", "peft")
)
TARGET = os.environ.get("WHOLE_RUNS_IMPORTS")


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
                with open(TARGET, "a") as file:
                    file.write(f"{name} {time.time()}\n")

            spec.loader.exec_module = noted
        return spec


if TARGET:
    sys.meta_path.insert(0, Noted())
