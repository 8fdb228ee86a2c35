"""Power-of-two scales and requantization against exact rational arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2q import scales
from p2q.contract import exponent_bounds
from p2q.errors import ScaleError
from p2q.scales import RULES, Rule

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WHERE = {"file": "model.safetensors", "tensor": "layers.4.mlp.up_proj.weight_scale"}

many = settings(deadline=None, max_examples=150)


def floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent - (value < Fraction(2) ** exponent)


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


def int8(rows: list[list[int]], columns: int = 5) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int8).reshape(-1, columns)


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 bit patterns of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def random_weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 7 + columns)
    weight = torch.randint(-128, 128, (rows, columns), generator=generator).to(torch.int8)
    return weight, (torch.rand(rows, generator=generator) * 0.01 + 0.001).to(torch.float64)


def same(one: scales.Requantized, other: scales.Requantized) -> bool:
    return (
        torch.equal(one.weight, other.weight)
        and torch.equal(one.exponents, other.exponents)
        and (one.clipped, one.squared_error, one.squared_norm)
        == (other.clipped, other.squared_error, other.squared_norm)
    )


@pytest.fixture(autouse=True)
def one_thread(threads: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """Small tensors: two OpenMP runtimes in a process (torch's, vLLM's) lose more time waiting than they gain."""
    with threads(1):
        yield


# Positive values that a dtype holds, subnormals included. Most are near enough to one another to share an exponent.
def positive(dtype: torch.dtype) -> st.SearchStrategy[float]:
    if dtype == torch.bfloat16:
        return st.integers(1, 0x7F7F).map(lambda pattern: torch.tensor(pattern).to(torch.int16).view(dtype).item())
    width = 32 if dtype == torch.float32 else 16
    largest = torch.finfo(dtype).max
    return st.one_of(
        st.floats(0, largest, width=width, exclude_min=True),
        st.floats(2.0**-9, 2.0**-7, width=width),
    )


rows_of_weights = st.lists(
    st.one_of(
        st.just([0] * 5),
        st.lists(st.integers(-128, 127), min_size=5, max_size=5),
        st.lists(st.sampled_from([-128, -127, -1, 0, 1, 2, 3, 126, 127]), min_size=5, max_size=5),
    ),
    min_size=1,
    max_size=4,
)


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
        scales.check_scale(torch.zeros(4, 5, dtype=torch.int8), scale, **WHERE)
    for part in (*WHERE.values(), "row 2", str(bad)):
        assert part in str(caught.value)


@pytest.mark.parametrize("scale", [[0.5, 0.0, 0.0], [0.0]], ids=["per channel", "per tensor"])
def test_check_scale_zero_over_weights_is_refused(scale: list[float]) -> None:
    weight = int8([[1] * 5, [0] * 5, [0, 0, 0, 0, -1]])
    row = "row 2" if len(scale) == 3 else "row 0"
    with pytest.raises(ScaleError, match=f"{WHERE['tensor']}.*{row}"):
        scales.check_scale(weight, torch.tensor(scale), **WHERE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_check_scale_zero_over_zero_row_becomes_one(dtype: torch.dtype) -> None:
    weight = int8([[1] * 5, [0] * 5])
    checked = scales.check_scale(weight, torch.tensor([[0.25], [0.0]]).to(dtype), **WHERE)
    assert checked.dtype == torch.float64
    assert checked.tolist() == [0.25, 1.0]
    assert scales.check_scale(torch.zeros_like(weight), torch.tensor(-0.0).to(dtype), **WHERE).tolist() == [1.0]


@pytest.mark.parametrize("shape", [(2, 1), (2,), (1, 1), (1,), ()], ids=str)
def test_check_scale_every_usual_shape_is_taken(shape: tuple[int, ...]) -> None:
    checked = scales.check_scale(int8([[1] * 5, [2] * 5]), torch.full(shape, 0.3), **WHERE)
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
        scales.check_scale(int8([[1] * 5, [2] * 5]), scale, **WHERE)


@pytest.mark.parametrize("rule", RULES)
def test_subnormal_scale_over_weights_is_refused_by_row(rule: Rule) -> None:
    weight, scale = int8([[1] * 5, [1] * 5]), torch.tensor([[0.25], [1e-45]])
    result = scales.requantize(weight, scales.check_scale(weight, scale, **WHERE), rule)
    with pytest.raises(ScaleError) as caught:
        scales.check_exponents(result.exponents, 5, scale.dtype, **WHERE)
    for part in (*WHERE.values(), "2^-149 at row 1"):
        assert part in str(caught.value)


@pytest.mark.parametrize("k", [1, 64, 4096, 132_104])
def test_check_exponents_ends_are_those_of_the_proof(k: int) -> None:
    low, high = exponent_bounds(k)
    scales.check_exponents(torch.tensor([low, high]), k, torch.float32, **WHERE)
    for outside in (low - 1, high + 1):
        with pytest.raises(ScaleError, match=rf"expected an exponent in \[{low}, {high}\].*2\^{outside} at row 1"):
            scales.check_exponents(torch.tensor([0, outside]), k, torch.float32, **WHERE)


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
    result = scales.requantize(weight, scales.check_scale(weight, torch.tensor(values).to(dtype), **WHERE), rule)
    low, high = exponent_bounds(5)
    errors, norms, clipped = [], [], 0
    for index, (row, value) in enumerate(zip(rows, map(Fraction, values), strict=True)):
        k = exponent(rule, value, row)
        if not any(row) and not low <= k <= high:
            k = 0
        unclamped = [level(q, value, k) for q in row]
        assert result.exponents[index] == k
        assert result.weight[index].tolist() == [max(-128, min(127, new)) for new in unclamped]
        clipped += sum(not -128 <= new <= 127 for new in unclamped)
        errors.append(float(error(row, value, k)))
        norms.append(float(sum((q * value) ** 2 for q in row)))
    assert result.clipped == clipped
    assert result.squared_error == math.fsum(errors)
    assert result.squared_norm == math.fsum(norms)


@pytest.mark.parametrize("rule", RULES)
@many
@given(rows_of_weights, positive(torch.float32))
def test_requantize_per_tensor_equals_one_long_row(rule: Rule, rows: list[list[int]], value: float) -> None:
    flat = [q for row in rows for q in row]
    scale = torch.tensor([value], dtype=torch.float64)
    whole = scales.requantize(int8(rows), scale, rule)
    row = scales.requantize(int8([flat], len(flat)), scale, rule)
    if any(flat):  # for zeros the range that decides depends on K
        assert whole.exponents.tolist() == row.exponents.tolist() == [exponent(rule, Fraction(value), flat)]
        assert whole.clipped == row.clipped
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
        assert scales.requantize(int8([row], len(row)), scale, rule).exponents.tolist() == [k]


@pytest.mark.parametrize("rule", RULES)
def test_requantize_half_goes_to_even_and_clips_at_both_ends(rule: Rule) -> None:
    # 1.5 * 1 / 2 = 0.75, 1.5 * 3 / 2 = 2.25: only powers of two times 1.5 give halves, at k = 0.
    weight = int8([[1, 3, 5, 127, -128]])
    result = scales.requantize(weight, torch.tensor([1.5], dtype=torch.float64), rule)
    by_floor = [2, 4, 8, 127, -128]
    by_ceil = [1, 2, 4, 95, -96]
    floor = result.exponents.tolist() == [0]
    assert result.weight.tolist() == [by_floor if floor else by_ceil]
    assert result.clipped == (2 if floor else 0)


def test_requantize_by_ceil_never_clips_and_by_floor_counts_each_clipped_value() -> None:
    weight = int8([[127, -128, 120, 1, 0]])
    scale = torch.tensor([1.25], dtype=torch.float64)
    assert scales.requantize(weight, scale, "ceil").clipped == 0
    nearest = scales.requantize(weight, scale, "nearest")
    assert nearest.exponents.tolist() == [0]
    assert nearest.weight.tolist() == [[127, -128, 127, 1, 0]]
    assert nearest.clipped == 3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-40, 3e38])
def test_requantize_zero_row_keeps_zeros_and_a_provable_scale(rule: Rule, scale: float) -> None:
    weight, stored = int8([[0] * 5, [127, 3, -5, 1, 0]]), torch.tensor([[scale], [0.01]])
    result = scales.requantize(weight, scales.check_scale(weight, stored, **WHERE), rule)
    alone = scales.requantize(weight[1:], stored[1].to(torch.float64), rule)
    assert result.weight[0].tolist() == [0] * 5
    assert result.exponents[0] == 0
    scales.check_exponents(result.exponents, 5, stored.dtype, **WHERE)
    # The zero row adds nothing to the figures, however far its scale lies.
    assert (result.clipped, result.squared_error, result.squared_norm) == (
        alone.clipped,
        alone.squared_error,
        alone.squared_norm,
    )


@pytest.mark.parametrize("rule", RULES)
@many
@given(st.lists(st.floats(2.0**-40, 2.0**20, width=32), min_size=4, max_size=4), st.integers(0, 2**32 - 1))
def test_requantize_twice_changes_nothing(rule: Rule, values: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (4, 9), generator=generator).to(torch.int8)
    once = scales.requantize(weight, torch.tensor(values, dtype=torch.float64), rule)
    scale = scales.power_of_two(once.exponents, torch.empty(4, 1))
    for again in RULES:
        twice = scales.requantize(once.weight, scales.check_scale(once.weight, scale, **WHERE), again)
        assert torch.equal(twice.weight, once.weight)
        assert torch.equal(twice.exponents, once.exponents)
        assert (twice.clipped, twice.squared_error) == (0, 0.0)


def test_requantize_leaves_its_input_alone() -> None:
    weight, scale = random_weight(6, 33)
    kept = weight.clone(), scale.clone()
    scales.requantize(weight, scale, "mse")
    assert torch.equal(weight, kept[0])
    assert torch.equal(scale, kept[1])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("per_tensor", [False, True], ids=["per channel", "per tensor"])
@pytest.mark.parametrize("elements", [1, 34, 100, 33 * 17 - 1])
def test_requantize_in_chunks_equals_one_chunk(
    monkeypatch: pytest.MonkeyPatch, elements: int, per_tensor: bool, rule: Rule
) -> None:
    weight, scale = random_weight(33, 17)
    weight[5] = 0
    scale = scale[:1] if per_tensor else scale
    whole = scales.requantize(weight, scale, rule)
    monkeypatch.setattr(scales, "_CHUNK_ELEMENTS", elements)
    assert len(scales._chunks(weight)) > 1
    assert same(scales.requantize(weight, scale, rule), whole)


@pytest.mark.parametrize("rule", RULES)
def test_requantize_does_not_depend_on_threads_or_strides(
    rule: Rule, threads: Callable[[int], AbstractContextManager[None]]
) -> None:
    weight, scale = random_weight(300, 257)
    with threads(1):
        expected = scales.requantize(weight, scale, rule)
    with threads(2):
        assert same(scales.requantize(weight, scale, rule), expected)
    assert same(scales.requantize(weight.t().contiguous().t(), scale, rule), expected)


@pytest.mark.parametrize("rule", RULES)
def test_requantize_under_another_default_dtype_gives_the_same(rule: Rule) -> None:
    weight, scale = random_weight(30, 33)
    scale[3] = 2.0**-140
    expected = scales.requantize(weight, scale, rule)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert same(scales.requantize(weight, scale, rule), expected)
    finally:
        torch.set_default_dtype(torch.float32)


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
