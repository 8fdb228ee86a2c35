"""Converting one shard of a checkpoint, block by block, with the digests of what is read and of what is written."""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from p2q.checkpoint import Checkpoint, ShardReader, ShardWriter, TensorInfo, bytes_of, digest_of_tensors
from p2q.layers import Layer
from p2q.manifest import ShardRecord, TensorRecord, sha256_of
from p2q.originals import OriginalRows, Originals
from p2q.requantize import Requantizer, Rows
from p2q.scales import Figures, Rule, check_exponents, check_input_scale, check_scale, power_of_two
from p2q.statistics import Statistics

if TYPE_CHECKING:
    from p2q.feedback import FeedbackRows

BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class Plan:
    """What a conversion does to every shard.

    input_scales: static activation scales become powers of two as well. originals: weights to requantize from instead
    of the int8 ones. statistics: for error feedback. progress: told of bytes that were read; what it raises stops the
    work.
    """

    checkpoint: Checkpoint
    layers: list[Layer]
    rule: Rule
    requantizer: Requantizer
    input_scales: bool = False
    originals: Originals | None = None
    statistics: Statistics | None = None
    progress: Callable[[int], None] = field(default=lambda _bytes: None)

    def scale_of(self, layer: Layer) -> torch.Tensor:
        """A layer's scales, checked: (S,) float64. Raises ScaleError."""
        shape, scale = self.checkpoint.tensors[layer.weight].shape, self.checkpoint.read(layer.scale)
        file = str(self.checkpoint.file_of(layer.scale))
        return check_scale(shape, scale, lambda: self.checkpoint.read(layer.weight), file=file, tensor=layer.scale)

    def rows(self, layer: Layer) -> Rows | OriginalRows | FeedbackRows:
        """What requantizes a layer."""
        rows: Rows | OriginalRows
        if self.originals is not None:
            rows = OriginalRows(self.originals, layer, self.rule)
        else:
            rows = Rows(self.rule, self.checkpoint.tensors[layer.weight].shape[-1], self.requantizer)
        if self.statistics is None:
            return rows
        from p2q.feedback import FeedbackRows  # compiles loops when it is used

        return FeedbackRows(rows, self.checkpoint, layer, self.statistics, self.originals)


def input_exponent(scale: torch.Tensor, *, file: str, tensor: str) -> int:
    """k of a static activation scale's power of two: the smallest that is not below it, so that nothing more clips.

    Raises:
        ScaleError: the scale, or its power of two, is not one that can be used.
    """
    mantissa, exponent = math.frexp(check_input_scale(scale, file=file, tensor=tensor))
    k = exponent - (mantissa == 0.5)
    check_input_scale(power_of_two(torch.tensor([k]), scale), file=file, tensor=tensor)
    return k


def stored_input_exponent(checkpoint: Checkpoint, tensor: str) -> int:
    """`input_exponent` of an activation scale of a checkpoint."""
    return input_exponent(checkpoint.read(tensor), file=str(checkpoint.file_of(tensor)), tensor=tensor)


def convert_shard(plan: Plan, name: str, path: Path | None) -> ShardRecord:
    """Convert a shard. path: the file to make, or None to compute everything and write nothing.

    Raises:
        ScaleError: a scale or its power of two is not one that can be used.
        CheckpointError: the file cannot be read to its end.
    """
    shard = plan.checkpoint.shards[name]
    with ExitStack() as stack:
        reader = stack.enter_context(ShardReader(shard))
        writer = stack.enter_context(ShardWriter(path, shard.header, reader.size)) if path is not None else None
        work = _Work(plan, reader, writer)
        for tensor, info in sorted(tensors_of(plan, name), key=lambda pair: (pair[1].start, pair[1].end)):
            work.convert(tensor, info)
        work.write_scales()
    return ShardRecord(
        source=work.digest.hexdigest(),
        target=sha256_of(path) if path is not None else "",
        others=others_digest(plan, name),
        tensors=work.records,
        input_scales=work.input_scales,
    )


def tensors_of(plan: Plan, shard: str) -> list[tuple[str, TensorInfo]]:
    """The tensors in a shard."""
    return [(tensor, info) for tensor, info in plan.checkpoint.tensors.items() if info.shard == shard]


def others_digest(plan: Plan, shard: str) -> str:
    """SHA-256 of what goes into a shard's conversion from elsewhere: partners in other shards, and original weights."""
    inside = {tensor for tensor, _ in tensors_of(plan, shard)}
    pairs = [(layer.weight, layer.scale) for layer in plan.layers]
    partners = [scale for weight, scale in pairs if weight in inside and scale not in inside]
    partners += [weight for weight, scale in pairs if scale in inside and weight not in inside]
    digests = [digest_of_tensors(plan.checkpoint, partners)]
    if plan.originals is not None:
        weights = [weight for weight, scale in pairs if weight in inside or scale in inside]
        digests.append(digest_of_tensors(plan.originals.checkpoint, weights))
    return " ".join(digests)


