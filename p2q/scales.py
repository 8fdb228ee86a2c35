"""Power-of-two scale rules, exact requantization, and the proof of range.

All of it is evaluated exactly (integers, or float64 where float64 is exact), so that the result depends on neither
the device, the thread count nor the order of summation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from p2q.contract import exponent_bounds
from p2q.errors import ScaleError

Rule = Literal["mse", "nearest", "ceil"]
"""How a row's scale s becomes 2^k.

nearest: k = rne(log2 s), the paper's rule. ceil: the smallest 2^k >= s, which never clips. mse: of floor(log2 s) and
ceil(log2 s) the one with the smaller squared error of the row after requantization, ties to ceil.
"""

RULES: tuple[Rule, ...] = get_args(Rule)

_SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SIGNIFICAND_BITS = 24
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Requantized:
    """One requantized weight.

    weight: (N, K) int8. exponents: (N,) or (1,) int32, k of each scale. clipped: values that left [-128, 127] before
    the clamp. squared_error, squared_norm: of the dequantized weights, in the weights' own unit squared.
    """

    weight: torch.Tensor
    exponents: torch.Tensor
    clipped: int
    squared_error: float
    squared_norm: float


def decompose(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split positive scales into a 24-bit integer significand m and an exponent f: s = m * 2^(f - 23), 2^f <= s.

    Args:
        scale: (R,) float32, float16 or bfloat16; finite and positive.

    Returns:
        m (R,) int64 in [2^23, 2^24), f (R,) int32.
    """
    mantissa, exponent = torch.frexp(scale.to(torch.float64))  # mantissa in [0.5, 1)
    return (mantissa * 2.0**_SIGNIFICAND_BITS).to(torch.int64), (exponent - 1).to(torch.int32)


def is_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """True where a scale is finite, positive and an exact power of two. Shape of `scale`, bool."""
    mantissa, _ = torch.frexp(scale.to(torch.float64))
    return (scale > 0) & torch.isfinite(scale) & (mantissa == 0.5)


def exponent_of(scale: torch.Tensor) -> torch.Tensor:
    """k of scales that are exact powers of two, int32, flattened."""
    return decompose(scale.reshape(-1))[1]


