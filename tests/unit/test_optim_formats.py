"""The low-bit formats: exact round trips, unbiased rounding, why codes are fourth powers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memfit.strategies.lowbit import number_formats

WEIGHTS = torch.cat(
    [
        torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * 0.05,
        torch.randn(2_000, generator=torch.Generator().manual_seed(1)) * 50,
        torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0**-14, 1 - 2**-12, 1 + 2**-9]),
    ]
)


def random16(shape: torch.Size, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**16, shape, dtype=torch.int32, generator=generator)


# ------------------------------------------------------------------ split master weights


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 16), (torch.float16, 19)])
def test_a_split_master_holds_8_bits_more_than_its_weight(dtype: torch.dtype, bits: int) -> None:
    weight, correction = number_formats.split_master(WEIGHTS, dtype, correct=True)
    master = number_formats.join_master(weight, correction)
    assert correction is not None
    assert correction.dtype == torch.int8
    assert ((master - WEIGHTS).abs() <= WEIGHTS.abs() * 2.0**-bits + 2**-33).all()
    # The weight the model computes with is the nearest one, up to exact ties.
    assert (
        (weight.float() - WEIGHTS).abs() <= (WEIGHTS.to(dtype).float() - WEIGHTS).abs() * 1.01
    ).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_split_master_survives_the_round_trip_bit_for_bit(
    dtype: torch.dtype, stochastic: bool
) -> None:
    """Also under stochastic rounding: what is representable already does not move."""
    weight, correction = number_formats.split_master(WEIGHTS, dtype, correct=True)
    master = number_formats.join_master(weight, correction)
    noise = random16(master.shape) if stochastic else None
    again, rest = number_formats.split_master(master, dtype, correct=True, random16=noise)
    assert torch.equal(number_formats.join_master(again, rest), master)
    assert rest is not None
    assert correction is not None
    assert torch.equal(again.view(torch.int16), weight.view(torch.int16))
    assert torch.equal(rest, correction)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_weight_and_correction_is_reached(dtype: torch.dtype) -> None:
    """All 256 corrections occur, so the master really has 24 bits."""
    _, correction = number_formats.split_master(WEIGHTS, dtype, correct=True)
    assert correction is not None
    assert correction.unique().numel() == 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("correct", [True, False])
def test_stochastic_rounding_of_weights_is_unbiased(dtype: torch.dtype, correct: bool) -> None:
    values = torch.tensor([0.0123, -1.001, 3.3e-4, 0.99999, -2.7, 0.0625001])
    repeated = values.repeat(100_000, 1)
    drawn = number_formats.join_master(
        *number_formats.split_master(
            repeated, dtype, correct=correct, random16=random16(repeated.shape)
        )
    )
    error = (drawn.double().mean(0) - values).abs()
    assert (error <= 4.5 * drawn.double().std(0) / 100_000**0.5).all()


def test_fp32_weights_need_no_correction() -> None:
    weight, correction = number_formats.split_master(WEIGHTS, torch.float32, correct=True)
    assert correction is None
    assert torch.equal(weight, WEIGHTS)


# ------------------------------------------------------------------------------- codes


def blocks(seed: int = 0, count: int = 64) -> Tensor:
    """Blocks of 256 whose values spread over four decades, as moments do."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 256, generator=generator) * torch.exp(
        1.5 * torch.randn(count, 256, generator=generator)
    )


def test_signed_codes_are_right_to_a_code_and_keep_the_largest() -> None:
    x = blocks()
    codes, scale = number_formats.encode_signed(x)
    back = number_formats.decode_signed(codes, scale)
    assert codes.dtype == torch.int8
    # Half a code is 1 / 254 in the fourth root of the share of the block's largest.
    levels, exact = (t.abs().div(scale).pow(0.25) for t in (back, x))
    assert (levels - exact).abs().max() <= 0.5 / 127 + 1e-6
    assert torch.equal(codes.abs().amax(1), torch.full((64,), 127, dtype=torch.int8))
    assert (torch.sign(back) * torch.sign(x) >= 0).all()


def test_an_all_zero_block_stays_zero() -> None:
    zero = torch.zeros(2, 256)
    codes, scale = number_formats.encode_signed(zero)
    roots, root_scale = number_formats.encode_root(zero, random16(zero.shape))
    assert number_formats.decode_signed(codes, scale).abs().max() == 0
    assert number_formats.decode_root(roots, root_scale).abs().max() == 0


def assert_mean(draws: Tensor, expected: Tensor) -> None:
    """The mean of many draws lies within 4.5 standard errors, and fp32 rounding."""
    error = (draws.mean(0) - expected).abs()
    allowed = 4.5 * draws.std(0) / draws.shape[0] ** 0.5 + 2e-6 * expected.abs()
    assert (error <= allowed).all()


def test_kept_gradients_round_unbiased() -> None:
    x = blocks(count=1)
    draws = torch.stack(
        [
            number_formats.decode_signed(*number_formats.encode_signed(x, random16(x.shape, seed)))
            for seed in range(3000)
        ]
    ).double()
    assert_mean(draws, x)


