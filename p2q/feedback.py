"""Requantizing with error feedback: each column's rounding error is made good by the columns that come after it.

This is GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022,
arXiv 2210.17323) on the grid of power-of-two scales. With e the difference between a row of the old and of the new
weight, and H = X^T X of the layer's inputs X, it lowers e^T H e, the squared error of the layer's outputs. H, slightly
damped, is split into V V^T with V upper triangular, so that

    e^T H e = sum_j (sum_{i <= j} V[i, j] e_i)^2,

and column j is rounded after adding sum_{i < j} e_i V[i, j] / V[j, j], which would make its term zero. GPTQ's updates
by the Cholesky factor of H^-1 give the same numbers, with an inverse on the way.

The loops are compiled, run in one thread and fix the order of every sum, each product and sum rounded on its own. So
the new weights depend on neither blocks nor threads, and on no library of linear algebra, of which every machine has
another. The statistics do: two machines that collect them from the same text get slightly different ones, and thus
different weights. It is the same statistics file that gives the same bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from p2q.checkpoint import Checkpoint
from p2q.errors import CheckpointError
from p2q.layers import Layer, check_not_fused
from p2q.originals import OriginalRows, Originals
from p2q.requantize import Rows
from p2q.requantize_cpu import compiled
from p2q.rounding import row_squares
from p2q.scales import Figures, FigureSums, power_of_two
from p2q.statistics import Statistics

DAMPING = 0.01
"""Share of the mean of H's diagonal that is added to the diagonal: more columns than tokens make H singular."""

_BLOCK = 128  # columns whose effect on later ones is added in one go, while they lie in the cache
_ROWS = 32  # rows that are worked on together
_TILE = 256