def power_of_two(exponents: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """2^k in the dtype and shape of `like`. Exact wherever `check_exponents` has passed."""
    ones = torch.ones_like(exponents, dtype=torch.float64)
    return torch.ldexp(ones, exponents.to(torch.int32)).to(like.dtype).reshape(like.shape)


def check_scale(weight: torch.Tensor, scale: torch.Tensor, *, file: str, tensor: str) -> torch.Tensor:
    """Refuse scales that mean nothing, and give all-zero rows of scale zero a scale of one.

    Args:
        weight: (N, K) int8.
        scale: (N, 1), (N,), (1, 1), (1,) or () float32, float16 or bfloat16.

    Returns:
        (N,) or (1,) float64: finite and positive.

    Raises:
        ScaleError: wrong dtype or shape, NaN, infinite or negative, or zero over a row that is not zero.
    """
    rows = weight.shape[0]
    shapes = ((rows, 1), (rows,), (1, 1), (1,), ())
    # Other dtypes have more bits than `decompose` takes, or cannot be read back.
    if scale.dtype not in _SCALE_DTYPES or tuple(scale.shape) not in shapes:
        raise ScaleError(
            "wrong scale",
            file=file,
            tensor=tensor,
            expected=f"float32, float16 or bfloat16 of shape [{rows}, 1], [{rows}] or [1]",
            got=f"{str(scale.dtype).removeprefix('torch.')} of shape {list(scale.shape)}",
        )
    flat = scale.reshape(-1).to(torch.float64)
    bad = ~torch.isfinite(flat) | (flat < 0)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ScaleError(
            "bad scale",
            file=file,
            tensor=tensor,
            expected="a finite positive scale",
            got=f"{flat[row].item()} at row {row}",
        )
    zero = flat == 0
    if zero.any():
        empty = (weight == 0).all(dim=1) if flat.numel() == rows else (weight == 0).all().reshape(1)
        wrong = zero & ~empty
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ScaleError(
                "bad scale",
                file=file,
                tensor=tensor,
                expected="a positive scale",
                got=f"0 at row {row}, whose weights are not all zero",
            )
    return torch.where(zero, torch.ones_like(flat), flat)


def check_exponents(
    exponents: torch.Tensor,
    k_dim: int,
    dtype: torch.dtype,
    *,
    file: str,
    tensor: str,
    error: type[ScaleError] = ScaleError,
) -> None:
    """Prove that scales 2^k keep the epilogue exact in every order, and that `dtype` holds them exactly.

    Args:
        exponents: (R,) int32.
        k_dim: K of the layer.
        dtype: the stored scale's dtype.

    Raises:
        ScaleError: naming the first row whose exponent cannot be proved.
    """
    low, high = exponent_bounds(k_dim)
    low = max(
        low,
        round(torch.log2(torch.tensor(torch.finfo(dtype).smallest_normal, dtype=torch.float64)).item())
        - _fraction_bits(dtype),
    )
    high = min(high, int(torch.frexp(torch.tensor(torch.finfo(dtype).max, dtype=torch.float64))[1]) - 1)
    bad = (exponents < low) | (exponents > high)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise error(
            "the scale's power of two leaves the range in which every order of multiplication is "
            "proved to give the same bits",
            file=file,
            tensor=tensor,
            expected=f"an exponent in [{low}, {high}] for K = {k_dim} and {str(dtype).removeprefix('torch.')} scales",
            got=f"2^{int(exponents[row])} at row {row}",
        )


def _fraction_bits(dtype: torch.dtype) -> int:
    """Bits by which subnormals of `dtype` reach below its smallest normal number."""
    return round(-torch.log2(torch.tensor(torch.finfo(dtype).eps, dtype=torch.float64)).item())


def requantize(weight: torch.Tensor, scale: torch.Tensor, rule: Rule) -> Requantized:
    """Requantize int8 weights to power-of-two scales: q' = clamp(rne(q * s / 2^k), -128, 127), evaluated exactly.

    Args:
        weight: (N, K) int8.
        scale: (N,) or (1,) float64 holding float32, float16 or bfloat16 values, as `check_scale` returns them.
        rule: how k is chosen.

    Returns:
        The new weight, exponents and error figures. An all-zero row whose exponent could not be proved in range keeps
        its zeros and gets k = 0.
    """
    significand, floor = decompose(scale)
    ceil = torch.where(significand == 1 << (_SIGNIFICAND_BITS - 1), floor, floor + 1)
    if rule == "ceil":
        exponents = ceil
    elif rule == "nearest":
        # log2 s rounds up past 2^(f + 1/2), that is for m^2 > 2^47: exact in int64, never a tie (sqrt 2 is irrational).
        exponents = torch.where(significand**2 < 1 << (2 * _SIGNIFICAND_BITS - 1), floor, ceil)
    else:
        errors = (_squared_error(weight, significand, floor, candidate) for candidate in (floor, ceil))
        exponents = choose_smaller(floor, ceil, *errors)
    exponents = _settle_zero_rows(weight, exponents)
    return _apply(weight, significand, floor, exponents)


def _settle_zero_rows(weight: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    low, high = exponent_bounds(weight.shape[1])
    odd = (exponents < low) | (exponents > high)
    if not odd.any():
        return exponents
    empty = (weight == 0).all(dim=1) if exponents.numel() == weight.shape[0] else (weight == 0).all().reshape(1)
    return torch.where(odd & empty, torch.zeros_like(exponents), exponents)


def _chunks(weight: torch.Tensor) -> list[slice]:
    rows = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[1]))
    return [slice(start, start + rows) for start in range(0, weight.shape[0], rows)]


def _rows(values: torch.Tensor, chunk: slice) -> torch.Tensor:
    """The values of a chunk of rows as a column; a per-tensor value serves every row."""
    return (values if values.numel() == 1 else values[chunk]).reshape(-1, 1)


