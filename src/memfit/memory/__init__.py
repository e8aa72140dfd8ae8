"""Every byte of a training step: predicted without a GPU, or measured on one.

`stock_estimate` answers for the stock Trainer, `tracing` follows tensors, `allocator` and
`cuda_context` turn them into what a card must hold. `register_operator` supplies an operator the
trace cannot run; see `memfit.memory.tracing.operators`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.memory.tracing.operators import register_operator, unregister_operator

__all__ = ["register_operator", "unregister_operator"]


def __getattr__(name: str) -> Any:
    # Not at import: this needs torch, and the command line starts without it.
    if name in __all__:
        from memfit.memory.tracing import operators

        return getattr(operators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
