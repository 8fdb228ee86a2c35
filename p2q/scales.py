"""Power-of-two scale rules, exact requantization, and the proof of range.

All of it is evaluated exactly (integers, or float64 where float64 is exact), so that the result depends on neither
the device, the thread count nor the order of summation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from p2q.contract import TOKEN_SCALE_MAX, TOKEN_SCALE_MIN, exponent_bounds
from p2q.errors import ScaleError

Rule = Literal["mse", "nearest", "ceil"]
"""How a row's scale s becomes 2^k.

nearest: k = rne(log2 s), the paper's rule. ceil: the smallest 2^k >= s, which never clips. mse: of floor(log2 s) and
ceil(log2 s) the one with the smaller squared error of the row after requantization, ties to ceil.
"""

RULES: tuple[Rule, ...] = get_args(Rule)

_SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIGNIFICAND_BITS = 24


@dataclass(frozen=True)
class Figures:
    """What requantization did to a weight.

    exponents: (S,) int32, k of each scale. clipped: values that left [-128, 127] before the clamp. squared_error,
    squared_norm: of the dequantized weights, in the weights' own unit squared.
    """

    exponents: torch.Tensor
    clipped: int
    squared_error: float
    squared_norm: float


class FigureSums:
    """Figures of a weight that comes in blocks of rows."""

    def __init__(self) -> None:
        self._clipped = 0
        self._errors: list[float] = []
        self._norms: list[float] = []

    def add(self, clipped: int, errors: list[float], norms: list[float]) -> None:
        """Those of a block: clipped values, and the squared error and norm of each row."""
        self._clipped += clipped
        self._errors += errors
        self._norms += norms

    def figures(self, exponents: torch.Tensor) -> Figures:
        """Of all blocks. fsum rounds once, so that they do not depend on an order of summation."""
        return Figures(exponents, self._clipped, math.fsum(self._errors), math.fsum(self._norms))


def decompose(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split positive scales into a 24-bit integer significand m and an exponent f: s = m * 2^(f - 23), 2^f <= s.

    Args:
        scale: (R,) float32, float16 or bfloat16; finite and positive.

    Returns:
        m (R,) int64 in [2^23, 2^24), f (R,) int32.
    """
    mantissa, exponent = torch.frexp(scale.to(torch.float64))  # mantissa in [0.5, 1)
    return (mantissa * 2.0**SIGNIFICAND_BITS).to(torch.int64), (exponent - 1).to(torch.int32)


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


def check_scale(
    shape: Sequence[int], scale: torch.Tensor, load: Callable[[], torch.Tensor], *, file: str, tensor: str
) -> torch.Tensor:
    """Refuse scales that mean nothing, and give all-zero rows of scale zero a scale of one.

    Args:
        shape: of the int8 weight, (N, K) or (experts, N, K).
        scale: float32, float16 or bfloat16 with one value a row, an expert or in all, of shape (..., N, 1), (..., N),
            (experts, 1, 1), (experts,), (1, 1), (1,) or ().
        load: gives the weight; called only where a scale is zero.

    Returns:
        (rows,), (experts,) or (1,) float64: finite and positive. Each serves the next rows of the weight, equally many.

    Raises:
        ScaleError: wrong dtype or shape, NaN, infinite or negative, or zero over a row that is not zero.
    """
    *experts, rows, _ = shape
    shapes: list[tuple[int, ...]] = [(*experts, rows, 1), (*experts, rows), (1, 1), (1,), ()]
    if experts:
        shapes += [(*experts, 1, 1), (*experts,), (1, 1, 1)]
    # Other dtypes have more bits than `decompose` takes, or cannot be read back.
    if scale.dtype not in _SCALE_DTYPES or tuple(scale.shape) not in shapes:
        *most, last = (str(list(shape)) for shape in (*shapes[:2], *shapes[5:6], (1,)))
        raise ScaleError(
            "wrong scale",
            file=file,
            tensor=tensor,
            expected=f"float32, float16 or bfloat16 of shape {', '.join(most)} or {last}",
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
        wrong = zero & (load().reshape(flat.numel(), -1) != 0).any(dim=1)
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


def check_input_scale(scale: torch.Tensor, *, file: str, tensor: str) -> float:
    """Refuse a static activation scale that the proof of range does not cover, and give its value.

    Raises:
        ScaleError: not one float32, float16 or bfloat16 value in [2^-64, 2^64].
    """
    value = float(scale.reshape(-1)[0]) if scale.numel() == 1 else math.nan
    if scale.dtype not in _SCALE_DTYPES or not TOKEN_SCALE_MIN <= value <= TOKEN_SCALE_MAX:
        raise ScaleError(
            "bad activation scale",
            file=file,
            tensor=tensor,
            expected="one float32, float16 or bfloat16 value in [2^-64, 2^64]",
            got=f"{str(scale.dtype).removeprefix('torch.')} {value if scale.numel() == 1 else list(scale.shape)}",
        )
    return value


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


WideSum = tuple[torch.Tensor, torch.Tensor]
"""Exact non-negative sums as two int64 tensors: high * 2^32 + low, 0 <= low < 2^32."""


def sum_of_squares(values: torch.Tensor) -> WideSum:
    """Exact row sums of squares. Args: values (R, K), integers of at most 31 bits in any dtype; K below 2^31."""
    square = values.to(torch.int64) ** 2
    return _carried((square >> 32).sum(dim=1), (square & 0xFFFFFFFF).sum(dim=1))


def weighted_squares(values: torch.Tensor, counts: torch.Tensor) -> WideSum:
    """Exact row sums of counts * values^2. values: (R, C) int64 of at most 31 bits. counts: (R, C), sums below 2^33."""
    square = values**2
    upper = ((square >> 32) * counts).sum(dim=1)
    middle = (((square >> 16) & 0xFFFF) * counts).sum(dim=1)
    lower = ((square & 0xFFFF) * counts).sum(dim=1)
    return _carried(upper + (middle >> 16), ((middle & 0xFFFF) << 16) + lower)


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
