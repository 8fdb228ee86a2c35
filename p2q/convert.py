"""Converting a W8A8 checkpoint to power-of-two scales.

Every shard keeps its header, hence its tensor order, dtypes, shapes and offsets. Bytes outside the quantized weights
and their scales are copied as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

import p2q
from p2q.checkpoint import Checkpoint, ShardWriter, bytes_of, check_tied, copy_others, open_checkpoint
from p2q.contract import CONTRACT_VERSION, exponent_bounds
from p2q.errors import ScaleError
from p2q.manifest import MANIFEST_NAME, Manifest, TensorRecord, digest_of_files, read_manifest, sha256_of
from p2q.scales import (
    Requantized,
    Rule,
    check_exponents,
    check_scale,
    exponent_of,
    is_power_of_two,
    power_of_two,
    requantize,
)
from p2q.scheme import Layer, check_length, quantized_layers
from p2q.target import check_target, new_directory

Progress = Callable[[str, int, int], None]
"""Called with (layer name, layers done, layers in all)."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion did. `changed` is False where the source already had power-of-two scales."""

    manifest: Manifest
    changed: bool
    skipped: list[str]


def convert(
    source: Path,
    target: Path,
    *,
    rule: Rule = "mse",
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a checkpoint directory; the target is complete or untouched.

    Args:
        source: a compressed-tensors int-quantized W8A8 checkpoint.
        target: the directory to make.
        rule: how each scale's exponent is chosen.
        overwrite: replace an existing checkpoint, and copy a source that is already converted.
        dry_run: check and compute everything, write nothing. `files` of the manifest is then empty.
        progress: told of each finished layer.

    Raises:
        CheckpointError, SchemeError, ScaleError: the source is not a checkpoint that can be converted.
        TargetError: the target cannot be written.
    """
    checkpoint = open_checkpoint(source)
    layers = quantized_layers(checkpoint)
    check_tied(checkpoint)
    check_target(target, source=source, overwrite=overwrite)
    for layer in layers:
        check_length(checkpoint, layer)
        _scale(checkpoint, layer)
    converted = all(_is_converted(checkpoint, layer) for layer in layers)
    if converted and not overwrite:
        raise ScaleError(
            "every scale is already a power of two; there is nothing to convert",
            file=source,
            hint="Give --overwrite to copy it unchanged",
        )
    # A source that p2q converted keeps its manifest, so that converting twice changes no byte.
    kept = read_manifest(source) if converted else None
    if dry_run:
        records = _requantize_all(checkpoint, layers, rule, None, progress)
        return Conversion(_manifest(checkpoint, rule, records, {}), not converted, checkpoint.skipped)
    with new_directory(target, source=source, overwrite=overwrite) as work:
        with ExitStack() as stack:
            writers = _start_shards(checkpoint, layers, work, stack)
            records = _requantize_all(checkpoint, layers, rule, writers, progress)
        copy_others(checkpoint, work)
        files = {name: sha256_of(work / name) for name in checkpoint.files()}
        manifest = kept if kept and kept.files == files else _manifest(checkpoint, rule, records, files)
        (work / MANIFEST_NAME).write_text(manifest.dump(), encoding="utf-8")
    return Conversion(manifest, not converted, checkpoint.skipped)


def _scale(checkpoint: Checkpoint, layer: Layer) -> torch.Tensor:
    """A layer's scales, checked: (N,) or (1,) float64."""
    weight, scale = checkpoint.read(layer.weight), checkpoint.read(layer.scale)
    return check_scale(weight, scale, file=str(checkpoint.file_of(layer.scale)), tensor=layer.scale)


def _is_converted(checkpoint: Checkpoint, layer: Layer) -> bool:
    """Whether every scale is a power of two in the proven range already."""
    scale = checkpoint.read(layer.scale)
    low, high = exponent_bounds(checkpoint.tensors[layer.weight].shape[1])
    if not is_power_of_two(scale).all():
        return False
    exponents = exponent_of(scale)
    return bool(((exponents >= low) & (exponents <= high)).all())


def _start_shards(checkpoint: Checkpoint, layers: list[Layer], work: Path, stack: ExitStack) -> dict[str, ShardWriter]:
    """A writer for each shard, holding already every tensor that does not change."""
    rewritten = {tensor for layer in layers for tensor in (layer.weight, layer.scale)}
    writers = {}
    for name, shard in checkpoint.shards.items():
        size = shard.path.stat().st_size - len(shard.header)
        writers[name] = stack.enter_context(ShardWriter(work / name, shard.header, size))
    for tensor, info in checkpoint.tensors.items():
        if tensor not in rewritten:
            writers[info.shard].copy(info.start, checkpoint.shards[info.shard], info)
    return writers


def _requantize_all(
    checkpoint: Checkpoint,
    layers: list[Layer],
    rule: Rule,
    writers: dict[str, ShardWriter] | None,
    progress: Progress | None,
) -> dict[str, TensorRecord]:
    records = {}
    for done, layer in enumerate(layers, 1):
        weight, scale = checkpoint.read(layer.weight), checkpoint.read(layer.scale)
        result = requantize(weight, _scale(checkpoint, layer), rule)
        file = str(checkpoint.file_of(layer.scale))
        check_exponents(result.exponents, weight.shape[1], scale.dtype, file=file, tensor=layer.scale)
        if writers is not None:
            for name, values in ((layer.weight, result.weight), (layer.scale, power_of_two(result.exponents, scale))):
                info = checkpoint.tensors[name]
                writers[info.shard].write(info.start, bytes_of(values))
        records[layer.weight] = record_of(result)
        if progress is not None:
            progress(layer.name, done, len(layers))
    return records


def record_of(result: Requantized) -> TensorRecord:
    """The manifest's record of a requantized weight."""
    rows, columns = result.weight.shape
    return TensorRecord(
        shape=(rows, columns),
        exponents=dict(sorted(Counter(result.exponents.tolist()).items())),
        clipped=result.clipped,
        relative_error=math.sqrt(result.squared_error / result.squared_norm) if result.squared_norm else 0.0,
    )


def _manifest(checkpoint: Checkpoint, rule: str, records: dict[str, TensorRecord], files: dict[str, str]) -> Manifest:
    source = {name: sha256_of(checkpoint.path / name) for name in checkpoint.files()}
    return Manifest(
        contract=CONTRACT_VERSION,
        made_by=f"p2q {p2q.__version__}",
        rule=rule,
        source_digest=digest_of_files(source),
        tensors=records,
        files=files,
    )
