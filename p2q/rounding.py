"""Rounding floating-point weights to int8, with sums of errors that depend on neither order nor thread count."""

from __future__ import annotations

from typing import NamedTuple

import torch

from p2q.scales import WideSum, as_float, exponent_of, sum_of_squares

_ERROR_BITS = 20
_LARGEST = 2.0**30


class Rounded(NamedTuple):
    """levels: (R, L) int8. clipped: values that left [-128, 127]. errors, norms: squared, of each row."""

    levels: torch.Tensor
    clipped: int
    errors: list[float]
    norms: list[float]


def round_to_int8(values: torch.Tensor, scale: torch.Tensor) -> Rounded:
    """clamp(rne(w / s), -128, 127).

    Args:
        values: (R, L) bfloat16, float16 or float32.
        scale: (R, 1) float32, positive.
    """
    values = values.to(torch.float32)
    rounded = (values / scale).round()
    levels = rounded.clamp(-128, 127).to(torch.int8)
    exact = values.to(torch.float64)
    error = levels.to(torch.float64) * scale.to(torch.float64) - exact
    return Rounded(levels, int((rounded != levels).sum()), row_squares(error, scale), row_squares(exact, scale))


def row_squares(values: torch.Tensor, scale: torch.Tensor) -> list[float]:
    """Sums of squares of rows, in whole units of 2^(floor(log2 scale) - 20), so that they do not depend on an order.

    Args:
        values: (R, L) float64.
        scale: (R, 1), positive.
    """
    unit = torch.ldexp(torch.ones_like(values[:, :1]), exponent_of(scale).reshape(-1, 1) - _ERROR_BITS)
    return as_float(_squares_of(values / unit), unit.reshape(-1) ** 2)


def error_at(values: torch.Tensor, floor: torch.Tensor, exponents: torch.Tensor) -> WideSum:
    """Squared error of rows under scales 2^exponents, in units of 2^(2 * (floor - 20)). values: (R, L), others (R,)."""
    level = torch.ldexp(values.to(torch.float64), -exponents.reshape(-1, 1))
    unit = torch.ldexp(torch.ones_like(level[:, :1]), (exponents - floor + _ERROR_BITS).reshape(-1, 1))
    return _squares_of((level - level.round().clamp(-128, 127)) * unit)


def _squares_of(units: torch.Tensor) -> WideSum:
    return sum_of_squares(units.round().clamp(-_LARGEST, _LARGEST))
