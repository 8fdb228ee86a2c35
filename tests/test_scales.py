"""Power-of-two scales and requantization against exact rational arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scale_examples import DTYPES, WHERE, checked_scale, floor_log2, int8, many, positive

from p2q import scales
from p2q.contract import exponent_bounds
from p2q.errors import ScaleError


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 bit patterns of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


@pytest.fixture(autouse=True)
def one_thread(threads: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """Small tensors: two OpenMP runtimes in a process (torch's, vLLM's) lose more time waiting than they gain."""
    with threads(1):
        yield


# Splitting a scale.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_decompose_every_positive_number_is_exact(dtype: torch.dtype) -> None:
    values = every_number(dtype)
    values = values[torch.isfinite(values) & (values > 0)]
    significand, floor = scales.decompose(values)
    assert ((significand >= 1 << 23) & (significand < 1 << 24)).all()
    for value, m, f in zip(values.tolist(), significand.tolist(), floor.tolist(), strict=True):
        assert Fraction(value) == m * Fraction(2) ** (f - 23)


@many
@given(st.lists(positive(torch.float32), min_size=1, max_size=20))
def test_decompose_float32_is_exact(values: list[float]) -> None:
    significand, floor = scales.decompose(torch.tensor(values))
    for value, m, f in zip(values, significand.tolist(), floor.tolist(), strict=True):
        assert 1 << 23 <= m < 1 << 24
        assert Fraction(value) == m * Fraction(2) ** (f - 23)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_is_power_of_two_every_number_equals_its_definition(dtype: torch.dtype) -> None:
    values = every_number(dtype)
    expected = [
        math.isfinite(value) and value > 0 and Fraction(value) == Fraction(2) ** floor_log2(Fraction(value))
        for value in values.tolist()
    ]
    assert scales.is_power_of_two(values).tolist() == expected
    subnormals, normals = (9, 30) if dtype == torch.float16 else (6, 254)
    assert sum(expected) == subnormals + normals + 1


def test_is_power_of_two_keeps_the_shape_and_refuses_what_is_no_number() -> None:
    scale = torch.tensor([[2.0**-149], [2.0**127], [1.0], [0.0], [-2.0], [math.inf], [math.nan], [1 + 2.0**-23]])
    assert scales.is_power_of_two(scale).tolist() == [[True]] * 3 + [[False]] * 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(-1, 1), (-1,)], ids=["column", "vector"])
def test_power_of_two_reads_back_exactly_wherever_it_is_proved(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    proved = []
    for k in range(-200, 200):
        try:
            scales.check_exponents(torch.tensor([k]), 64, dtype, **WHERE)
        except ScaleError:
            continue
        proved.append(k)
    low, high = exponent_bounds(64)
    assert proved == list(range(-24 if dtype == torch.float16 else low, (15 if dtype == torch.float16 else high) + 1))
    like = torch.empty(len(proved), dtype=dtype).reshape(shape)
    scale = scales.power_of_two(torch.tensor(proved, dtype=torch.int32), like)
    assert (scale.dtype, scale.shape) == (dtype, like.shape)
    assert [Fraction(value) for value in scale.flatten().tolist()] == [Fraction(2) ** k for k in proved]
    assert scales.is_power_of_two(scale).all()
    assert scales.exponent_of(scale).tolist() == proved


# Scales that mean nothing.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -0.5])
def test_check_scale_bad_value_names_file_tensor_and_row(dtype: torch.dtype, bad: float) -> None:
    scale = torch.tensor([[0.5], [0.25], [bad], [1.0]]).to(dtype)
    with pytest.raises(ScaleError) as caught:
        checked_scale(torch.zeros(4, 5, dtype=torch.int8), scale)
    for part in (*WHERE.values(), "row 2", str(bad)):
        assert part in str(caught.value)


@pytest.mark.parametrize("scale", [[0.5, 0.0, 0.0], [0.0]], ids=["per channel", "per tensor"])
def test_check_scale_zero_over_weights_is_refused(scale: list[float]) -> None:
    weight = int8([[1] * 5, [0] * 5, [0, 0, 0, 0, -1]])
    row = "row 2" if len(scale) == 3 else "row 0"
    with pytest.raises(ScaleError, match=f"{WHERE['tensor']}.*{row}"):
        checked_scale(weight, torch.tensor(scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_check_scale_zero_over_zero_row_becomes_one(dtype: torch.dtype) -> None:
    weight = int8([[1] * 5, [0] * 5])
    checked = checked_scale(weight, torch.tensor([[0.25], [0.0]]).to(dtype))
    assert checked.dtype == torch.float64
    assert checked.tolist() == [0.25, 1.0]
    assert checked_scale(torch.zeros_like(weight), torch.tensor(-0.0).to(dtype)).tolist() == [1.0]


@pytest.mark.parametrize("shape", [(2, 1), (2,), (1, 1), (1,), ()], ids=str)
def test_check_scale_every_usual_shape_is_taken(shape: tuple[int, ...]) -> None:
    checked = checked_scale(int8([[1] * 5, [2] * 5]), torch.full(shape, 0.3))
    assert checked.tolist() == [torch.tensor(0.3).double().item()] * math.prod(shape)


@pytest.mark.parametrize(
    "scale",
    [
        torch.ones(3, 1),
        torch.ones(1, 2),
        torch.ones(2, 1, 1),
        torch.ones(0),
        torch.ones(2, 1, dtype=torch.int32),
        torch.ones(2, 1, dtype=torch.float64),
        torch.ones(2, 1).to(torch.float8_e4m3fn),
    ],
    ids=lambda scale: f"{scale.dtype}{list(scale.shape)}",
)
def test_check_scale_other_shape_or_dtype_is_refused(scale: torch.Tensor) -> None:
    with pytest.raises(ScaleError, match=r"expected float32, float16 or bfloat16 of shape \[2, 1\], \[2\] or \[1\]"):
        checked_scale(int8([[1] * 5, [2] * 5]), scale)


@pytest.mark.parametrize("k", [1, 64, 4096, 132_104])
def test_check_exponents_ends_are_those_of_the_proof(k: int) -> None:
    low, high = exponent_bounds(k)
    scales.check_exponents(torch.tensor([low, high]), k, torch.float32, **WHERE)
    for outside in (low - 1, high + 1):
        with pytest.raises(ScaleError, match=rf"expected an exponent in \[{low}, {high}\].*2\^{outside} at row 1"):
            scales.check_exponents(torch.tensor([0, outside]), k, torch.float32, **WHERE)


# Sums that decide the mse rule.


@many
@given(st.lists(st.lists(st.integers(-(2**31), 2**31), min_size=4, max_size=4), min_size=1, max_size=5))
def test_sum_of_squares_is_exact(rows: list[list[int]]) -> None:
    high, low = scales.sum_of_squares(torch.tensor(rows))
    assert [upper * 2**32 + lower for upper, lower in zip(high.tolist(), low.tolist(), strict=True)] == [
        sum(value**2 for value in row) for row in rows
    ]
    assert ((low >= 0) & (low < 2**32)).all()


def test_sum_of_squares_past_int64_is_exact() -> None:
    high, low = scales.sum_of_squares(torch.full((1, 10_000), 2**31 - 1))
    assert high.item() * 2**32 + low.item() == 10_000 * (2**31 - 1) ** 2 > 2**63


def test_choose_smaller_compares_both_limbs_and_gives_ties_to_ceil() -> None:
    floor, ceil = torch.tensor([0, 0, 0, 0, 0]), torch.tensor([1, 1, 1, 1, 1])
    floor_error = torch.tensor([1, 2, 1, 1, 1]), torch.tensor([9, 0, 5, 6, 5])
    ceil_error = torch.tensor([2, 1, 1, 1, 1]), torch.tensor([0, 9, 6, 5, 5])
    assert scales.choose_smaller(floor, ceil, floor_error, ceil_error).tolist() == [0, 1, 0, 1, 1]
