"""Operators asked of the meta kernel at once give what fake tensors give the usual way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memfit.memory.tracing import fake_tensors
from memfit.memory.tracing.fake_tensors import run_directly, run_once

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
    aten.sub.out: lambda new: ((new(4, 6), new(4, 6)), {"out": new(4, 6)}),
    aten.logical_and.out: lambda new: ((new(4) > 0, new(4) > 0), {"out": new(4) > 0}),
    aten.bitwise_right_shift.Tensor_Scalar_out: lambda new: (
        (new(4).int(), 16), {"out": new(4).int()},
    ),
    aten.split.Tensor: lambda new: ((new(4, 6), 4, 1), {}),
    aten.split_with_sizes.default: lambda new: ((new(4, 6), [1, 3]), {}),
    aten.unbind.int: lambda new: ((new(4, 6),), {}),
    aten.sum.dim_IntList: lambda new: ((new(4, 6), [0], True), {}),
    aten.mul.Scalar: lambda new: ((new(4, 6), 2), {}),
    aten.gelu.default: lambda new: ((new(4, 6).half(),), {}),
    aten.gelu_backward.default: lambda new: ((new(4, 6), new(4, 6)), {}),
    aten.tanh.default: lambda new: ((new(4, 6),), {}),
    aten.tanh_backward.default: lambda new: ((new(4, 6), new(4, 6)), {}),
    aten._to_copy.default: lambda new: ((new(4, 6),), {"dtype": torch.bfloat16}),
    aten.index_copy.default: lambda new: ((new(4, 6), 0, _rows(), new(3, 6)), {}),
    aten.index_add.default: lambda new: ((new(4, 6), 0, _rows(), new(3, 6)), {}),
    aten.index_select.default: lambda new: ((new(4, 6).t(), 1, _rows()), {}),
    aten.embedding.default: lambda new: ((new(4, 6).half(), _rows().expand(2, 3), 0), {}),
    aten.embedding_dense_backward.default: lambda new: (
        (new(2, 3, 6), _rows().expand(2, 3), 4, 0, False), {},
    ),
    aten.linalg_vector_norm.default: lambda new: ((new(4, 6), 2.0), {}),
    aten.nll_loss_forward.default: lambda new: ((new(3, 6), _rows(), None, 1, -100), {}),
    aten.nll_loss_backward.default: lambda new: (
        (new(()), new(3, 6), _rows(), None, 1, -100, new(())), {},
    ),
    aten.add_.Tensor: lambda new: ((new(4, 6), new(6)), {"alpha": 2}),
    aten.mul_.Tensor: lambda new: ((new(4, 6).t(), new(())), {}),
    aten.mul_.Scalar: lambda new: ((new(4, 6), 2), {}),
    aten.div_.Scalar: lambda new: ((new(4, 6), 2), {}),
    aten.div_.Tensor: lambda new: ((new(4, 6), new(6)), {}),
    aten.bernoulli_.float: lambda new: ((new(4, 6), 0.5), {}),
    aten.zero_.default: lambda new: ((new(4, 6),), {}),
    aten.fill_.Scalar: lambda new: ((new(4, 6), 1), {}),
    aten.stack.default: lambda new: (([new(()).half(), new(()).half()],), {}),
    aten._foreach_norm.Scalar: lambda new: (([new(4, 6).half(), new(3)], 2.0), {}),
    aten.copy_.default: lambda new: ((new(4, 6).half(), new(6)), {}),
    aten.clamp_.default: lambda new: ((new(4, 6), 0, 1), {}),
    aten.index_put_.default: lambda new: ((new(4, 6), [_rows()], new(3, 6)), {}),
}  # fmt: skip
ALIKE: dict[Any, Call] = {
    aten.add.Tensor: lambda new: ((new(4, 6), new(4, 6)), {"alpha": 2}),
    aten.sub.Tensor: lambda new: ((new(4, 6).half(), new(4, 6).half()), {}),
    aten.mul.Tensor: lambda new: ((new(4, 6), 2), {}),
    aten.div.Tensor: lambda new: ((new(()), new(())), {}),
}
UNUSUAL: dict[str, tuple[Any, Call]] = {
    "two types": (aten.gelu_backward.default, lambda new: ((new(4).half(), new(4)), {})),
    "two layouts": (aten.tanh_backward.default, lambda new: ((new(6, 4).t(), new(4, 6)), {})),
    "a broadcast": (aten.tanh_backward.default, lambda new: ((new(4, 6), new(6)), {})),
    "integers": (aten.tanh.default, lambda new: ((new(4).long(),), {})),
    "two devices": (aten._to_copy.default, lambda new: ((new(4),), {"device": META})),
    "pinned": (aten._to_copy.default, lambda new: ((new(4),), {"pin_memory": True})),
    "transposed": (aten._to_copy.default, lambda new: ((new(4, 6).t(),), {"dtype": torch.half})),
    "a stack of rows": (aten.stack.default, lambda new: (([new(4), new(4)],), {})),
    "a stack of two types": (aten.stack.default, lambda new: (([new(()), new(()).half()],), {})),
    "by rows": (aten.linalg_vector_norm.default, lambda new: ((new(4, 6), 2.0, [1]), {})),
    "not summed": (
        aten.nll_loss_forward.default, lambda new: ((new(3, 6), _rows(), None, 0, -100), {}),
    ),
    "an autocast's product": (
        aten.addmm.default, lambda new: ((new(3), new(4, 6).half(), new(6, 3).half()), {}),
    ),
}  # fmt: skip
META = torch.device("meta")


def test_every_operator_it_takes_is_compared() -> None:
    every: set[Any] = {fake_tensors._TO_COPY, fake_tensors._STACK, fake_tensors._NORMS}
    every |= {*fake_tensors._ALLOCATES, *fake_tensors._SHAPES}
    every |= fake_tensors._FOLLOWS | fake_tensors._WRITES | fake_tensors._SEVERAL
    every |= fake_tensors._ELEMENTWISE
    assert {func for func in CALLS if not fake_tensors._changes(func)} == every
    assert set(ALIKE) == fake_tensors._ELEMENTWISE & fake_tensors._FOLLOWS


@pytest.mark.parametrize(
    ("func", "call"), [*CALLS.items(), *ALIKE.items()], ids=lambda one: str(one).split()[0]
)
def test_it_gives_what_the_usual_way_gives(func: Any, call: Call) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        args, kwargs = call(torch.empty)
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


@pytest.mark.parametrize("name", UNUSUAL)
def test_where_the_shape_is_not_that_simple_it_goes_the_usual_way(name: str) -> None:
    func, call = UNUSUAL[name]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        args, kwargs = call(torch.empty)
        assert run_directly(func, args, kwargs, mode) is NotImplemented


def test_an_update_of_lists_gives_nothing_and_leaves_them_as_they_are() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        many = [torch.empty(4, 6), torch.empty(3)]
        steps = [torch.empty(()), torch.empty(())]
        assert run_directly(aten._foreach_add_.Scalar, (steps, 1), {}, mode) is None
        assert run_directly(aten._foreach_copy_.default, (many, many), {}, mode) is None
        assert run_directly(aten._foreach_mul_.Tensor, (many, steps[0]), {}, mode) is None
        given = (many, many, many, many, [], steps)
        named = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
        named |= {"amsgrad": False, "maximize": False}
        adamw = aten._fused_adamw_.default
        assert run_directly(adamw, given, named, mode) is None
        assert adamw(*given, **named) is None
        real = [[_real(4, 6), _real(3)], *given[1:]]
        assert run_directly(adamw, tuple(real), named, mode) is NotImplemented


def test_operators_that_change_a_shape_go_the_usual_way() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.empty(4, 6)
        for func, args in (
            (aten.t_.default, ()), (aten.unsqueeze_.default, (0,)), (aten.resize_.default, ([3],)),
        ):  # fmt: skip
            assert run_directly(func, (fake, *args), {}, mode) is NotImplemented


def test_a_tensor_made_at_once_has_all_that_the_constructor_writes() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        ours = run_directly(aten.new_empty.default, (torch.empty(4), [2, 3]), {}, mode)
        usual = torch.empty(2, 3)
        assert vars(ours) == vars(usual)
        assert (type(ours), ours.dispatch_keys) == (type(usual), usual.dispatch_keys)
        assert torch._C._dispatch_keys(ours) == torch._C._dispatch_keys(usual)


ONCE: dict[str, tuple[Any, Call]] = {
    "several results": (
        aten.native_layer_norm.default, lambda new: ((new(4, 6), [6], new(6), new(6), 1e-5), {}),
    ),
    "a result that is missing": (
        aten.native_layer_norm_backward.default,
        lambda new: (
            (new(4, 6), new(4, 6), [6], new(4, 1), new(4, 1), new(6), new(6), [True, False, True]),
            {},
        ),
    ),
    "a list": (aten.cat.default, lambda new: (([new(4, 6), new(2, 6).half()],), {})),
    "transposed": (aten.relu.default, lambda new: ((new(4, 6).t(),), {})),
    "no tensor": (aten.ones.default, lambda _: (([4, 6],), {"dtype": torch.half})),
    "real positions": (aten.index.Tensor, lambda new: ((new(4, 6), [_rows()]), {})),
    "a number": (aten.pow.Tensor_Scalar, lambda new: ((new(4).int(), 2), {})),
    "a number with a point": (aten.pow.Tensor_Scalar, lambda new: ((new(4).int(), 2.0), {})),
}  # fmt: skip


@pytest.mark.parametrize("name", ONCE)
def test_the_second_time_results_are_like_the_first(name: str) -> None:
    func, call = ONCE[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        args, kwargs = call(torch.empty)
        usual = func(*args, **kwargs)
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            args, kwargs = call(torch.empty)
            ours = run_once(func, args, kwargs, mode)
            assert type(ours) is type(usual)
            for one, other in zip(_tensors(ours), _tensors(usual), strict=True):
                assert one is not None or other is None
                if one is not None:
                    assert one.fake_mode is mode
                    assert (one.shape, one.stride()) == (other.shape, other.stride())
                    assert (one.dtype, one.device) == (other.dtype, other.device)


def test_the_second_time_the_operator_is_not_run() -> None:
    shape = (7, 11, 13)  # of no other test
    seen = []

    class Watched(FakeTensorMode):
        def dispatch(self, func: Any, *given: Any, **named: Any) -> Any:
            seen.append(func)
            return super().dispatch(func, *given, **named)

    for _ in range(2):
        with Watched(allow_non_fake_inputs=True) as mode:
            fake = torch.empty(shape)
            run_once(aten.erf.default, (fake,), {}, mode)
    assert seen.count(aten.erf.default) == 1


def _tensors(found: Any) -> list[Any]:
    return list(found) if _is_several(found) else [found]


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
        assert run_directly(aten.relu.default, (fake,), {}, mode) is NotImplemented
        assert run_directly(aten.mm.default, (fake, _real(6, 3)), {}, mode) is NotImplemented
        assert run_directly(aten.t.default, (_real(4, 6),), {}, mode) is NotImplemented
    with FakeTensorMode() as another:
        assert run_directly(aten.t.default, (fake,), {}, another) is NotImplemented


def _real(*shape: int) -> torch.Tensor:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return torch.ones(*shape)


def _rows() -> torch.Tensor:
    """Real indices, as a batch's are."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return torch.tensor([2, 0, 1])
