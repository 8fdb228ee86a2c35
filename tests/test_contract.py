"""The contract against exact rational arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2q import contract

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMATS = {torch.float32: (24, -149, 128), torch.float16: (11, -24, 16), torch.bfloat16: (8, -133, 128)}
"""Bits of the significand, exponent of the smallest subnormal, exponent of the first power of two past the range."""

floats = st.floats(width=32)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
few = settings(deadline=None, max_examples=60)


def rounded(value: Fraction, dtype: torch.dtype = torch.float32) -> float:
    """A rational number rounded once to a dtype: half to even, subnormals and overflow as IEEE 754 has them."""
    if value == 0:
        return 0.0
    precision, lowest, past = FORMATS[dtype]
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - precision + 1, lowest)
    result = round(magnitude / unit) * unit  # Python rounds a Fraction's half to even
    return math.copysign(math.inf if result >= 2**past else float(result), value)


def fused(a: float, b: float, c: float) -> float:
    """a * b + c with one rounding to float32, as IEEE 754 defines it."""
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return rounded(exact) if exact else a * b + c  # the product is exact in float64, and so is the sign of the zero


def quantized(row: list[float]) -> tuple[list[int], float]:
    """One row by rule 1, each operation rounded by itself to float32."""
    if not all(map(math.isfinite, row)):
        return [0] * len(row), math.nan
    absmax = max(map(abs, row), default=0.0)
    if absmax == 0:
        return [0] * len(row), 1.0
    scale = min(max(rounded(Fraction(absmax) / 127), 2.0**-64), 2.0**64)
    levels = [rounded(Fraction(value) / Fraction(scale)) for value in row]
    return [max(-127, min(127, round(level) if math.isfinite(level) else 127)) for level in levels], scale


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits as integers. Every NaN is the same."""
    tensor = torch.where(torch.isnan(tensor), torch.full_like(tensor, math.nan), tensor).contiguous()
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return got.dtype == expected.dtype and torch.equal(bits(got), bits(expected))


def int8(generator: torch.Generator, *shape: int, low: int = -128) -> torch.Tensor:
    return torch.randint(low, 128, shape, generator=generator).to(torch.int8)