def _levels(
    weight: torch.Tensor, significand: torch.Tensor, floor: torch.Tensor, exponents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """rne(q * s / 2^k) before and after the clamp, and the difference q * s - q' * 2^k in units of 2^(f - 23).

    q * m has at most 31 bits: the product, its division by a power of two and its rounding are exact in float64.
    Where k is far from f (a settled zero row) all values are zero.
    """
    product = weight.to(torch.float64) * significand.to(torch.float64)
    unit = torch.ldexp(torch.ones_like(product[:, :1]), (exponents - floor + _SIGNIFICAND_BITS - 1).to(torch.int32))
    unclamped = (product / unit).round()
    levels = unclamped.clamp(-128, 127)
    return unclamped, levels, product - levels * unit


WideSum = tuple[torch.Tensor, torch.Tensor]
"""Exact non-negative sums as two int64 tensors: high * 2^32 + low, 0 <= low < 2^32."""


def sum_of_squares(values: torch.Tensor) -> WideSum:
    """Exact row sums of squares. Args: values (R, K), integers of at most 31 bits in any dtype; K below 2^31."""
    square = values.to(torch.int64) ** 2
    return _carried((square >> 32).sum(dim=1), (square & 0xFFFFFFFF).sum(dim=1))


def as_float(total: WideSum, unit: torch.Tensor) -> list[float]:
    """Sums in float64, times a unit that is a power of two: the same roundings on every machine. unit: (R,) float64."""
    high, low = total
    return ((high.to(torch.float64) * 2.0**32 + low.to(torch.float64)) * unit).tolist()


def _carried(high: torch.Tensor, low: torch.Tensor) -> WideSum:
    return high + (low >> 32), low & 0xFFFFFFFF


def choose_smaller(floor: torch.Tensor, ceil: torch.Tensor, floor_error: WideSum, ceil_error: WideSum) -> torch.Tensor:
    """The exponent with the smaller error, ties to ceil. All (R,)."""
    (floor_high, floor_low), (ceil_high, ceil_low) = floor_error, ceil_error
    return torch.where((floor_high < ceil_high) | ((floor_high == ceil_high) & (floor_low < ceil_low)), floor, ceil)


def _squared_error(
    weight: torch.Tensor, significand: torch.Tensor, floor: torch.Tensor, exponents: torch.Tensor
) -> WideSum:
    """Squared error of each scale's values under given exponents, in units of 2^(2f - 46)."""
    parts = []
    for chunk in _chunks(weight):
        _, _, difference = _levels(
            weight[chunk], _rows(significand, chunk), _rows(floor, chunk), _rows(exponents, chunk)
        )
        parts.append(sum_of_squares(difference))
    high, low = (torch.cat(limb) for limb in zip(*parts, strict=True))
    return _carried(high.sum().reshape(1), low.sum().reshape(1)) if significand.numel() == 1 else (high, low)


def _apply(
    weight: torch.Tensor, significand: torch.Tensor, floor: torch.Tensor, exponents: torch.Tensor
) -> Requantized:
    result = torch.empty_like(weight)
    clipped = 0
    errors: list[float] = []
    norms: list[float] = []
    for chunk in _chunks(weight):
        m, f = _rows(significand, chunk), _rows(floor, chunk)
        unclamped, levels, difference = _levels(weight[chunk], m, f, _rows(exponents, chunk))
        result[chunk] = levels.to(torch.int8)
        clipped += int((unclamped != levels).sum())
        unit = torch.ldexp(torch.ones_like(f, dtype=torch.float64), 2 * (f - _SIGNIFICAND_BITS + 1)).reshape(-1)
        for values, sums in ((difference, errors), (weight[chunk].to(torch.float64) * m.to(torch.float64), norms)):
            sums += as_float(sum_of_squares(values), unit)
    # fsum rounds once, so the figures do not depend on an order of summation.
    return Requantized(result, exponents, clipped, math.fsum(errors), math.fsum(norms))
