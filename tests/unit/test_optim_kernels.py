"""The update's torch kernels: in chunks, in place, without waste."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from optim_fixtures import KINDS, TENSORS, copy_of, make_grad, make_scalars, make_state
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from memfit.strategies.lowbit import lowbit_kernels, lowbit_kernels_torch, number_formats
from memfit.strategies.lowbit.lowbit_kernels import (
    Addition,
    LowBitState,
    new_coded,
)


@pytest.mark.parametrize(("dtype", "correct"), KINDS)
def test_the_update_is_adamw_on_decoded_moments(dtype: torch.dtype, correct: bool) -> None:
    state, scalars = make_state(2000, dtype, correct), make_scalars()
    before, grad = copy_of(state), make_grad(2000, dtype)
    lowbit_kernels_torch.update(state, grad, scalars)

    def decoded(s: LowBitState) -> tuple[Tensor, Tensor]:
        codes = torch.nn.functional.pad(s.moment1, (0, 48)).view(-1, 256)
        roots = torch.nn.functional.pad(s.moment2, (0, 48)).view(-1, 256)
        m = number_formats.decode_signed(codes, s.scale1.unsqueeze(1)).view(-1)[:2000]
        root = number_formats.decode_root(roots, s.scale2.unsqueeze(1)).view(-1)[:2000]
        return m.double(), root.double().square()

    m, v = decoded(before)
    g = grad.double() * 0.7
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    w = number_formats.join_master(before.weight, before.correction).double()
    w = w * (1 - 2e-7) - 1e-4 * m / (v.sqrt() * 16 + 1e-8)
    new_m, new_v = decoded(state)
    largest = state.scale1.max().double()
    assert (new_m - m).abs().max() <= 4 * 0.5 / 127 * largest * 1.05
    # One code of 255 is at most 8 / 255 of v near the top of the block, more below.
    assert ((new_v.clamp_min(1e-30) / v.clamp_min(1e-30)).log().abs().median()) < 0.05
    place = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-22}[dtype]
    allowed = w.abs() * place / (256 if correct else 1) * 1.01 + 1e-9
    assert ((number_formats.join_master(state.weight, state.correction) - w).abs() <= allowed).all()


@pytest.mark.parametrize(("dtype", "correct"), KINDS)
def test_chunks_and_slices_do_not_change_a_bit(
    dtype: torch.dtype, correct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, scalars = make_state(5000, dtype, correct), make_scalars()
    chunked, sliced, grad = copy_of(whole), copy_of(whole), make_grad(5000, dtype)
    lowbit_kernels_torch.update(whole, grad, scalars)
    lowbit_kernels_torch.update(sliced, grad[:1024], scalars)
    lowbit_kernels_torch.update(sliced, grad[1024:], scalars, start=1024)
    monkeypatch.setattr(lowbit_kernels_torch, "CPU_CHUNK", 512)
    lowbit_kernels_torch.update(chunked, grad, scalars)
    for name in TENSORS:
        if getattr(whole, name) is not None:
            assert torch.equal(getattr(whole, name), getattr(chunked, name)), name
            assert torch.equal(getattr(whole, name), getattr(sliced, name)), name


@pytest.mark.parametrize(("dtype", "correct"), KINDS)
def test_a_shut_gate_leaves_everything_even_with_gradients_that_overflowed(
    dtype: torch.dtype, correct: bool
) -> None:
    state = make_state(3000, dtype, correct)
    before, grad = copy_of(state), make_grad(3000, dtype)
    grad[7], grad[9] = torch.inf, torch.nan
    lowbit_kernels_torch.update(state, grad, make_scalars(gate=False))
    for name in TENSORS:
        if getattr(state, name) is not None:
            assert torch.equal(getattr(state, name), getattr(before, name)), name


def test_a_kept_8_bit_gradient_steps_like_its_decoded_self() -> None:
    scalars, grad = make_scalars(), make_grad(3000, torch.bfloat16)
    kept = new_coded(3000, 256, grad.device)
    how = Addition(torch.tensor(0.0), scalars.key, stream=9, block=256, norm=torch.zeros(()))
    lowbit_kernels_torch.accumulate(kept, grad, how)
    codes = torch.nn.functional.pad(kept.codes, (0, 72)).view(-1, 256)
    decoded = number_formats.decode_signed(codes, kept.scales.unsqueeze(1)).view(-1)[:3000]
    coded, plain = (make_state(3000, torch.bfloat16, True) for _ in range(2))
    lowbit_kernels_torch.update(coded, kept, scalars)
    lowbit_kernels_torch.update(plain, decoded, scalars)
    for name in TENSORS:
        assert torch.equal(getattr(coded, name), getattr(plain, name)), name


def test_kept_gradients_add_up_and_forget_an_overflow() -> None:
    scalars, grad = make_scalars(), make_grad(5000, torch.bfloat16)
    kept, norm = new_coded(5000, 256, grad.device), torch.zeros(())

    def add(g: Tensor, keep: float, draw: int) -> None:
        key = torch.tensor(draw, dtype=torch.int32)
        how = Addition(torch.tensor(keep), key, stream=4, block=256, norm=norm)
        lowbit_kernels_torch.accumulate(kept, g, how)

    overflow = grad.clone()
    overflow[3] = torch.inf
    add(overflow, 0.0, 0)
    assert not torch.isfinite(norm)
    for index in range(4):
        add(grad, float(index > 0), index)
    true = 4 * grad.float()
    codes = torch.nn.functional.pad(kept.codes, (0, 120)).view(-1, 256)
    total = number_formats.decode_signed(codes, kept.scales.unsqueeze(1)).view(-1)[:5000]
    assert (total - true).norm() / true.norm() < 0.04
    assert abs(float(norm) / float(true.norm()) - 1) < 2e-3
    assert scalars.key.item() == 12345


class LiveBytes(TorchDispatchMode):
    """The most bytes of new storages alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen or size < 4096:
            return
        self.seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


@pytest.mark.parametrize("chunk", [lowbit_kernels_torch.CPU_CHUNK, lowbit_kernels_torch.CUDA_CHUNK])
def test_temporaries_of_the_torch_path_stay_below_16_mib(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the parameter: here a million elements, 4 MiB of fp32 each."""
    monkeypatch.setattr(lowbit_kernels_torch, "CPU_CHUNK", chunk)
    state, scalars = make_state(2**20, torch.bfloat16, True), make_scalars()
    grad = make_grad(2**20, torch.bfloat16)
    with LiveBytes() as live:
        live.seen.update(
            t.untyped_storage()._cdata
            for t in (grad, *(getattr(state, name) for name in TENSORS), scalars.hyper)
        )
        lowbit_kernels_torch.update(state, grad, scalars)
    assert live.most <= 16 * 2**20
    assert live.most >= 4 * 4 * chunk  # the tracker sees the temporaries


def test_kernels_are_picked_by_name_and_by_device() -> None:
    cpu = torch.zeros(1)
    assert lowbit_kernels.pick_kernels("auto", cpu) is lowbit_kernels_torch
    assert lowbit_kernels.pick_kernels("torch", cpu) is lowbit_kernels_torch
    with pytest.raises(ValueError, match="unknown optimizer backend 'cuda'"):
        lowbit_kernels.pick_kernels("cuda", cpu)
