"""Strategies of other packages: found by entry point, read without importing them.

[project.entry-points."memfit.strategies"]
    sign_updates = "my_package.strategies:SignUpdates"

The entry point has the strategy's own name. strategies/registry.py loads what they point to.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "memfit.strategies"


@functools.cache
def strategy_plugins() -> dict[str, EntryPoint]:
    """Returns the entry points by name; every installed package is looked at, once."""
    from importlib.metadata import entry_points

    return {one.name: one for one in sorted(entry_points(group=GROUP))}


def plugin_versions() -> dict[str, str]:
    """Returns the package and version behind each name."""
    return {name: package_of(one) for name, one in strategy_plugins().items()}


def package_of(plugin: EntryPoint) -> str:
    """Returns the name and version of the package that brings it."""
    return f"{plugin.dist.name} {plugin.dist.version}" if plugin.dist else plugin.value
