"""Operators asked of the meta kernel at once give what fake tensors give the usual way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memfit.memory import fake_ops
from memfit.memory.fake_ops import run_directly

aten = torch.ops.aten
Call = Callable[[Callable[..., torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]

CALLS: dict[Any, Call] = {
    aten.view.default: lambda new: ((new(4, 6), [2, 12]), {}),
    aten._unsafe_view.default: lambda new: ((new(4, 6), [2, 12]), {}),
    aten.detach.default: lambda new: ((new(4, 6),), {}),
    aten.alias.default: lambda new: ((new(4, 6),), {}),
    aten.t.default: lambda new: ((new(4, 6),), {}),
    aten.transpose.int: lambda new: ((new(2, 4, 6), 0, 2), {}),
    aten.permute.default: lambda new: ((new(2, 4, 6), [2, 0, 1]), {}),
    aten.expand.default: lambda new: ((new(1, 6), [4, 6]), {}),
    aten.select.int: lambda new: ((new(4, 6), 0, 2), {}),
    aten.slice.Tensor: lambda new: ((new(4, 6), 1, 1, 5, 2), {}),
    aten.unsqueeze.default: lambda new: ((new(4, 6), 1), {}),
    aten.squeeze.dim: lambda new: ((new(4, 1, 6), 1), {}),
    aten.as_strided.default: lambda new: ((new(4, 6), [3, 2], [6, 1], 5), {}),
    aten.mm.default: lambda new: ((new(4, 6), new(6, 3)), {}),
    aten.addmm.default: lambda new: ((new(3), new(4, 6), new(6, 3)), {}),
    aten.bmm.default: lambda new: ((new(2, 4, 6), new(2, 6, 3)), {}),
    aten.clone.default: lambda new: ((new(4, 6).t(),), {}),
    aten.add.Tensor: lambda new: ((new(4, 6), new(6)), {"alpha": 2}),
    aten.sub.Tensor: lambda new: ((new(4, 6), new(4, 1)), {}),
    aten.mul.Tensor: lambda new: ((new(4, 6).half(), new(6)), {}),
    aten.div.Tensor: lambda new: ((new(4, 6), new(6)), {}),
    aten.new_empty.default: lambda new: ((new(4, 6), [3, 2]), {}),
    aten.new_zeros.default: lambda new: ((new(4, 6), [3]), {"dtype": torch.int64}),
    aten.empty_like.default: lambda new: ((new(4, 6).t(),), {}),
    aten.zeros_like.default: lambda new: ((new(4, 6),), {"dtype": torch.bfloat16}),
    aten.empty.memory_format: lambda _: (([4, 6],), {"dtype": torch.float16}),
    aten.zeros.default: lambda _: (([4],), {"device": torch.device("cpu")}),
    aten.linalg_vector_norm.out: lambda new: ((new(4, 6),), {"out": new(())}),
    aten.where.self_out: lambda new: ((new(4) > 0, new(4), new(4)), {"out": new(4)}),
    aten.split.Tensor: lambda new: ((new(4, 6), 4, 1), {}),
    aten.split_with_sizes.default: lambda new: ((new(4, 6), [1, 3]), {}),
    aten.unbind.int: lambda new: ((new(4, 6),), {}),
}


def test_every_operator_it_takes_is_compared() -> None:
    every = fake_ops._FOLLOWS | fake_ops._ALLOCATES | fake_ops._WRITES | fake_ops._SEVERAL
    assert set(CALLS) == every


@pytest.mark.parametrize("func", CALLS, ids=str)
def test_it_gives_what_the_usual_way_gives(func: Any) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        args, kwargs = CALLS[func](torch.empty)
        usual = func(*args, **kwargs)
        ours = run_directly(func, args, kwargs, mode)
        pairs = list(zip(ours, usual, strict=True)) if _is_several(usual) else [(ours, usual)]
        for one, other in pairs:
            assert isinstance(one, FakeTensor)
            assert one.fake_mode is mode
            assert (one.shape, one.stride(), one.storage_offset()) == (
                other.shape, other.stride(), other.storage_offset(),
            )  # fmt: skip
            assert (one.dtype, one.device) == (other.dtype, other.device)
            assert _shared(one, args) == _shared(other, args)


def _is_several(found: Any) -> bool:
    return isinstance(found, (tuple, list))


def _shared(tensor: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Whether it is a view of the first argument."""
    first = args[0]
    return (
        isinstance(first, torch.Tensor)
        and tensor.untyped_storage()._cdata == first.untyped_storage()._cdata
    )


def test_what_it_does_not_know_goes_the_usual_way() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.empty(4, 6)
        assert run_directly(aten.relu.default, (fake,), {}, mode) is None
        assert run_directly(aten.mm.default, (fake, _real(6, 3)), {}, mode) is None
        assert run_directly(aten.t.default, (_real(4, 6),), {}, mode) is None
    with FakeTensorMode() as another:
        assert run_directly(aten.t.default, (fake,), {}, another) is None


def _real(*shape: int) -> torch.Tensor:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return torch.ones(*shape)