def test_second_moments_round_unbiased_in_v_not_in_its_root() -> None:
    root = blocks(seed=3, count=1).abs() + 0.01
    draws = torch.stack(
        [
            number_formats.decode_root(
                *number_formats.encode_root(root, random16(root.shape, seed))
            ).square()
            for seed in range(3000)
        ]
    ).double()
    assert_mean(draws, root.square())


def update_error(code: str, spread: float, steps: int = 120) -> tuple[float, float]:
    """Error of the summed updates against fp32 moments, and the largest update's factor.

    Gradients are normal with a size of their own each, log-normal within a block.
    """
    generator = torch.Generator().manual_seed(5)
    usual = torch.exp(spread * torch.randn(64, 256, generator=generator)) * 1e-5
    m = v = m8 = v8 = total = total8 = torch.zeros(64, 256)
    largest = 0.0
    for step in range(1, steps + 1):
        grad = usual * torch.randn(64, 256, generator=generator)
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        m8, v8 = 0.9 * m8 + 0.1 * grad, 0.999 * v8 + 0.001 * grad**2
        correction = (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
        true, low = (a / (b.sqrt() + 1e-12) * correction for a, b in ((m, v), (m8, v8)))
        total, total8 = total + true, total8 + low
        largest = max(largest, float(low.abs().max() / true.abs().max()))
        root = v8.sqrt()
        scale = root.amax(1, keepdim=True)
        if code == "fourth":
            m8 = number_formats.decode_signed(*number_formats.encode_signed(m8))
            v8 = (
                number_formats.decode_root(
                    *number_formats.encode_root(root, random16(root.shape, step))
                )
                ** 2
            )
        elif code == "square":
            v8 = ((root / scale).sqrt() * 255).round().div(255).pow(4) * scale**2
        elif code == "linear":
            v8 = ((root / scale * 255).round() / 255 * scale) ** 2
        else:
            v8 = ((root / scale * 255).ceil() / 255 * scale) ** 2
    return float((total8 - total).norm() / total.norm()), largest


def test_fourth_powers_keep_updates_that_linear_codes_lose() -> None:
    """The spread of a pre-trained encoder's query weights within their blocks is 0.8."""
    error, largest = update_error("fourth", 0.8)
    assert error < 0.07
    assert largest < 1.3
    _, linear_largest = update_error("linear", 0.8)
    assert linear_largest > 10
    rounded_up, _ = update_error("ceil", 0.8)
    assert rounded_up > 0.25


def test_fourth_powers_hold_where_squares_give_way() -> None:
    error, largest = update_error("fourth", 1.8)
    square, square_largest = update_error("square", 1.8)
    assert error < 0.2
    assert largest < 3
    assert square > 2 * error
    assert square_largest > 2 * largest


# ------------------------------------------------------------------------------- noise


def test_noise_is_uniform_and_its_two_halves_are_independent() -> None:
    low, high = number_formats.noise(torch.tensor(77, dtype=torch.int32), 0, 2**20)
    for half in (low, high):
        assert int(half.min()) >= 0
        assert int(half.max()) < 2**16
        counts = torch.histc(half.float(), bins=256, min=0, max=2**16).double()
        chi2 = ((counts - 4096) ** 2 / 4096).sum()
        assert 150 < chi2 < 380  # 255 degrees of freedom
    correlation = torch.corrcoef(torch.stack([low.double(), high.double()]))[0, 1]
    assert abs(correlation) < 0.005


def test_noise_differs_between_steps_and_parameters() -> None:
    key = torch.tensor(5, dtype=torch.int32)
    draws = [
        number_formats.noise(number_formats.stream_key(key + step, stream), 0, 2**16)[0].double()
        for step in range(3)
        for stream in range(3)
    ]
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(9)
    assert correlation.abs().max() < 0.02


def test_noise_of_a_slice_is_the_slice_of_the_noise_beyond_2_to_the_31() -> None:
    """An embedding of 250k x 16k has more elements than an int32 counts."""
    key = torch.tensor(9, dtype=torch.int32)
    start = 2**31 - 512
    whole, _ = number_formats.noise(key, start, 1024)
    part, _ = number_formats.noise(key, start + 512, 512)
    assert torch.equal(whole[512:], part)
    assert whole.unique().numel() > 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("drawn", [None, 0, 0xFFFF])
def test_a_master_that_is_not_finite_is_never_rounded_to_a_number(
    dtype: torch.dtype, correct: bool, drawn: int | None
) -> None:
    """Cards write NaN with all bits set: one more and it would be a zero."""
    patterns = [0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -0x400000, 0x7F800000, -0x800000]
    bits = torch.tensor(patterns, dtype=torch.int32)
    master = bits.view(torch.float32)
    random16 = None if drawn is None else torch.full_like(bits, drawn)
    weight, correction = number_formats.split_master(
        master, dtype, correct=correct, random16=random16
    )
    found = number_formats.join_master(weight, correction)
    assert torch.equal(torch.isnan(found), torch.isnan(master))
    assert torch.equal(torch.isinf(weight), torch.isinf(master))
    assert torch.equal(found[5:], master[5:])
    if correction is not None:
        assert not correction[:5].any()
