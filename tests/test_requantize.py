"""Requantization to powers of two against exact rational arithmetic, compiled and in torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scale_examples import DTYPES, WHERE, checked_scale, floor_log2, int8, many, positive

from p2q import scales
from p2q.contract import exponent_bounds
from p2q.errors import ScaleError
from p2q.requantize import Requantizer, TorchRequantizer, requantize
from p2q.requantize_cpu import CpuRequantizer
from p2q.scales import RULES, Figures, Rule

REQUANTIZERS: list[Requantizer] = [TorchRequantizer(), CpuRequantizer()]


@dataclass(frozen=True)
class Result:
    weight: torch.Tensor
    figures: Figures


def requantized(weight: torch.Tensor, scale: torch.Tensor, rule: Rule) -> Result:
    """By every requantizer, which must agree."""
    first, *others = (Result(*requantize(weight, scale, rule, requantizer)) for requantizer in REQUANTIZERS)
    assert all(same(first, other) for other in others)
    return first


def same(one: Result, other: Result) -> bool:
    a, b = one.figures, other.figures
    return (
        torch.equal(one.weight, other.weight)
        and torch.equal(a.exponents, b.exponents)
        and (a.clipped, a.squared_error, a.squared_norm) == (b.clipped, b.squared_error, b.squared_norm)
    )


def level(q: int, scale: Fraction, exponent: int) -> int:
    """rne(q * s / 2^k), before the clamp."""
    return round(q * scale / Fraction(2) ** exponent)


def error(row: list[int], scale: Fraction, exponent: int) -> Fraction:
    clamped = (max(-128, min(127, level(q, scale, exponent))) for q in row)
    return sum(
        ((q * scale - new * Fraction(2) ** exponent) ** 2 for q, new in zip(row, clamped, strict=True)), Fraction()
    )


def exponent(rule: Rule, scale: Fraction, row: list[int]) -> int:
    """k of a scale by the definition of each rule."""
    floor = floor_log2(scale)
    ceil = floor + (scale != Fraction(2) ** floor)
    if rule == "ceil":
        return ceil
    if rule == "nearest":
        return floor if scale**2 < Fraction(2) ** (2 * floor + 1) else ceil
    return floor if error(row, scale, floor) < error(row, scale, ceil) else ceil


def random_weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 7 + columns)
    weight = torch.randint(-128, 128, (rows, columns), generator=generator).to(torch.int8)
    return weight, (torch.rand(rows, generator=generator) * 0.01 + 0.001).to(torch.float64)


@pytest.fixture(autouse=True)
def one_thread(threads: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """Small tensors: two OpenMP runtimes in a process (torch's, vLLM's) lose more time waiting than they gain."""
    with threads(1):
        yield


rows_of_weights = st.lists(
    st.one_of(
        st.just([0] * 5),
        st.lists(st.integers(-128, 127), min_size=5, max_size=5),
        st.lists(st.sampled_from([-128, -127, -1, 0, 1, 2, 3, 126, 127]), min_size=5, max_size=5),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("rule", RULES)
def test_subnormal_scale_over_weights_is_refused_by_row(rule: Rule) -> None:
    weight, scale = int8([[1] * 5, [1] * 5]), torch.tensor([[0.25], [1e-45]])
    result = requantized(weight, checked_scale(weight, scale), rule)
    with pytest.raises(ScaleError) as caught:
        scales.check_exponents(result.figures.exponents, 5, scale.dtype, **WHERE)
    for part in (*WHERE.values(), "2^-149 at row 1"):
        assert part in str(caught.value)


# The rules and the requantization.


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@many
@given(st.data(), rows_of_weights)
def test_requantize_equals_exact_arithmetic(
    dtype: torch.dtype, rule: Rule, data: st.DataObject, rows: list[list[int]]
) -> None:
    values = data.draw(st.lists(positive(dtype), min_size=len(rows), max_size=len(rows)))
    weight = int8(rows)
    result = requantized(weight, checked_scale(weight, torch.tensor(values).to(dtype)), rule)
    low, high = exponent_bounds(5)
    errors, norms, clipped = [], [], 0
    for index, (row, value) in enumerate(zip(rows, map(Fraction, values), strict=True)):
        k = exponent(rule, value, row)
        if not any(row) and not low <= k <= high:
            k = 0
        unclamped = [level(q, value, k) for q in row]
        assert result.figures.exponents[index] == k
        assert result.weight[index].tolist() == [max(-128, min(127, new)) for new in unclamped]
        clipped += sum(not -128 <= new <= 127 for new in unclamped)
        errors.append(float(error(row, value, k)))
        norms.append(float(sum((q * value) ** 2 for q in row)))
    assert result.figures.clipped == clipped
    assert result.figures.squared_error == math.fsum(errors)
    assert result.figures.squared_norm == math.fsum(norms)


@pytest.mark.parametrize("rule", RULES)
@many
@given(rows_of_weights, positive(torch.float32))
def test_requantize_per_tensor_equals_one_long_row(rule: Rule, rows: list[list[int]], value: float) -> None:
    flat = [q for row in rows for q in row]
    scale = torch.tensor([value], dtype=torch.float64)
    whole = requantized(int8(rows), scale, rule)
    row = requantized(int8([flat], len(flat)), scale, rule)
    if any(flat):  # for zeros the range that decides depends on K
        assert (
            whole.figures.exponents.tolist()
            == row.figures.exponents.tolist()
            == [exponent(rule, Fraction(value), flat)]
        )
        assert whole.figures.clipped == row.figures.clipped
    assert whole.weight.flatten().tolist() == row.weight.flatten().tolist()


@pytest.mark.parametrize(
    ("value", "row", "expected"),
    [
        (float.fromhex("0x1.6a09e6p+0"), [3], {"nearest": 0, "ceil": 1}),  # the float32 below sqrt 2
        (float.fromhex("0x1.6a09e8p+0"), [3], {"nearest": 1, "ceil": 1}),  # and the one above
        (1.5, [1], {"mse": 1}),  # an error of 1/2 either way: a tie goes to ceil
        (1.25, [1], {"mse": 0}),  # 1/4 against 3/4
        (1.25, [127], {"mse": 1}),  # 2^0 would clip 159 to 127
        (0.25, [127, -128], {"mse": -2, "nearest": -2, "ceil": -2}),
        (2.0**-30, [0, 0], {"mse": -30, "nearest": -30, "ceil": -30}),
    ],
)
def test_rule_chooses_the_exponent_by_hand(value: float, row: list[int], expected: dict[Rule, int]) -> None:
    scale = torch.tensor([value], dtype=torch.float64)
    for rule, k in expected.items():
        assert requantized(int8([row], len(row)), scale, rule).figures.exponents.tolist() == [k]


@pytest.mark.parametrize("rule", RULES)
def test_requantize_half_goes_to_even_and_clips_at_both_ends(rule: Rule) -> None:
    # 1.5 * 1 / 2 = 0.75, 1.5 * 3 / 2 = 2.25: only powers of two times 1.5 give halves, at k = 0.
    weight = int8([[1, 3, 5, 127, -128]])
    result = requantized(weight, torch.tensor([1.5], dtype=torch.float64), rule)
    by_floor = [2, 4, 8, 127, -128]
    by_ceil = [1, 2, 4, 95, -96]
    floor = result.figures.exponents.tolist() == [0]
    assert result.weight.tolist() == [by_floor if floor else by_ceil]
    assert result.figures.clipped == (2 if floor else 0)


def test_requantize_by_ceil_never_clips_and_by_floor_counts_each_clipped_value() -> None:
    weight = int8([[127, -128, 120, 1, 0]])
    scale = torch.tensor([1.25], dtype=torch.float64)
    assert requantized(weight, scale, "ceil").figures.clipped == 0
    nearest = requantized(weight, scale, "nearest")
    assert nearest.figures.exponents.tolist() == [0]
    assert nearest.weight.tolist() == [[127, -128, 127, 1, 0]]
    assert nearest.figures.clipped == 3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-40, 3e38])
def test_requantize_zero_row_keeps_zeros_and_a_provable_scale(rule: Rule, scale: float) -> None:
    weight, stored = int8([[0] * 5, [127, 3, -5, 1, 0]]), torch.tensor([[scale], [0.01]])
    result = requantized(weight, checked_scale(weight, stored), rule)
    alone = requantized(weight[1:], stored[1].to(torch.float64), rule)
    assert result.weight[0].tolist() == [0] * 5
    assert result.figures.exponents[0] == 0
    scales.check_exponents(result.figures.exponents, 5, stored.dtype, **WHERE)
    # The zero row adds nothing to the figures, however far its scale lies.
    assert (result.figures.clipped, result.figures.squared_error, result.figures.squared_norm) == (
        alone.figures.clipped,
        alone.figures.squared_error,
        alone.figures.squared_norm,
    )


@pytest.mark.parametrize("rule", RULES)
@many
@given(st.lists(st.floats(2.0**-40, 2.0**20, width=32), min_size=4, max_size=4), st.integers(0, 2**32 - 1))
def test_requantize_twice_changes_nothing(rule: Rule, values: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (4, 9), generator=generator).to(torch.int8)
    once = requantized(weight, torch.tensor(values, dtype=torch.float64), rule)
    scale = scales.power_of_two(once.figures.exponents, torch.empty(4, 1))
    for again in RULES:
        twice = requantized(once.weight, checked_scale(once.weight, scale), again)
        assert torch.equal(twice.weight, once.weight)
        assert torch.equal(twice.figures.exponents, once.figures.exponents)
        assert (twice.figures.clipped, twice.figures.squared_error) == (0, 0.0)


def test_requantize_leaves_its_input_alone() -> None:
    weight, scale = random_weight(6, 33)
    kept = weight.clone(), scale.clone()
    requantized(weight, scale, "mse")
    assert torch.equal(weight, kept[0])
    assert torch.equal(scale, kept[1])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(1, 1), (37, 15), (300, 512), (64, 2048), (8, 24, 64)], ids=str)
@pytest.mark.parametrize("scales_of", ["rows", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_requantize_compiled_equals_torch(
    dtype: torch.dtype, scales_of: str, shape: tuple[int, ...], rule: Rule
) -> None:
    random = torch.Generator().manual_seed(sum(shape))
    weight = torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)
    number = weight[..., 0].numel() if scales_of == "rows" else 1
    scale = torch.exp2(torch.rand(number, generator=random) * 20 - 10).to(dtype).to(torch.float64)
    assert requantized(weight, scale, rule).weight.shape == shape


def test_requantize_127_and_a_half_is_clipped_and_minus_128_and_a_half_is_not() -> None:
    weight = int8([[102, -103, 1, 0, 0]])  # times 1.25: 127.5 and -128.75
    result = requantized(weight, torch.tensor([1.25], dtype=torch.float64), "nearest")
    assert result.weight.tolist() == [[127, -128, 1, 0, 0]]
    assert result.figures.clipped == 2
    weight = int8([[-128, 0, 0, 0, 0]])  # times 257 / 256: -128.5, which rounds to even
    result = requantized(weight, torch.tensor([257 / 256], dtype=torch.float64), "nearest")
    assert result.weight.tolist() == [[-128, 0, 0, 0, 0]]
    assert result.figures.clipped == 0


@pytest.mark.parametrize("rule", RULES)
def test_requantize_does_not_depend_on_threads_or_strides(
    rule: Rule, threads: Callable[[int], AbstractContextManager[None]]
) -> None:
    weight, scale = random_weight(300, 257)
    with threads(1):
        expected = requantized(weight, scale, rule)
    with threads(2):
        assert same(requantized(weight, scale, rule), expected)
    assert same(requantized(weight.t().contiguous().t(), scale, rule), expected)


@pytest.mark.parametrize("rule", RULES)
def test_requantize_under_another_default_dtype_gives_the_same(rule: Rule) -> None:
    weight, scale = random_weight(30, 33)
    scale[3] = 2.0**-140
    expected = requantized(weight, scale, rule)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert same(requantized(weight, scale, rule), expected)
    finally:
        torch.set_default_dtype(torch.float32)
