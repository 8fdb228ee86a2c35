"""The steps of `requantize` as compiled loops for a CPU: about one nanosecond a weight and core.

They hold no lock, so that threads run them side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import int32, int64, njit
from numpy.typing import NDArray

from p2q.requantize import LEVELS, Tables, TorchRequantizer
from p2q.scales import SIGNIFICAND_BITS


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function when it is called first, and keep the machine code for later processes."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither this folder nor the user's cache can be written
        return njit(nogil=True)(function)


class CpuRequantizer:
    """See `requantize.Requantizer`."""

    def histogram(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Requantizer`."""
        counts = np.zeros((weight.shape[0], LEVELS), np.int32)
        _histogram(_bytes(weight), counts)
        return torch.from_numpy(counts)

    def tables(self, counts: torch.Tensor, significand: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> Tables:
        """See `Requantizer`."""
        if counts.dtype == torch.int64 and counts.max() >= 1 << 31:
            return TorchRequantizer().tables(counts, significand, low, high)
        scales = significand.numel()
        levels = np.empty((scales, LEVELS), np.int8)
        rows = np.empty((6, scales), np.int64)
        _tables(counts.to(torch.int32).numpy(), *(x.numpy() for x in (significand, low, high)), levels, rows)
        exponents, clipped, *sums = torch.from_numpy(rows)
        error, norm = (sums[0], sums[1]), (sums[2], sums[3])
        return Tables(exponents.to(torch.int32), torch.from_numpy(levels), clipped, error, norm)

    def lookup(self, weight: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """See `Requantizer`."""
        result = np.empty(weight.shape, np.int8)
        _lookup(_bytes(weight), levels.numpy(), result)
        return torch.from_numpy(result)


def _bytes(weight: torch.Tensor) -> NDArray[np.uint8]:
    return weight.contiguous().view(torch.uint8).numpy()


@compiled
def _histogram(weight: Any, counts: Any) -> None:
    for s in range(weight.shape[0]):
        row, count = weight[s], counts[s]
        for index in range(row.size):
            count[row[index]] += 1


@compiled
def _lookup(weight: Any, levels: Any, result: Any) -> None:
    for s in range(weight.shape[0]):
        row, table, out = weight[s], levels[s], result[s]
        for index in range(row.size):
            out[index] = table[row[index]]


# Everything but the sums is int32: value * m has at most 31 bits and leaves room for half a level. So the compiler uses
# vectors and 32 x 32 bit products. Casts are needed, since the sum of two int32 is an int64 here.


@compiled
def _round(product: Any, shift: int, levels: Any, difference: Any) -> None:
    """levels = clamp(rne(product / 2^shift)), and what is lost by that."""
    half, shift = int32((1 << (shift - 1)) - 1), int32(shift)
    for index in range(LEVELS):
        value = product[index]
        unclamped = int32(int32(value + int32(half + int32(int32(value >> shift) & int32(1)))) >> shift)
        level = min(max(unclamped, int32(-128)), int32(127))
        levels[index] = level
        difference[index] = int32(value - int32(level << shift))


@compiled
def _squares(count: Any, values: Any) -> tuple[int, int]:
    """sum(count * values^2) in two limbs, as `scales.WideSum` has them."""
    upper, middle, lower = int64(0), int64(0), int64(0)
    for index in range(LEVELS):
        times, square = int64(count[index]), int64(values[index]) * int64(values[index])
        upper += int64(int32(square >> 32)) * times
        middle += int64(int32((square >> 16) & 0xFFFF)) * times
        lower += int64(int32(square & 0xFFFF)) * times
    lower += (middle & 0xFFFF) << 16
    return upper + (middle >> 16) + (lower >> 32), lower & 0xFFFFFFFF


@compiled
def _tables(counts: Any, significand: Any, low: Any, high: Any, levels: Any, rows: Any) -> None:
    product, candidate, difference = np.empty((3, LEVELS), np.int32)
    old = np.arange(LEVELS).astype(np.uint8).view(np.int8).astype(np.int32)
    for s in range(significand.size):
        count, m = counts[s], int32(significand[s])
        for index in range(LEVELS):
            product[index] = int32(old[index] * m)
        for offset in range(low[s], high[s] + 1):
            shift = offset + SIGNIFICAND_BITS - 1
            _round(product, shift, candidate, difference)
            upper, lower = _squares(count, difference)
            if offset == low[s] or upper < rows[2, s] or (upper == rows[2, s] and lower <= rows[3, s]):
                rows[0, s], rows[2, s], rows[3, s] = offset, upper, lower
                levels[s] = candidate
                clipped, half = int64(0), 1 << (shift - 1)
                for index in range(LEVELS):
                    # Beyond half a level: it was clamped. 127.5 is, as it rounds to 128, and -128.5 is not.
                    if difference[index] < -half or (difference[index] >= half and candidate[index] == 127):
                        clipped += int64(count[index])
                rows[1, s] = clipped
        rows[4, s], rows[5, s] = _squares(count, product)
