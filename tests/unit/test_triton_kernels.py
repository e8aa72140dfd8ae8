"""The Triton kernels, run by Triton's interpreter on the CPU, against the plain ones.

Run as a script, this file is what the interpreter runs: it has to be chosen before Triton is
imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from optim_fixtures import KINDS, codes_apart, copy_of, make_grad, make_scalars, make_state
from torch import Tensor

from memfit.memory.device import has_triton
from memfit.strategies.lowbit import lowbit_kernels_torch
from memfit.strategies.lowbit.lowbit_kernels import (
    Addition,
    CodedGradient,
    StepScalars,
    new_coded,
)

pytestmark = pytest.mark.skipif(not has_triton(), reason="Triton is not installed")

# Odd row counts, widths that are no power of two, and more rows than one program reads.
NORM_SHAPES = [(3, 312), (5, 768), (3, 1024), (1, 4096)]
MATRIX_SHAPES = [(3, 312), (70, 200), (2, 1024)]
EXACT, ONE_BF16_STEP = 3e-6, 2**-6


def fused() -> Iterator[tuple[str, list[float]]]:
    """For each case, each result's largest difference, of the largest value."""
    from memfit.strategies.fused import fused_kernels_torch, fused_kernels_triton
    from memfit.strategies.fused.fused_kernels import Drop

    def compare(name: str, ours: object, theirs: object) -> tuple[str, list[float]]:
        pairs = zip(ours, theirs, strict=True)  # type: ignore[call-overload]
        return name, [_error(mine, other) for mine, other in pairs]

    generator = torch.Generator().manual_seed(0)
    for dtype, shape in [(torch.float32, s) for s in NORM_SHAPES] + [(torch.bfloat16, (5, 96))]:
        x, r, dy = torch.randn(3, *shape, generator=generator).to(dtype)
        weight, bias = torch.randn(2, shape[1], generator=generator).to(dtype)
        for drop in (None, Drop(0.3, torch.tensor([2**61 + 12345]), 5)):
            name = f"{dtype} {shape} {drop is not None}"
            given = (x, r, weight, bias, 1e-12, drop)
            normed = fused_kernels_torch.add_norm(*given)
            yield compare(f"norm {name}", fused_kernels_triton.add_norm(*given), normed)
            back = (dy, normed, weight, drop)
            ours, theirs = (
                k.add_norm_backward(*back) for k in (fused_kernels_triton, fused_kernels_torch)
            )
            yield compare(f"norm backward {name}", ours, theirs)
    cases = [(torch.float32, s) for s in MATRIX_SHAPES] + [(torch.bfloat16, (5, 96))]
    for dtype, shape in cases:
        x, y, z = (torch.randn(3, *shape, generator=generator) * 3).to(dtype)
        both = fused_kernels_triton, fused_kernels_torch
        for kind in ("erf", "tanh"):
            yield compare(f"gelu {dtype} {shape} {kind}", *([k.gelu(x, kind)] for k in both))
            ours, theirs = (k.gelu_backward(x, y.clone(), kind) for k in both)
            yield compare(f"gelu backward {dtype} {shape} {kind}", ours, theirs)
        # A transposed view, as attention gives them, and two whose rows are far apart.
        parts = (torch.cat([x, y], 1)[:, : shape[1]], y, z.t().contiguous().t())
        yield compare(f"join {dtype} {shape}", *(k.join(parts) for k in both))


def _error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    difference = (ours.double() - theirs.double()).abs().max()
    return float(difference / theirs.double().abs().max())


def lowbit() -> Iterator[tuple[str, float]]:
    """Both kernels on the same states: the differences, each with its name."""
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
                yield from codes_apart(reference, state).items()
            before = copy_of(shut)
            lowbit_kernels_triton.update(shut, grad, make_scalars(gate=False))
            lowbit_kernels_triton.update_many([(shut, grad)], make_scalars(gate=False))
            yield "gate", sum(codes_apart(before, shut).values())
    yield from accumulation(lowbit_kernels_triton, scalars)
    yield from broken_weights(lowbit_kernels_triton, scalars)


def broken_weights(kernels_triton: Any, scalars: StepScalars) -> Iterator[tuple[str, float]]:
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
            yield "broken", float((~torch.isnan(state.weight[broken])).sum())
            yield "broken", float((~torch.isinf(state.weight[infinite])).sum())
        if reference.correction is not None:
            one, other = (state.correction[broken] for state in states)
            yield "broken", float((one != other).sum())


def accumulation(kernels_triton: Any, scalars: StepScalars) -> Iterator[tuple[str, float]]:
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
    yield "kept", float((one.codes.int() - other.codes.int()).abs().max())
    yield "kept_norm", float((norm - other_norm).abs() / norm)
    states = [make_state(3000, torch.bfloat16, True) for _ in range(2)]
    lowbit_kernels_torch.update(states[0], one, scalars)
    kernels_triton.update_many([(states[1], other)], scalars)
    yield from codes_apart(*states).items()


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What a process with the interpreter found."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.mark.slow
def test_fused_kernels_equal_the_plain_ones(interpreted: dict[str, Any]) -> None:
    results: dict[str, list[float]] = interpreted["fused"]
    assert len(results) == 2 * 5 * 2 + 4 * 5
    for name, errors in results.items():
        # The interpreter cuts fp32 to bf16 where the card rounds.
        assert max(errors) <= (ONE_BF16_STEP if "bfloat16" in name else EXACT), name


def test_the_updates_kernels_give_the_same_codes_as_torch(interpreted: dict[str, Any]) -> None:
    worst: dict[str, float] = {}
    for name, value in interpreted["lowbit"]:
        worst[name] = max(worst.get(name, 0.0), value)
    assert worst["moment1"] <= 1
    assert worst["moment2"] <= 1
    assert worst["kept"] <= 1
    assert worst["scale1"] < 1e-6
    assert worst["scale2"] < 1e-6
    assert worst["kept_norm"] < 1e-5
    assert worst["master"] <= 1.01
    assert worst["gate"] == 0
    assert worst["broken"] == 0


def compiled() -> Iterator[tuple[int, int, int]]:
    """For cards that are not here, with signatures as the launches would give them.

    Yields the capability, and how many loads and stores are of 16 bytes.
    """
    import triton
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
        yield capability, asm.count("ld.global.v4"), asm.count("st.global.v4")


def test_kernels_compile_for_older_cards_with_vector_loads() -> None:
    """T4 (7.5, fp16), A100 (8.0) and H200 (9.0): 16 bytes a load of weights and gradients."""
    found = list(compiled())
    assert [capability for capability, _, _ in found] == [75, 80, 90]
    for _, loads, stores in found:
        assert loads >= 2
        assert stores >= 1


if __name__ == "__main__":
    print(json.dumps({"fused": dict(fused()), "lowbit": list(lowbit())}))