class _Work:
    """The state of one shard's conversion."""

    def __init__(self, plan: Plan, reader: ShardReader, writer: ShardWriter | None) -> None:
        self._plan, self._reader, self._writer = plan, reader, writer
        self._weights = {layer.weight: layer for layer in plan.layers}
        self._scales = {layer.scale: layer for layer in plan.layers}
        self._inputs = {layer.input_scale for layer in plan.layers if plan.input_scales}
        self._pending: list[tuple[Layer, TensorInfo]] = []
        self._exponents: dict[str, torch.Tensor] = {}
        self.records: dict[str, TensorRecord] = {}
        self.input_scales: dict[str, int] = {}
        self.digest = hashlib.sha256(reader.shard.header)

    def convert(self, tensor: str, info: TensorInfo) -> None:
        """Read a tensor, in the order of the file, and write what becomes of it."""
        if tensor in self._weights:
            layer = self._weights[tensor]
            figures = requantize_blocks(self._plan, layer, _Weight(self, info))
            self._exponents[tensor] = figures.exponents
            self.records[tensor] = record_of(info.shape, figures)
        elif tensor in self._scales:
            self.take(info.start, info.end - info.start)
            self._pending.append((self._scales[tensor], info))
        elif tensor in self._inputs:
            self.take(info.start, info.end - info.start)
            k = self.input_scales[tensor] = stored_input_exponent(self._plan.checkpoint, tensor)
            self.write(info.start, power_of_two(torch.tensor([k]), self._plan.checkpoint.empty(tensor)))
        else:
            for start in range(info.start, info.end, BLOCK_BYTES):
                self.write(start, self.take(start, min(BLOCK_BYTES, info.end - start)))

    def write_scales(self) -> None:
        """Write the new scales, which are known when every weight has been read."""
        for layer, info in self._pending:
            if layer.weight not in self._exponents:  # the weight lies in another shard
                where = self._plan.checkpoint.tensors[layer.weight]
                plan = replace(self._plan, statistics=None)  # exponents do not depend on them
                with ShardReader(self._plan.checkpoint.shards[where.shard]) as reader:
                    figures = requantize_blocks(plan, layer, _Elsewhere(reader, where))
                self._exponents[layer.weight] = figures.exponents
            like = self._plan.checkpoint.empty(layer.scale)
            self.write(info.start, power_of_two(self._exponents[layer.weight], like))

    def take(self, start: int, size: int) -> torch.Tensor:
        """Bytes that are read for the first time: (size,) int8."""
        block = self.again(start, size)
        self.digest.update(bytes_of(block))
        self._plan.progress(size)
        return block

    def again(self, start: int, size: int) -> torch.Tensor:
        """Bytes that were read before."""
        return self._reader.read(start, size)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Write values at an offset."""
        if self._writer is not None:
            self._writer.write(start, bytes_of(values))


class Weight(Protocol):
    """An int8 weight as bytes at offsets: `take` gives those that come next, `again` earlier ones."""

    def take(self, start: int, size: int) -> torch.Tensor: ...
    def again(self, start: int, size: int) -> torch.Tensor: ...
    def write(self, start: int, values: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class _Weight:
    """A weight of the shard under work."""

    work: _Work
    info: TensorInfo

    def take(self, start: int, size: int) -> torch.Tensor:
        return self.work.take(self.info.start + start, size)

    def again(self, start: int, size: int) -> torch.Tensor:
        return self.work.again(self.info.start + start, size)

    def write(self, start: int, values: torch.Tensor) -> None:
        self.work.write(self.info.start + start, values)


@dataclass(frozen=True)
class _Elsewhere:
    """A weight of another shard, of which only the scale is written here."""

    reader: ShardReader
    info: TensorInfo

    def take(self, start: int, size: int) -> torch.Tensor:
        return self.reader.read(self.info.start + start, size)

    again = take

    def write(self, start: int, values: torch.Tensor) -> None:
        pass


def requantize_blocks(plan: Plan, layer: Layer, weight: Weight) -> Figures:
    """Requantize a layer, reading and writing its weight in blocks.

    Raises:
        ScaleError: see `convert_shard`.
    """
    shape, scale, rows = plan.checkpoint.tensors[layer.weight].shape, plan.scale_of(layer), plan.rows(layer)
    length = math.prod(shape) // scale.numel()
    step = max(1, BLOCK_BYTES // length)
    for first in range(0, scale.numel(), step):
        scales = scale[first : first + step]
        start, end = first * length, (first + scales.numel()) * length
        if scales.numel() > 1 or end - start <= BLOCK_BYTES:
            block = weight.take(start, end - start).reshape(scales.numel(), length)
            chosen = rows.choose(rows.tally(block, start, scales), scales)
            weight.write(start, rows.apply(block, start, chosen))
            continue
        # A scale of more weights than a block holds: once to choose its exponent, and again to apply it.
        piece_bytes = max(1, BLOCK_BYTES // shape[-1]) * shape[-1]
        pieces = [(at, min(piece_bytes, end - at)) for at in range(start, end, piece_bytes)]
        tallies = (rows.tally(weight.take(*piece).reshape(1, -1), piece[0], scales).to(torch.int64) for piece in pieces)
        chosen = rows.choose(functools.reduce(torch.add, tallies), scales)
        for piece in pieces:
            weight.write(piece[0], rows.apply(weight.again(*piece).reshape(1, -1), piece[0], chosen))
    figures, dtype = rows.figures(), plan.checkpoint.empty(layer.scale).dtype
    file = str(plan.checkpoint.file_of(layer.scale))
    check_exponents(figures.exponents, shape[-1], dtype, file=file, tensor=layer.scale)
    return figures


def record_of(shape: tuple[int, ...], figures: Figures) -> TensorRecord:
    """The manifest's record of a requantized weight."""
    error, norm = figures.squared_error, figures.squared_norm
    return TensorRecord(
        shape=shape,
        exponents=dict(sorted(Counter(figures.exponents.tolist()).items())),
        clipped=figures.clipped,
        relative_error=math.sqrt(error / norm) if norm else 0.0,
    )
