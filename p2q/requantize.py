"""Requantizing int8 weights to power-of-two scales, by tables, exactly.

The weights that share a scale have at most 256 different values. What a rule needs to know of them (squared error,
clipped values, norm) follows from how often each value occurs, and the new weights are one look-up in a table of 256.
So nothing is rounded but the result. Here in torch, for any device; `requantize_cpu` does the same in compiled loops.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from p2q.contract import exponent_bounds
from p2q.scales import SIGNIFICAND_BITS, Figures, FigureSums, Rule, WideSum, as_float, decompose, weighted_squares

LEVELS = 256


class Tables(NamedTuple):
    """What becomes of the weights of each of S scales.

    exponents: (S,) int32, k of the new scale. levels: (S, 256) int8, the new value of each old one, indexed by the old
    one's bits read as uint8. clipped: (S,) int64. error, norm: (S,) exact sums of squares in units of 2^(2f - 46),
    where 2^f is the old scale rounded down to a power of two.
    """

    exponents: torch.Tensor
    levels: torch.Tensor
    clipped: torch.Tensor
    error: WideSum
    norm: WideSum


class Requantizer(Protocol):
    """The three steps, on one device. All tensors that go in and out are on the CPU."""

    def histogram(self, weight: torch.Tensor) -> torch.Tensor:
        """How often each value occurs. weight: (S, L) int8, one row a scale. Returns (S, 256) int32 or int64."""

    def tables(self, counts: torch.Tensor, significand: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> Tables:
        """The best of the exponents from f + low to f + high by squared error, ties to the larger.

        Args:
            counts: (S, 256) int32 or int64, sums below 2^33.
            significand: (S,) int64, as `decompose` gives it.
            low, high: (S,) int64 in [-22, 8], offsets from f.

        Returns:
            `exponents` of the result are the offsets.
        """

    def lookup(self, weight: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """levels[s, weight[s, l]]: (S, L) int8."""


class TorchRequantizer:
    """In torch, on any device."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self._device = torch.device(device)

    def histogram(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Requantizer`."""
        scales = weight.shape[0]
        index = weight.to(self._device).contiguous().view(torch.uint8).to(torch.int64)
        index += torch.arange(scales, device=self._device).reshape(-1, 1) * LEVELS
        return torch.bincount(index.reshape(-1), minlength=scales * LEVELS).reshape(scales, LEVELS).cpu()

    def tables(self, counts: torch.Tensor, significand: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> Tables:
        """See `Requantizer`."""
        counts, significand, low, high = (x.to(self._device) for x in (counts, significand, low, high))
        product = old_values(self._device) * significand.reshape(-1, 1)
        norm = weighted_squares(product, counts)
        best = _at(product, counts, low, norm)
        for step in range(1, int((high - low).max()) + 1 if low.numel() else 1):
            other = _at(product, counts, torch.minimum(low + step, high), norm)
            (high_limb, low_limb), (other_high, other_low) = best.error, other.error
            worse = (other_high > high_limb) | ((other_high == high_limb) & (other_low > low_limb))
            best = _where(worse, best, other)
        exponents, levels, clipped, (upper, lower), _ = best
        return Tables(
            exponents.to(torch.int32).cpu(),
            levels.cpu(),
            clipped.cpu(),
            (upper.cpu(), lower.cpu()),
            (norm[0].cpu(), norm[1].cpu()),
        )

    def lookup(self, weight: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """See `Requantizer`."""
        index = weight.to(self._device).contiguous().view(torch.uint8).to(torch.int64)
        return torch.gather(levels.to(self._device), 1, index).cpu()


def old_values(device: torch.device) -> torch.Tensor:
    """(256,) int64: the int8 value of each uint8."""
    return torch.arange(LEVELS, device=device).to(torch.uint8).view(torch.int8).to(torch.int64)


def _at(product: torch.Tensor, counts: torch.Tensor, offset: torch.Tensor, norm: WideSum) -> Tables:
    """The tables for given exponents. product: (S, 256) int64, value times significand: at most 31 bits."""
    shift = (offset + SIGNIFICAND_BITS - 1).reshape(-1, 1)
    half = (torch.ones_like(shift) << (shift - 1)) - 1
    unclamped = (product + half + ((product >> shift) & 1)) >> shift  # round half to even
    levels = unclamped.clamp(-128, 127)
    clipped = (counts * (unclamped != levels)).sum(dim=1)
    error = weighted_squares(product - (levels << shift), counts)
    return Tables(offset, levels.to(torch.int8), clipped, error, norm)


def _where(condition: torch.Tensor, one: Tables, other: Tables) -> Tables:
    def pick(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.where(condition.reshape(-1, 1) if a.ndim == 2 else condition, a, b)

    error = pick(one.error[0], other.error[0]), pick(one.error[1], other.error[1])
    return Tables(
        pick(one.exponents, other.exponents),
        pick(one.levels, other.levels),
        pick(one.clipped, other.clipped),
        error,
        one.norm,
    )


def candidates(significand: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """The exponents between which a rule lets the squared error choose, as offsets from floor(log2 s): (S,) int64.

    An exact power of two keeps its exponent under every rule.
    """
    floor = torch.zeros_like(significand)
    ceil = (significand != 1 << (SIGNIFICAND_BITS - 1)).to(torch.int64)
    if rule == "ceil":
        return ceil, ceil
    if rule == "nearest":
        # log2 s rounds up past 2^(f + 1/2), that is for m^2 > 2^47: exact in int64, never a tie (sqrt 2 is irrational).
        nearest = torch.where(significand**2 < 1 << (2 * SIGNIFICAND_BITS - 1), floor, ceil)
        return nearest, nearest
    return floor, ceil


def settle_zero_rows(exponents: torch.Tensor, zero: torch.Tensor, bounds: tuple[int, int]) -> torch.Tensor:
    """k = 0 for rows of zeros whose exponent could not be proved in range: they are zeros under any scale. All (S,)."""
    low, high = bounds
    return torch.where(((exponents < low) | (exponents > high)) & zero, torch.zeros_like(exponents), exponents)


class Rows:
    """One weight, requantized block by block: `tally` what belongs to a scale, `choose` its exponent, `apply` it.

    `originals.OriginalRows` does the same from other weights. Blocks are (S, L) int8, one row a scale; the row of one
    scale may come in several blocks, whose tallies are added.
    """

    def __init__(self, rule: Rule, k_dim: int, requantizer: Requantizer) -> None:
        self._rule, self._bounds, self._requantizer = rule, exponent_bounds(k_dim), requantizer
        self.exponents: list[torch.Tensor] = []  # of each call of `choose`
        self._sums = FigureSums()

    def tally(self, block: torch.Tensor, _start: int, _scale: torch.Tensor) -> torch.Tensor:
        """How often each value occurs: (S, 256) integers."""
        return self._requantizer.histogram(block)

    def choose(self, tally: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The tables of new values for the next scales: (S, 256) int8. scale: (S,) float64."""
        significand, floor = decompose(scale)
        tables = self._requantizer.tables(tally, significand, *candidates(significand, self._rule))
        exponents = settle_zero_rows(floor + tables.exponents, ~tally[:, 1:].any(dim=1), self._bounds)
        unit = torch.ldexp(torch.ones_like(scale), 2 * (floor - SIGNIFICAND_BITS + 1))
        self.exponents.append(exponents)
        self._sums.add(int(tables.clipped.sum()), as_float(tables.error, unit), as_float(tables.norm, unit))
        return tables.levels

    def apply(self, block: torch.Tensor, _start: int, levels: torch.Tensor) -> torch.Tensor:
        """The new weights of a block."""
        return self._requantizer.lookup(block, levels)

    def figures(self) -> Figures:
        """Of all blocks."""
        return self._sums.figures(torch.cat(self.exponents))


def requantize(
    weight: torch.Tensor, scale: torch.Tensor, rule: Rule, requantizer: Requantizer
) -> tuple[torch.Tensor, Figures]:
    """Requantize int8 weights to power-of-two scales: q' = clamp(rne(q * s / 2^k), -128, 127), evaluated exactly.

    Args:
        weight: (..., K) int8.
        scale: (S,) float64 holding float32, float16 or bfloat16 values, as `check_scale` returns them. Each serves the
            next 1/S of the rows.
        rule: how k is chosen.
        requantizer: where it is computed; the result does not depend on it.

    Returns:
        The new weight and the figures. An all-zero row whose exponent could not be proved in range keeps its zeros and
        gets k = 0.
    """
    block = weight.reshape(scale.numel(), -1)
    rows = Rows(rule, weight.shape[-1], requantizer)
    levels = rows.choose(rows.tally(block, 0, scale), scale)
    return rows.apply(block, 0, levels).reshape(weight.shape), rows.figures()


def requantizer_on(device: str) -> Requantizer:
    """The fastest requantizer of a device: "cpu", or a device of torch such as "cuda"."""
    if device == "cpu":
        from p2q.requantize_cpu import CpuRequantizer  # compiles loops when it is used

        return CpuRequantizer()
    return TorchRequantizer(device)
