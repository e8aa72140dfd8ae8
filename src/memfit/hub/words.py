"""What a hub's client says when something fails, in one line and without tokens."""

from __future__ import annotations

import os

from memfit.safe_text import clean, without_tokens


def reason(error: BaseException, *secrets: str | None) -> str:
    """The first line of an error or of what caused it, with every secret taken out."""
    text = str(error).strip() or type(error).__name__
    return without(text.splitlines()[0].rstrip(" .:"), *secrets)


def without(text: str, *secrets: str | None) -> str:
    """The text on one line, without these secrets and without anything that looks like one."""
    for secret in secrets:
        if secret and secret.strip():
            text = text.replace(secret.strip(), "…")
    return without_tokens(clean(text))


def causes(error: BaseException) -> list[BaseException]:
    """The error and all that led to it."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or current.__context__
    return found


def is_connection(error: BaseException) -> bool:
    """Whether it is the connection that failed, and not what was asked for."""
    # The HTTP library under huggingface_hub has changed its name; its classes have not.
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__) or isinstance(
        error, ConnectionError | TimeoutError
    )


def is_set(variable: str) -> bool:
    """Whether a switch of the environment is on, as the clients read it."""
    return os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE")
