"""Settings that plan files of earlier versions name, and what becomes of them.

A setting whose value is now the only one is dropped; a value that is gone is refused with what to
write instead. docs/history.md has the figures behind each removal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.errors import ConfigError
from memfit.i18n import N_, Message
from memfit.strategies.lowbit.gradient_release import USED_UP_IN_BACKWARD

_ALWAYS_SO: dict[tuple[str, str], Any] = {
    ("checkpointing", "part"): "layer",
    ("gradient_release", "clip"): "none",
    ("gradient_release", "accumulate"): False,
}
"""Settings that are gone, with the value that every plan has now."""

_REFUSED: dict[tuple[str, str], dict[str, str]] = {
    ("checkpointing", "part"): {
        "mlp": N_("halves of layers are no longer recomputed; leave part = {value} out"),
    },
    ("gradient_release", "mode"): dict.fromkeys(("two_pass", "release"), USED_UP_IN_BACKWARD),
}


def current_settings(name: str, settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a strategy's settings without those of earlier versions; `where` names the file."""
    for setting, value in settings.items():
        sentences = _REFUSED.get((name, setting), {})
        if isinstance(value, str) and value in sentences:
            reason = Message(sentences[value], value=repr(value))
            raise ConfigError("{where}: {reason}", where=where, reason=reason)
    return {
        setting: value
        for setting, value in settings.items()
        if (name, setting) not in _ALWAYS_SO or value != _ALWAYS_SO[name, setting]
    }
