"""Memory techniques, one a file; registry.py is the order."""

from memfit.strategies.base import Fidelity, Setup, Strategy
from memfit.strategies.packing import Packing
from memfit.strategies.registry import BY_NAME, ORDER, apply_all, by_name, ordered

__all__ = [
    "BY_NAME",
    "ORDER",
    "Fidelity",
    "Packing",
    "Setup",
    "Strategy",
    "apply_all",
    "by_name",
    "ordered",
]
