"""Quantizing a bf16, fp16 or fp32 checkpoint to W8A8 by round-to-nearest, per channel.

The result is an ordinary compressed-tensors `int-quantized` checkpoint: int8 weights, float32 scales of shape [N, 1]
([experts, N, 1] where a file holds all experts in one tensor), dynamic per-token activations. Nothing is calibrated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import p2q
from p2q.checkpoint import (
    INDEX_NAME,
    Checkpoint,
    Layout,
    ShardWriter,
    bytes_of,
    check_tied,
    copy_others,
    lay_out,
    open_checkpoint,
)
from p2q.contract import CONTRACT_VERSION, Q_MAX
from p2q.errors import ScaleError
from p2q.layers import Layer, check_length
from p2q.linears import linear_layers
from p2q.manifest import MANIFEST_NAME, Manifest, TensorRecord, digest_of_files, sha256_of
from p2q.rounding import error_at, round_to_int8
from p2q.scales import Figures, FigureSums, check_exponents, choose_smaller, exponent_of, is_power_of_two, power_of_two
from p2q.shards import record_of
from p2q.target import check_target, new_directory

Progress = Callable[[str, int, int], None]
"""Called with (layer name, layers done, layers in all)."""

Scales = Literal["absmax", "power-of-two"]
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Quantization:
    """What a quantization did: the layers made int8, and weight files of the source that were left out."""

    layers: list[str]
    skipped: list[str]


def quantize(
    source: Path, target: Path, *, scales: Scales = "absmax", overwrite: bool = False, progress: Progress | None = None
) -> Quantization:
    """Quantize every linear layer but the output head and routers; the target is complete or untouched.

    Args:
        source: a checkpoint with bf16, fp16 or fp32 weights.
        target: the directory to make.
        scales: "absmax": max |w| / 127 of the row in float32. "power-of-two": of the two powers of two around that, the
            one with the smaller squared error of the row (ties to the larger); the result satisfies the contract as it
            is.
        overwrite: replace an existing checkpoint.
        progress: told of each finished layer.

    Raises:
        CheckpointError, SchemeError: the source is not a checkpoint, or is quantized already.
        ScaleError: a row holds a NaN or an infinity, or its power of two cannot be proved in range.
        TargetError: the target cannot be written.
    """
    checkpoint = open_checkpoint(source)
    layers, ignore = linear_layers(checkpoint)
    check_tied(checkpoint)
    check_target(target, source=source, overwrite=overwrite)
    if scales == "power-of-two":
        for layer in layers:
            check_length(checkpoint, layer)
    layouts = {name: _lay_out_shard(checkpoint, name, layers) for name in checkpoint.shards}
    with new_directory(target, source=source, overwrite=overwrite) as work:
        with ExitStack() as stack:
            writers = {
                name: stack.enter_context(ShardWriter(work / name, layout.header, layout.size))
                for name, layout in layouts.items()
            }
            by_weight = {layer.weight for layer in layers}
            for tensor, info in checkpoint.tensors.items():
                if tensor not in by_weight:
                    offset = layouts[info.shard].offsets[tensor]
                    writers[info.shard].copy(offset, checkpoint.shards[info.shard], info)
            records = {}
            for done, layer in enumerate(layers, 1):
                shard, file = checkpoint.tensors[layer.weight].shard, str(checkpoint.file_of(layer.weight))
                weight = checkpoint.read(layer.weight)
                rows = weight.reshape(-1, weight.shape[-1])
                levels, scale, figures = quantize_weight(rows, scales, file=file, tensor=layer.weight)
                for tensor, values in ((layer.weight, levels), (layer.scale, scale)):
                    writers[shard].write(layouts[shard].offsets[tensor], bytes_of(values))
                records[layer.weight] = record_of(weight.shape, figures)
                if progress is not None:
                    progress(layer.name, done, len(layers))
        copy_others(checkpoint, work)
        _write_configuration(checkpoint, ignore, layouts, work)
        if scales == "power-of-two":
            _write_manifest(checkpoint, records, work)
    return Quantization([layer.name for layer in layers], checkpoint.skipped)


def quantize_weight(
    weight: torch.Tensor, scales: Scales, *, file: str, tensor: str
) -> tuple[torch.Tensor, torch.Tensor, Figures]:
    """Round a weight to int8 with one scale a row.

    Args:
        weight: (N, K) bfloat16, float16 or float32.
        scales: see `quantize`.

    Returns:
        the weight (N, K) int8, the scales (N, 1) float32 and the figures. A row of zeros gets scale 1.

    Raises:
        ScaleError: see `quantize`.
    """
    bad = ~torch.isfinite(weight)
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise ScaleError(
            "bad weight",
            file=file,
            tensor=tensor,
            expected="finite numbers",
            got=f"{weight[row, column].item()} at row {row}",
        )
    levels = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(weight.shape[0], 1)
    sums = FigureSums()
    step = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        scale[rows] = _row_scales(weight[rows].to(torch.float32), scales)
        rounded = round_to_int8(weight[rows], scale[rows])
        levels[rows] = rounded.levels
        sums.add(rounded.clipped, rounded.errors, rounded.norms)
    exponents = exponent_of(scale)
    if scales == "power-of-two":
        check_exponents(exponents, weight.shape[1], torch.float32, file=file, tensor=tensor)
    return levels, scale, sums.figures(exponents)


def _row_scales(values: torch.Tensor, scales: Scales) -> torch.Tensor:
    absmax = values.abs().amax(dim=1, keepdim=True)
    # A tensor of 127s makes it a true division: see `contract.quantize_per_token`.
    scale = torch.where(absmax == 0, torch.ones_like(absmax), absmax / torch.full_like(absmax, Q_MAX))
    # A row so small that its scale underflows has no usable scale: the smallest normal one rounds it to zeros.
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
    if scales == "absmax":
        return scale
    floor = exponent_of(scale)
    ceil = torch.where(is_power_of_two(scale).reshape(-1), floor, floor + 1)
    small, large = (error_at(values, floor, exponents) for exponents in (floor, ceil))
    return power_of_two(choose_smaller(floor, ceil, small, large), scale)


def _lay_out_shard(checkpoint: Checkpoint, shard: str, layers: list[Layer]) -> Layout:
    weights = {layer.weight: layer for layer in layers}
    entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for tensor, info in checkpoint.tensors.items():
        if info.shard != shard:
            continue
        if tensor in weights:
            rows = info.shape[:-1]
            entries[tensor] = ("I8", info.shape, math.prod(info.shape))
            entries[weights[tensor].scale] = ("F32", (*rows, 1), 4 * math.prod(rows))
        else:
            entries[tensor] = (info.dtype, info.shape, info.end - info.start)
    return lay_out(entries, {**checkpoint.shards[shard].metadata, "format": "pt"})


def _write_configuration(checkpoint: Checkpoint, ignore: list[str], layouts: dict[str, Layout], work: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    scheme = preset_name_to_scheme("W8A8", ["Linear"])
    quantization = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="int-quantized",
        quantization_status="compressed",
        ignore=ignore,
    )
    config = {**checkpoint.config, "quantization_config": quantization.model_dump(mode="json", exclude_none=True)}
    _write_json(work / "config.json", config)
    if INDEX_NAME in checkpoint.others:
        weight_map = {tensor: shard for shard, layout in layouts.items() for tensor in layout.offsets}
        total = sum(layout.size for layout in layouts.values())
        _write_json(
            work / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        )


def _write_manifest(checkpoint: Checkpoint, records: dict[str, TensorRecord], work: Path) -> None:
    manifest = Manifest(
        contract=CONTRACT_VERSION,
        made_by=f"p2q {p2q.__version__}",
        rule="quantize",
        source_digest=digest_of_files({name: sha256_of(checkpoint.path / name) for name in checkpoint.files()}),
        tensors=records,
        files={name: sha256_of(work / name) for name in checkpoint.files()},
    )
    (work / MANIFEST_NAME).write_text(manifest.dump(), encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