class FeedbackRows:
    """See `requantize.Rows`: the exponents that another one chooses, and levels by error feedback.

    Blocks hold whole rows of K values, also where a scale serves many of them.
    """

    def __init__(
        self,
        inner: Rows | OriginalRows,
        checkpoint: Checkpoint,
        layer: Layer,
        statistics: Statistics,
        originals: Originals | None = None,
    ) -> None:
        """inner: chooses the exponents. originals: where the values are taken from instead of the int8 weights.

        Raises:
            SchemeError: the layer is many experts in one tensor.
        """
        check_not_fused(checkpoint, layer, "error feedback does not work on experts in one tensor")
        self._inner, self._layer, self._statistics, self._originals = inner, layer, statistics, originals
        self._k = checkpoint.tensors[layer.weight].shape[1]
        self._factor: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sums = FigureSums()

    def tally(self, block: torch.Tensor, start: int, scale: torch.Tensor) -> torch.Tensor:
        """What the inner rows make of a block."""
        return self._inner.tally(block, start, scale)

    def choose(self, tally: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The old scale and the new one's exponent: (S, 2) float64."""
        self._inner.choose(tally, scale)
        return torch.stack([scale, self._inner.exponents[-1].to(torch.float64)], dim=1)

    def apply(self, block: torch.Tensor, start: int, chosen: torch.Tensor) -> torch.Tensor:
        """The new weights of a block.

        Raises:
            ValueError: the block does not hold whole rows.
            CheckpointError: the layer's statistics are not those of any inputs.
        """
        if start % self._k or block.shape[1] % self._k:
            raise ValueError(f"{self._layer.weight}: a block at {start} of {block.shape[1]} is not rows of {self._k}")
        if self._factor is None:
            try:
                self._factor = factor(self._statistics.of(self._layer))
            except ArithmeticError as problem:
                raise CheckpointError(str(problem), file=self._statistics.path, tensor=self._layer.name) from problem
        repeats = block.shape[1] // self._k
        old, exponents = (column.repeat_interleave(repeats) for column in chosen.unbind(dim=1))
        if self._originals is None:
            values = block.reshape(-1, self._k).to(torch.float64) * old.reshape(-1, 1)
        else:
            values = self._originals.read(self._layer, start, block.numel()).reshape(-1, self._k).to(torch.float64)
        scale = power_of_two(exponents, torch.empty(exponents.numel(), 1, dtype=torch.float64))
        levels, clipped = feedback(values, scale, *self._factor)
        error = levels.to(torch.float64) * scale - values
        self._sums.add(clipped, row_squares(error, scale), row_squares(values, scale))
        return levels.reshape(block.shape)

    def figures(self) -> Figures:
        """Of all blocks. Values that left [-128, 127] are counted with what earlier columns added to them."""
        return self._sums.figures(self._inner.figures().exponents)


def factor(hessian: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split H for `feedback`.

    Args:
        hessian: (K, K) float64, symmetric.

    Returns:
        the order of the columns, (K,) int64, largest inputs first, and the coefficients (K, K) float64: row j holds in
        its first j places by how much of each earlier column's error column j is to be changed. Both in that order.

    Raises:
        ArithmeticError: H is not positive semidefinite.
    """
    diagonal = hessian.diagonal()
    order = torch.argsort(diagonal, descending=True, stable=True)
    mean = math.fsum(diagonal.tolist()) / len(diagonal)
    # The decomposition begins with the last column: reversed, it is the usual one, whose rows lie together in memory.
    backward = order.flip(0)
    upper = hessian[backward][:, backward].contiguous()
    dead = diagonal[backward] <= 0
    upper[dead] = 0.0
    upper[:, dead] = 0.0
    upper.diagonal().add_(DAMPING * mean if mean > 0 else 1.0)
    if not _cholesky(upper.numpy()):
        raise ArithmeticError("the statistics are not those of any inputs (not positive definite)")
    return order, upper.flip(0, 1).contiguous()


def feedback(
    values: torch.Tensor, scale: torch.Tensor, order: torch.Tensor, coefficients: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Round column by column, clamp(rne(w / s), -128, 127), each column after the errors before it are added.

    Args:
        values: (R, K) float64.
        scale: (R, 1) float64, powers of two.
        order, coefficients: see `factor`.

    Returns:
        the levels (R, K) int8, and how many left [-128, 127] before the clamp.
    """
    rows, k = values.shape
    levels = np.zeros((rows, k), np.int8)
    steps = (values / scale).numpy()  # exact, and errors in steps of the row's own scale need no scale
    clipped = 0
    for first in range(0, rows, _ROWS):
        piece = steps[first : first + _ROWS, order.numpy()]
        columns, found = np.zeros((k, _ROWS)), np.empty((k, _ROWS), np.int8)
        columns[:, : len(piece)] = piece.T
        clipped += int(_feedback(columns, coefficients.numpy(), found))
        levels[first : first + _ROWS, order.numpy()] = found[:, : len(piece)].T
    return torch.from_numpy(levels), clipped


@compiled
def _cholesky(upper: Any) -> bool:
    """A = U^T U: U, row k divided by U[k, k], in place of A's upper triangle. False where A is not positive."""
    size = upper.shape[0]
    pivots = np.empty(size)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        for k in range(start, stop):
            row, pivot = upper[k], upper[k, k]
            if not (pivot > 0.0 and pivot < np.inf):
                return False
            pivots[k] = pivot
            for i in range(k + 1, stop):
                share, other = row[i] / pivot, upper[i]
                for j in range(i, size):
                    other[j] -= share * row[j]
        for i in range(stop, size):
            other = upper[i]
            for left in range(i, size, _TILE):
                right = min(left + _TILE, size)
                for k in range(start, stop):
                    row = upper[k]
                    share = row[i] / pivots[k]
                    for j in range(left, right):
                        other[j] -= share * row[j]
    for k in range(size):
        row = upper[k]
        for j in range(k, size):
            row[j] /= pivots[k]
    return True


@compiled
def _add(target: Any, share: float, error: Any) -> None:
    for r in range(_ROWS):
        target[r] += share * error[r]


@compiled
def _feedback(columns: Any, coefficients: Any, levels: Any) -> int:
    """Of columns (K, _ROWS), in steps of the scale. Returns the clipped values."""
    size, clipped = columns.shape[0], 0
    moved, errors = columns.copy(), np.empty((_BLOCK, _ROWS))
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        for j in range(start, stop):
            target, error = moved[j], errors[j - start]
            for i in range(start, j):
                _add(target, coefficients[j, i], errors[i - start])
            for r in range(_ROWS):
                rounded = np.rint(target[r])
                level = min(max(rounded, -128.0), 127.0)
                clipped += rounded != level
                levels[j, r] = level
                error[r] = columns[j, r] - level
        for j in range(stop, size):
            for i in range(start, stop):
                _add(moved[j], coefficients[j, i], errors[i - start])
    return clipped