def layer(m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """x, q_w, s_w and a bias."""
    generator = torch.Generator().manual_seed(m * 31 + k * 7 + n)
    x = torch.randn(m, k, generator=generator).to(dtype)
    s_w = torch.ldexp(torch.ones(n), torch.randint(-12, -3, (n,), generator=generator))
    return x, int8(generator, n, k), s_w, torch.randn(n, generator=generator).to(dtype)


@pytest.fixture(autouse=True)
def one_thread(threads: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """Small tensors: two OpenMP runtimes in a process (torch's, vLLM's) lose more time waiting than they gain."""
    with threads(1):
        yield


# Rule 1: activations.


@few
@given(
    st.lists(st.lists(floats, min_size=3, max_size=3), max_size=4),
    st.sampled_from(DTYPES),
)
def test_quantize_any_rows_equals_exact_arithmetic(rows: list[list[float]], dtype: torch.dtype) -> None:
    x = torch.tensor(rows).reshape(-1, 3).to(dtype)
    q_x, s_x = contract.quantize_per_token(x)
    assert (q_x.dtype, q_x.shape, s_x.dtype, s_x.shape) == (torch.int8, x.shape, torch.float32, (len(rows), 1))
    for row, levels, scale in zip(x.tolist(), q_x.tolist(), s_x, strict=True):
        expected_levels, expected_scale = quantized(row)
        assert levels == expected_levels
        assert same_bits(scale, torch.tensor([expected_scale]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_values_half_way_between_levels_equal_a_true_division(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    absmax = torch.rand(64, 1, generator=generator) + 1
    half_way = (torch.randint(-126, 126, (64, 1024), generator=generator) + 0.5) * (absmax / 127)
    x = torch.cat([absmax, half_way], dim=1).to(dtype)
    values = x.to(torch.float32).numpy()
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    q_x, s_x = contract.quantize_per_token(x)
    assert np.array_equal(s_x.numpy(), scale)
    assert np.array_equal(q_x.numpy(), np.clip(np.rint(values / scale), -127, 127))
    # The shortcuts of other engines are other functions, and these values tell them apart.
    assert not np.array_equal(q_x.numpy(), np.rint(values * (1 / scale)))
    assert not np.array_equal(q_x.numpy(), np.rint(values * (127 / np.abs(values).max(axis=1, keepdims=True))))


@pytest.mark.parametrize(
    ("value", "level"), [(0.5, 0), (1.5, 2), (2.5, 2), (-0.5, 0), (-1.5, -2), (-2.5, -2), (126.5, 126), (125.5, 126)]
)
def test_quantize_half_goes_to_even(value: float, level: int) -> None:
    q_x, s_x = contract.quantize_per_token(torch.tensor([[127.0, value]]))
    assert s_x.item() == 1
    assert q_x.tolist() == [[127, level]]


def test_quantize_quotient_is_rounded_to_float32_before_the_integer() -> None:
    # The exact quotient is just below 1.5, its float32 is 1.5: the contract is the second.
    absmax, value = float.fromhex("0x1.02c8ep+6"), float.fromhex("0x1.873bc8p-1")
    q_x, s_x = contract.quantize_per_token(torch.tensor([[absmax, value]]))
    assert Fraction(value) / Fraction(s_x.item()) < Fraction(3, 2)
    assert q_x.tolist() == [[127, 2]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_quantize_row_that_is_not_finite_gives_nan_scale_and_zeros(bad: float) -> None:
    q_x, s_x = contract.quantize_per_token(torch.tensor([[1.0, bad], [127.0, -1.0], [0.0, -0.0]]))
    assert q_x.tolist() == [[0, 0], [127, -1], [0, 0]]
    assert math.isnan(s_x[0])
    assert s_x[1:].tolist() == [[1.0], [1.0]]


def test_quantize_tiny_and_huge_rows_use_the_ends_of_the_scale() -> None:
    low, high, huge = 2.0**-64, 2.0**64, torch.finfo(torch.float32).max
    rows = [[2.0**-149, 0], [100 * low, -2.5 * low], [200 * high, -100 * high], [huge, -huge]]
    q_x, s_x = contract.quantize_per_token(torch.tensor(rows))
    assert s_x.flatten().tolist() == [low, low, high, high]
    assert q_x.tolist() == [[0, 0], [100, -2], [127, -100], [127, -127]]


@pytest.mark.parametrize("stride", ["transposed", "expanded", "every other column"])
def test_quantize_strided_rows_equal_contiguous_rows_and_come_out_contiguous(stride: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = {
        "transposed": torch.randn(33, 7, generator=generator).t(),
        "expanded": torch.randn(1, 33, generator=generator).expand(7, 33),
        "every other column": torch.randn(7, 66, generator=generator)[:, ::2],
    }[stride]
    assert not x.is_contiguous()
    q_x, s_x = contract.quantize_per_token(x)
    expected_q, expected_s = contract.quantize_per_token(x.contiguous())
    assert q_x.is_contiguous()
    assert torch.equal(q_x, expected_q)
    assert same_bits(s_x, expected_s)


# Rule 2: the accumulator.


@few
@given(st.integers(0, 5), st.integers(0, 40), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_accumulate_any_shape_equals_integer_sum(m: int, k: int, n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q_x, q_w = int8(generator, m, k), int8(generator, n, k)
    acc = contract.accumulate(q_x, q_w)
    assert acc.dtype == torch.int32
    assert acc.tolist() == [[sum(map(int.__mul__, row, column)) for column in q_w.tolist()] for row in q_x.tolist()]


@pytest.mark.parametrize("k", [1024, 1025, 65_537, 131_071, 131_072, contract.MAX_K])
def test_accumulate_full_scale_equals_int64(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    q_x = torch.stack(
        [torch.full((k,), 127), torch.full((k,), -127), torch.randint(-127, 128, (k,), generator=generator)]
    )
    q_w = torch.stack(
        [torch.full((k,), 127), torch.full((k,), -128), torch.randint(-128, 128, (k,), generator=generator)]
    )
    q_x[0, -1], q_w[0, -1] = 1, 1  # an odd sum: past 2^24 it is no float32
    expected = q_x.numpy().astype(np.int64) @ q_w.numpy().astype(np.int64).T
    acc = contract.accumulate(q_x.to(torch.int8), q_w.to(torch.int8))
    assert acc.dtype == torch.int32
    assert np.array_equal(acc.numpy(), expected)
    assert k < 1100 or not np.array_equal(expected.astype(np.float32), expected)


def test_max_k_is_the_last_that_fits_int32() -> None:
    assert contract.MAX_K * 127 * 128 <= 2**31 - 1 < (contract.MAX_K + 1) * 127 * 128


@pytest.mark.parametrize("call", ["check_k", "accumulate", "exponent_bounds"])
def test_k_past_the_limit_is_refused(call: str) -> None:
    k = contract.MAX_K + 1
    row = torch.zeros(1, k, dtype=torch.int8)
    with pytest.raises(ValueError, match="132105"):
        contract.accumulate(row, row) if call == "accumulate" else getattr(contract, call)(k)


def test_accumulate_sum_that_leaves_int32_is_refused() -> None:
    lowest = torch.full((1, 131_072), -128, dtype=torch.int8)
    with pytest.raises(OverflowError, match="-128"):
        contract.accumulate(lowest, lowest)
    assert contract.accumulate(lowest[:, 1:], lowest[:, 1:]).item() == 131_071 * 2**14


def test_accumulate_weight_held_in_float32_gives_the_same() -> None:
    _, q_w, _, _ = layer(1, 2100, 5)
    q_x = int8(torch.Generator().manual_seed(0), 3, 2100)
    assert torch.equal(contract.accumulate(q_x, q_w.to(torch.float32)), contract.accumulate(q_x, q_w))


def test_accumulate_strided_operands_give_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    q_x, q_w = int8(generator, 90, 7).t()[:, ::2], int8(generator, 45, 11).t()
    assert torch.equal(contract.accumulate(q_x, q_w), contract.accumulate(q_x.contiguous(), q_w.contiguous()))


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_accumulate_under_reduced_float32_precision_is_exact(precision: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q_x, q_w = int8(generator, 33, 3000), int8(generator, 64, 3000)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        acc = contract.accumulate(q_x, q_w)
    finally:
        torch.set_float32_matmul_precision(before)
    assert np.array_equal(acc.numpy(), q_x.numpy().astype(np.int64) @ q_w.numpy().astype(np.int64).T)


# Rule 3: the epilogue.


def in_order(order: contract.Order, acc: int, s_x: float, s_w: float) -> tuple[float, float]:
    """The two factors of the last multiplication."""
    value = rounded(Fraction(acc))
    if order == "weight-first":
        return s_x, rounded(Fraction(s_w) * Fraction(value))
    if order == "token-first":
        return s_w, rounded(Fraction(s_x) * Fraction(value))
    return rounded(Fraction(s_x) * Fraction(s_w)), value


@few
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3),
    st.floats(2.0**-20, 2.0**20, width=32),
    st.lists(st.floats(2.0**-20, 2.0**20, width=32), min_size=3, max_size=3),
    st.sampled_from(contract.ORDERS),
    st.sampled_from(DTYPES),
)
def test_epilogue_rounds_each_product_in_the_order_asked_for(
    acc: list[int], s_x: float, s_w: list[float], order: contract.Order, dtype: torch.dtype
) -> None:
    got = contract.epilogue(
        torch.tensor([acc], dtype=torch.int32), torch.tensor([[s_x]]), torch.tensor(s_w), dtype, order=order
    )
    factors = [in_order(order, value, s_x, scale) for value, scale in zip(acc, s_w, strict=True)]
    products = [rounded(Fraction(left) * Fraction(right)) for left, right in factors]
    expected = [rounded(Fraction(product), dtype) for product in products]
    assert same_bits(got, torch.tensor([expected], dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", contract.ORDERS)
def test_epilogue_full_significands_equal_exact_arithmetic_in_each_order(
    order: contract.Order, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(11)
    acc = torch.randint(-(2**31), 2**31, (9, 17), generator=generator).to(torch.int32)
    s_x, s_w = torch.rand(9, 1, generator=generator) / 2**16, torch.rand(17, generator=generator) / 2**16
    expected = []
    for row, token in zip(acc.tolist(), s_x.flatten().tolist(), strict=True):
        for value, scale in zip(row, s_w.tolist(), strict=True):
            left, right = in_order(order, value, token, scale)
            expected.append(rounded(Fraction(rounded(Fraction(left) * Fraction(right))), dtype))
    got = contract.epilogue(acc, s_x, s_w, dtype, order=order)
    assert same_bits(got, torch.tensor(expected, dtype=torch.float64).reshape(9, 17).to(dtype))


def test_epilogue_orders_differ_where_the_scale_is_no_power_of_two() -> None:
    x, q_w, s_w, _ = layer(16, 64, 64)
    q_x, s_x = contract.quantize_per_token(x)
    acc = contract.accumulate(q_x, q_w)
    results = [contract.epilogue(acc, s_x, s_w * 1.1, torch.float32, order=order) for order in contract.ORDERS]
    assert not same_bits(results[0], results[1])
    assert not same_bits(results[0], results[2])
    assert not same_bits(results[1], results[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
def test_epilogue_bias_enters_after_or_before_the_rounding(dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    x, q_w, s_w, bias = layer(4, 40, 9, bias_dtype)
    q_x, s_x = contract.quantize_per_token(x)
    acc = contract.accumulate(q_x, q_w)
    after, before = [], []
    for row, token in zip(acc.tolist(), s_x.flatten().tolist(), strict=True):
        for value, scale, addend in zip(row, s_w.tolist(), bias.tolist(), strict=True):
            left, right = in_order("weight-first", value, token, scale)
            y = rounded(Fraction(rounded(Fraction(left) * Fraction(right))), dtype)
            total = Fraction(y) + Fraction(rounded(Fraction(addend), dtype))
            # torch adds two half-precision numbers in float32 and rounds; float32's 24 bits make that one rounding.
            after.append(rounded(total, dtype))
            before.append(rounded(Fraction(fused(left, right, addend)), dtype))
    for mode, expected in (("after-rounding", after), ("fused", before)):
        got = contract.epilogue(acc, s_x, s_w, dtype, bias=bias, bias_mode=mode)  # type: ignore[arg-type]
        assert same_bits(got, torch.tensor(expected, dtype=torch.float64).reshape(4, 9).to(dtype))
    assert after != before


def test_linear_adds_the_bias_after_rounding() -> None:
    x, q_w, s_w, bias = layer(16, 64, 64)
    without = contract.linear(x, q_w, s_w)
    assert same_bits(contract.linear(x, q_w, s_w, bias), without + bias)
    assert contract.add_bias(without, None) is without


def test_linear_row_that_is_not_finite_is_nan_and_touches_no_other_row() -> None:
    x, q_w, s_w, bias = layer(5, 40, 9)
    broken = x.clone()
    broken[2, 7] = math.inf
    y, expected = contract.linear(broken, q_w, s_w, bias), contract.linear(x, q_w, s_w, bias)
    assert torch.isnan(y[2]).all()
    keep = [0, 1, 3, 4]
    assert same_bits(y[keep], expected[keep])


def test_linear_zero_row_gives_the_bias() -> None:
    x, q_w, s_w, bias = layer(3, 40, 9)
    x[1] = 0
    assert same_bits(contract.linear(x, q_w, s_w, bias)[1], bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "k", "n"), [(0, 40, 9), (1, 1, 1), (3, 0, 2)])
def test_linear_degenerate_shape_keeps_shape_and_dtype(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    y = contract.linear(*layer(m, k, n, dtype))
    assert y.shape == (m, n)
    assert y.dtype == dtype


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_linear_under_another_default_dtype_gives_the_same_bits(default: torch.dtype) -> None:
    x, q_w, s_w, bias = layer(17, 1500, 16)
    expected = contract.linear(x, q_w, s_w, bias)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)  # vLLM does so while it loads a model
    try:
        got = contract.linear(x, q_w, s_w, bias)
    finally:
        torch.set_default_dtype(before)
    assert same_bits(got, expected)


# Rule 5: nothing else matters.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_bits_do_not_depend_on_threads_batch_or_tiling(
    dtype: torch.dtype, threads: Callable[[int], AbstractContextManager[None]]
) -> None:
    x, q_w, s_w, bias = layer(33, 2100, 130, dtype)
    with threads(1):
        expected = contract.linear(x, q_w, s_w, bias)
    with threads(2):
        assert same_bits(contract.linear(x, q_w, s_w, bias), expected)
    rows = [contract.linear(row, q_w, s_w, bias) for row in x.split([1, 15, 16, 1])]
    assert same_bits(torch.cat(rows), expected)
    tiles = [slice(0, 1), slice(1, 48), slice(48, 130)]
    columns = [contract.linear(x, q_w[tile], s_w[tile], bias[tile]) for tile in tiles]
    assert same_bits(torch.cat(columns, dim=1), expected)
    order = torch.randperm(2100, generator=torch.Generator().manual_seed(5))
    assert same_bits(contract.linear(x[:, order], q_w[:, order], s_w, bias), expected)


# The emulated fused multiply-add.


NEAR_TIES = {
    # 2^35 + 1 and 2^35 - 1 are products of two 24-bit integers: a tie, and a little that float64 drops.
    "just above a tie": (3 * 43 * 86171 * 2.0**-30, 11 * 281 * 2.0**-29, 1.0),
    "just below a tie": (122921 * 127 * 2.0**-30, 31 * 71 * 2.0**-29, 1.0 + 2.0**-23),
    "just above a tie, negative": (3 * 43 * 86171 * -(2.0**-30), 11 * 281 * 2.0**-29, -1.0),
    "just above a tie of subnormals": (3 * 43 * 86171 * 2.0**-90, 11 * 281 * 2.0**-95, 2.0**-127),
    "just below a tie of subnormals": (122921 * 127 * 2.0**-90, 31 * 71 * 2.0**-95, 2.0**-127 + 2.0**-149),
}


@pytest.mark.parametrize("operands", NEAR_TIES.values(), ids=NEAR_TIES.keys())
def test_fused_multiply_add_near_a_tie_rounds_once(operands: tuple[float, float, float]) -> None:
    a, b, c = (torch.tensor([value], dtype=torch.float32) for value in operands)
    assert [a.item(), b.item(), c.item()] == list(operands)
    twice = (a.double() * b.double() + c.double()).float()
    got = contract.fused_multiply_add(a, b, c)
    assert same_bits(got, torch.tensor([fused(*operands)]))
    assert not same_bits(got, twice)


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        ((2.0**127, 2.0, 0.0), math.inf),
        ((2.0**127, 2.0, -(2.0**127)), 2.0**127),
        ((math.inf, 0.0, 1.0), math.nan),
        ((math.inf, 1.0, -math.inf), math.nan),
        ((1.0, 1.0, -math.inf), -math.inf),
        ((2.0**-100, 2.0**-100, 0.0), 0.0),
        ((-(2.0**-100), 2.0**-100, 0.0), -0.0),
        ((2.0**-75, 2.0**-75, 2.0**-149), 2.0**-148),
        # Two bits below a tie in float64, and odd already: it must stay below.
        ((8388971 * 2.0**-36, 16776490 * 2.0**-35, 1.0 + 2.0**-23), 1.0 + 2.0**-23),
        ((-0.0, 1.0, -0.0), -0.0),
        ((-1.0, 1.0, 1.0), 0.0),
    ],
)
def test_fused_multiply_add_at_the_edges_equals_ieee(operands: tuple[float, float, float], expected: float) -> None:
    got = contract.fused_multiply_add(*(torch.tensor([value]) for value in operands))
    assert same_bits(got, torch.tensor([expected]))


@st.composite
def near_cancelling(draw: st.DrawFn) -> tuple[float, float, float]:
    """a, b and an addend a few units away from -a * b, or far below it."""
    a, b = draw(finite), draw(finite)
    product = float(np.float32(max(min(a * b, 3e38), -3e38)))
    offset = draw(st.sampled_from([0.0, 2.0**-24, -(2.0**-24), 2.0**-23, 2.0**-30, 1.0, -1.0]))
    return a, b, float(np.float32(-product * (1 + offset)))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.one_of(st.tuples(floats, floats, floats), near_cancelling()), min_size=1, max_size=10))
def test_fused_multiply_add_any_operands_equals_one_exact_rounding(triples: list[tuple[float, float, float]]) -> None:
    a, b, c = (torch.tensor(column, dtype=torch.float32) for column in zip(*triples, strict=True))
    expected = torch.tensor([fused(*triple) for triple in triples], dtype=torch.float64).float()
    assert same_bits(contract.fused_multiply_add(a, b, c), expected)


# The proof of range.


@st.composite
def inside_the_proof(draw: st.DrawFn) -> tuple[int, float, list[int]]:
    k = draw(st.one_of(st.integers(1, contract.MAX_K), st.sampled_from([1, contract.MAX_K])))
    low, high = contract.exponent_bounds(k)
    exponent = draw(st.one_of(st.integers(low, high), st.sampled_from([low, high])))
    s_x = draw(st.one_of(st.floats(2.0**-64, 2.0**64, width=32), st.sampled_from([2.0**-64, 2.0**64])))
    largest = k * 127 * 128
    values = st.one_of(st.integers(-largest, largest), st.sampled_from([0, 1, -1, largest, -largest]))
    return exponent, s_x, draw(st.lists(values, min_size=1, max_size=8))


@settings(deadline=None, max_examples=300)
@given(inside_the_proof())
def test_exponent_inside_the_proof_gives_one_result_in_every_order(case: tuple[int, float, list[int]]) -> None:
    exponent, s_x, values = case
    acc = torch.tensor([values], dtype=torch.int32)
    s_w = torch.full((len(values),), 2.0**exponent)
    once = [rounded(Fraction(s_x) * Fraction(rounded(Fraction(value)))) for value in values]
    for dtype in DTYPES:
        expected = [rounded(Fraction(value) * Fraction(2) ** exponent, dtype) for value in once]
        for order in contract.ORDERS:
            got = contract.epilogue(acc, torch.tensor([[s_x]]), s_w, dtype, order=order)
            assert same_bits(got, torch.tensor([expected], dtype=torch.float64).to(dtype))
    assert all(math.isfinite(rounded(Fraction(value) * Fraction(2) ** exponent, torch.bfloat16)) for value in once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_exponent_below_the_proof_has_a_counterexample(dtype: torch.dtype) -> None:
    low, _ = contract.exponent_bounds(1)
    # Just past half a unit of bfloat16: what the subnormal product drops decides the rounding.
    s_x = torch.tensor([[2.0**-64 * (1 + 2.0**-8 + 2.0**-23)]])
    acc = torch.tensor([[4]], dtype=torch.int32)
    for exponent, agree in ((low - 1, False), (low, True)):
        results = [
            contract.epilogue(acc, s_x, torch.tensor([2.0**exponent]), dtype, order=order)
            for order in ("scales-first", "weight-first")
        ]
        assert same_bits(*results) == agree


@pytest.mark.parametrize("k", [1, 2, 576, 4096, 12_288, contract.MAX_K])
def test_exponent_above_the_proof_is_at_most_one_from_overflow(k: int) -> None:
    _, high = contract.exponent_bounds(k)
    largest = Fraction(rounded(Fraction(k * 127 * 128))) * 2**64
    assert math.isfinite(rounded(largest * Fraction(2) ** high, torch.bfloat16))
    assert math.isinf(rounded(largest * Fraction(2) ** (high + 2), torch.bfloat16))


def test_exponent_above_the_proof_at_the_largest_k_overflows_at_once() -> None:
    _, high = contract.exponent_bounds(contract.MAX_K)
    acc = torch.tensor([[contract.MAX_K * 127 * 128]], dtype=torch.int32)
    for exponent, overflows in ((high, False), (high + 1, True)):
        y = contract.epilogue(acc, torch.tensor([[2.0**64]]), torch.tensor([2.0**exponent]), torch.bfloat16)
        assert bool(torch.isinf(y)) == overflows


def test_exponent_far_above_the_proof_splits_the_orders() -> None:
    # Between the proof's end and 2^63 the orders still agree, on infinities; at 2^64 they no longer do.
    acc, s_x = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([[2.0**64]])
    for exponent, agree in ((63, True), (64, False)):
        s_w = torch.full((2,), 2.0**exponent)
        first, last = (
            contract.epilogue(acc, s_x, s_w, torch.bfloat16, order=order) for order in ("weight-first", "scales-first")
        )
        assert same_bits(first, last) == agree
