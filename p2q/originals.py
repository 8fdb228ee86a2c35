"""Requantizing from the original weights instead of the int8 ones: one rounding instead of two."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from p2q.checkpoint import Checkpoint, ShardReader, open_checkpoint
from p2q.contract import exponent_bounds
from p2q.errors import CheckpointError, ScaleError
from p2q.layers import Layer
from p2q.requantize import candidates, settle_zero_rows
from p2q.rounding import error_at, round_to_int8
from p2q.scales import Figures, FigureSums, Rule, choose_smaller, decompose, power_of_two

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_FARTHEST = 2.0
"""Root mean square, in steps of the scale, by which a layer's int8 weights may differ from the original ones.

Rounding to nearest gives 0.29, error feedback (GPTQ) somewhat more. Weights that were smoothed, rotated or trained
further differ by tens of steps.
"""


class Originals:
    """The checkpoint that holds the original weights."""

    def __init__(self, path: Path, converted: Checkpoint, layers: list[Layer]) -> None:
        """Match every layer's weight by name and shape.

        Raises:
            CheckpointError: not a checkpoint, or a weight is missing, of another shape or not floating point.
        """
        self.checkpoint = open_checkpoint(path)
        for layer in layers:
            info = self.checkpoint.tensors.get(layer.weight)
            if info is None:
                raise CheckpointError("the original weight is missing", file=path, tensor=layer.weight)
            shape = converted.tensors[layer.weight].shape
            if info.dtype not in _DTYPES or info.shape != shape:
                raise CheckpointError(
                    "not the original of the quantized weight",
                    file=self.checkpoint.file_of(layer.weight),
                    tensor=layer.weight,
                    expected=f"{' or '.join(_DTYPES)} of shape {list(shape)}",
                    got=f"{info.dtype} of shape {list(info.shape)}",
                )

    def read(self, layer: Layer, start: int, count: int) -> torch.Tensor:
        """Values of a layer's weight from element `start`: (count,) float32.

        Raises:
            ScaleError: one is not finite.
        """
        info = self.checkpoint.tensors[layer.weight]
        dtype = _DTYPES[info.dtype]
        with ShardReader(self.checkpoint.shards[info.shard]) as reader:
            data = reader.read(info.start + start * dtype.itemsize, count * dtype.itemsize)
        values = data.view(dtype).to(torch.float32)
        if not torch.isfinite(values).all():
            file = self.checkpoint.file_of(layer.weight)
            raise ScaleError("bad weight", file=file, tensor=layer.weight, expected="finite numbers")
        return values


class OriginalRows:
    """See `requantize.Rows`: the same steps, with the original values of each block.

    Errors are summed in units of 2^-20 of a step, so that rules are exact but for ties closer than that.
    """

    def __init__(self, originals: Originals, layer: Layer, rule: Rule) -> None:
        self._originals, self._layer, self._rule = originals, layer, rule
        self._bounds = exponent_bounds(originals.checkpoint.tensors[layer.weight].shape[-1])
        self.exponents: list[torch.Tensor] = []  # of each call of `choose`
        self._sums = FigureSums()
        self._distance, self._count = 0.0, 0
        self._last: tuple[int, torch.Tensor] | None = None

    def tally(self, block: torch.Tensor, start: int, scale: torch.Tensor) -> torch.Tensor:
        """Squared errors under both exponents, in two limbs each, and how many values are not zero: (S, 5) int64."""
        values = self._values(block, start)
        steps = values.to(torch.float64) / scale.reshape(-1, 1) - block
        self._distance += float((steps**2).sum())
        self._count += block.numel()
        significand, floor = decompose(scale)
        low, high = candidates(significand, self._rule)
        errors = (*error_at(values, floor, floor + low), *error_at(values, floor, floor + high))
        return torch.stack([*errors, (values != 0).sum(dim=1)], dim=1)

    def choose(self, tally: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The exponents: (S,)."""
        significand, floor = decompose(scale)
        low, high = candidates(significand, self._rule)
        low_upper, low_lower, high_upper, high_lower, filled = tally.unbind(dim=1)
        small = low_upper + (low_lower >> 32), low_lower & 0xFFFFFFFF  # limbs of several blocks were added
        large = high_upper + (high_lower >> 32), high_lower & 0xFFFFFFFF
        exponents = choose_smaller(floor + low, floor + high, small, large).to(torch.int32)
        exponents = settle_zero_rows(exponents, filled == 0, self._bounds)
        self.exponents.append(exponents)
        return exponents

    def apply(self, block: torch.Tensor, start: int, exponents: torch.Tensor) -> torch.Tensor:
        """The new weights of a block."""
        scale = power_of_two(exponents, torch.empty(len(exponents), 1, dtype=torch.float32))
        rounded = round_to_int8(self._values(block, start), scale)
        self._sums.add(rounded.clipped, rounded.errors, rounded.norms)
        return rounded.levels

    def figures(self) -> Figures:
        """Of all blocks.

        Raises:
            CheckpointError: the int8 weights were not made from these.
        """
        distance = math.sqrt(self._distance / self._count)
        if distance > _FARTHEST:
            raise CheckpointError(
                "not the weights that were quantized",
                file=self._originals.checkpoint.file_of(self._layer.weight),
                tensor=self._layer.weight,
                expected=f"values within {_FARTHEST} steps of the int8 ones (root mean square)",
                got=f"{distance:.1f}",
                hint="Smoothing or rotating changes weights before they are quantized: leave --from-weights out",
            )
        return self._sums.figures(torch.cat(self.exponents))

    def _values(self, block: torch.Tensor, start: int) -> torch.Tensor:
        if self._last is None or self._last[0] != start:
            self._last = start, self._originals.read(self._layer, start, block.numel()).reshape(block.shape)
        return self._last[1]
