"""Looking at a step's loss never makes the device wait for the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.training.health import _numbers


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators that were run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("norm", "expected"), [(None, 0.0), (1.5, 1.5), (torch.tensor(2.0, dtype=torch.float64), 2.0)]
)
def test_numbers_are_made_where_the_loss_is(norm: Any, expected: float) -> None:
    loss = torch.tensor([0.25], requires_grad=True)
    with Seen() as seen:
        found = _numbers(loss, norm)
    assert found.tolist() == [0.25, expected]
    assert found.dtype is torch.float32
    assert not found.requires_grad
    # A number that is made on the host and copied over is waited for on a GPU.
    assert not {"aten::lift_fresh", "aten::copy_"} & set(seen.names)


def test_a_number_made_on_the_host_would_be_seen() -> None:
    with Seen() as seen:
        torch.as_tensor(0.0, device="cpu")
    assert "aten::lift_fresh" in seen.names or "aten::copy_" in seen.names
