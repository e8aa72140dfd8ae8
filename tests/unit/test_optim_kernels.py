"""The update's kernels: torch and Triton give the same codes, in chunks, in place, without waste.

Run as a script, this file is the Triton half: its kernels on the CPU through Triton's
interpreter, which has to be chosen before Triton is imported.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from memfit.memory.device import has_triton
from memfit.strategies.lowbit import lowbit_kernels, lowbit_kernels_torch, number_formats
from memfit.strategies.lowbit.lowbit_kernels import (
    Addition,
    CodedGradient,
    LowBitState,
    StepScalars,
    blocks_of,
    new_coded,
)

KINDS = [
    (torch.bfloat16, True),
    (torch.bfloat16, False),
    (torch.float16, True),
    (torch.float16, False),
    (torch.float32, False),
]
TENSORS = ("weight", "correction", "moment1", "scale1", "moment2", "scale2")


def make_state(
    numel: int, dtype: torch.dtype, correct: bool, *, block: int = 256, stream: int = 3
) -> LowBitState:
    """A parameter in the middle of training."""
    generator = torch.Generator().manual_seed(numel)
    blocks = blocks_of(numel, block)
    draw = lambda low, high, kind: torch.randint(  # noqa: E731
        low, high, (numel,), dtype=kind, generator=generator
    )
    master = torch.randn(numel, generator=generator) * 0.05
    weight, correction = number_formats.split_master(master, dtype, correct=correct)
    return LowBitState(
        weight=weight.clone(),
        correction=correction,
        moment1=draw(-127, 128, torch.int8),
        scale1=torch.rand(blocks, generator=generator) * 1e-3,
        moment2=draw(1, 256, torch.uint8),
        scale2=torch.rand(blocks, generator=generator) * 1e-3,
        stream=stream,
        row=1,
        block=block,
    )


def copy_of(state: LowBitState) -> LowBitState:
    values = {name: getattr(state, name) for name in TENSORS}
    fresh = {k: None if v is None else v.clone() for k, v in values.items()}
    return dataclasses.replace(state, **fresh)


def make_scalars(*, gate: bool = True) -> StepScalars:
    hyper = torch.zeros(2, 8)
    hyper[1] = torch.tensor([0.9, 0.1, 0.999, 0.001, 1e-4, 16.0, 1e-8, 1 - 2e-7])
    return StepScalars(
        hyper, torch.tensor(12345, dtype=torch.int32), torch.tensor(0.7), torch.tensor(gate)
    )


def make_grad(numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(numel + 1)
    size = torch.exp(torch.randn(numel, generator=generator))
    return (torch.randn(numel, generator=generator) * size * 1e-3).to(dtype)


def codes_apart(one: LowBitState, other: LowBitState) -> dict[str, float]:
    """The largest difference in codes, in scales (relative) and in masters (24-bit units)."""
    apart = {
        name: float((getattr(one, name).int() - getattr(other, name).int()).abs().max())
        for name in ("moment1", "moment2")
    }
    for name in ("scale1", "scale2"):
        a, b = getattr(one, name), getattr(other, name)
        apart[name] = float(((a - b).abs() / a.clamp_min(1e-30)).max())
    a, b = (number_formats.join_master(s.weight, s.correction) for s in (one, other))
    bits = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 20}[one.weight.dtype]
    bits += 8 if one.correction is not None else 0
    exponent = torch.frexp(torch.maximum(a.abs(), b.abs())).exponent.clamp_min(-13) - 1
    apart["master"] = float(((a - b).abs() / torch.exp2(exponent.double() - bits)).max())
    return apart


# ---------------------------------------------------------------------- the torch kernels


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


# --------------------------------------------------------------------- the Triton kernels


def interpreted() -> None:
    """Both kernels on the same states; prints the differences as lines of name and number."""
    from memfit.strategies.lowbit import lowbit_kernels_triton

    scalars = make_scalars()
    for dtype, correct in KINDS:
        # More than one program of the table's kernel once; the interpreter is slow.
        for numel in (3000, 1024 * 33) if (dtype, correct) == KINDS[0] else (3000,):
            reference, grad = make_state(numel, dtype, correct), make_grad(numel, dtype)
            one, many, parts = (copy_of(reference) for _ in range(3))
            shut = copy_of(reference)
            lowbit_kernels_torch.update(reference, grad, scalars)
            lowbit_kernels_triton.update(one, grad, scalars)
            lowbit_kernels_triton.update_many([(many, grad)], scalars)
            lowbit_kernels_triton.update(parts, grad[:2048], scalars)
            lowbit_kernels_triton.update(parts, grad[2048:], scalars, start=2048)
            for state in (one, many, parts):
                for name, value in codes_apart(reference, state).items():
                    print(name, value)
            before = copy_of(shut)
            lowbit_kernels_triton.update(shut, grad, make_scalars(gate=False))
            lowbit_kernels_triton.update_many([(shut, grad)], make_scalars(gate=False))
            print("gate", sum(codes_apart(before, shut).values()))
    interpreted_accumulation(lowbit_kernels_triton, scalars)
    interpreted_broken_weights(lowbit_kernels_triton, scalars)


def interpreted_broken_weights(kernels_triton: Any, scalars: StepScalars) -> None:
    """Weights that are not finite, with all bits a card sets in a NaN."""
    for dtype, correct in KINDS:
        if dtype == torch.float32:
            continue
        reference, grad = make_state(3000, dtype, correct), make_grad(3000, dtype)
        broken = torch.arange(4, 3000, 7)
        reference.weight[broken] = torch.tensor(0x7FFF, dtype=torch.int16).view(dtype)
        infinite = broken + 1
        reference.weight[infinite] = torch.inf
        if reference.correction is not None:
            reference.correction[broken], reference.correction[infinite] = 127, 0
        states = [copy_of(reference) for _ in range(2)]
        lowbit_kernels_torch.update(states[0], grad, scalars)
        kernels_triton.update(states[1], grad, scalars)
        for state in states:
            print("broken", float((~torch.isnan(state.weight[broken])).sum()))
            print("broken", float((~torch.isinf(state.weight[infinite])).sum()))
        if reference.correction is not None:
            one, other = (state.correction[broken] for state in states)
            print("broken", float((one != other).sum()))


def interpreted_accumulation(kernels_triton: Any, scalars: StepScalars) -> None:
    grad = make_grad(3000, torch.bfloat16)
    ways: list[tuple[Any, CodedGradient, Tensor]] = [
        (way, new_coded(3000, 256, grad.device), torch.zeros(()))
        for way in (lowbit_kernels_torch, kernels_triton)
    ]
    for keep in (0.0, 1.0, 1.0):
        for way, kept, norm in ways:
            how = Addition(torch.tensor(keep), scalars.key, stream=5, block=256, norm=norm)
            way.accumulate(kept, grad, how)
    (_, one, norm), (_, other, other_norm) = ways
    print("kept", float((one.codes.int() - other.codes.int()).abs().max()))
    print("kept_norm", float((norm - other_norm).abs() / norm))
    states = [make_state(3000, torch.bfloat16, True) for _ in range(2)]
    lowbit_kernels_torch.update(states[0], one, scalars)
    kernels_triton.update_many([(states[1], other)], scalars)
    for name, value in codes_apart(*states).items():
        print(name, value)


def run_as_script(mode: str, environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, __file__, mode],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split("\n")


needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton is not installed")


@needs_triton
def test_triton_kernels_give_the_same_codes_as_torch() -> None:
    worst: dict[str, float] = {}
    for line in run_as_script("interpret", {"TRITON_INTERPRET": "1"}):
        if line:
            name, value = line.split()
            worst[name] = max(worst.get(name, 0.0), float(value))
    assert worst["moment1"] <= 1
    assert worst["moment2"] <= 1
    assert worst["kept"] <= 1
    assert worst["scale1"] < 1e-6
    assert worst["scale2"] < 1e-6
    assert worst["kept_norm"] < 1e-5
    assert worst["master"] <= 1.01
    assert worst["gate"] == 0
    assert worst["broken"] == 0


def compiled() -> None:
    """Compile for cards that are not here: signatures as the launches would give them."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from memfit.strategies.lowbit import lowbit_kernels_triton

    kernel = lowbit_kernels_triton.update_one_kernel
    pointers = {n: "*fp32" for n in kernel.arg_names if n.endswith("_ptr")}
    pointers |= {"c_ptr": "*i8", "m_ptr": "*i8", "v_ptr": "*u8", "gate_ptr": "*u8"}
    pointers |= {"key_ptr": "*i32"}
    numbers = {"first_block": "i32", "end": "i32", "stream": "i64"}
    constants = {"CORRECT": True, "CODED": False, "BLOCK": 256, "TILE": 1024}
    for capability, weight in ((75, "fp16"), (80, "bf16"), (90, "bf16")):
        types = {"w_ptr": f"*{weight}", "g_ptr": f"*{weight}", "gs_ptr": f"*{weight}"}
        known = {**pointers, **types, **numbers}
        signature = {n: known.get(n, "constexpr") for n in kernel.arg_names}
        aligned = [i for i, n in enumerate(kernel.arg_names) if n.endswith("_ptr") or n == "end"]
        source = ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
        )
        target = GPUTarget("cuda", capability, 32)
        asm = triton.compile(source, target=target, options={"enable_fp_fusion": False}).asm["ptx"]
        print(capability, asm.count("ld.global.v4"), asm.count("st.global.v4"), tl.float32)


@needs_triton
def test_triton_kernels_compile_for_older_cards_with_vector_loads() -> None:
    """T4 (7.5, fp16), A100 (8.0) and H200 (9.0): 16 bytes a load of weights and gradients."""
    lines = [line.split() for line in run_as_script("compile", {}) if line]
    assert [line[0] for line in lines] == ["75", "80", "90"]
    for _, loads, stores, _ in lines:
        assert int(loads) >= 2
        assert int(stores) >= 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    {"interpret": interpreted, "compile": compiled}[sys.argv[1]]()
