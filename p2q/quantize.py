"""Quantizing a bf16, fp16 or fp32 checkpoint to W8A8 by round-to-nearest, per channel.

The result is an ordinary compressed-tensors `int-quantized` checkpoint: int8 weights, float32 scales of shape [N, 1],
dynamic per-token activations. Nothing is calibrated.
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
from p2q.errors import CheckpointError, ScaleError, SchemeError
from p2q.layers import Layer, check_length
from p2q.manifest import MANIFEST_NAME, Manifest, TensorRecord, digest_of_files, sha256_of
from p2q.rounding import error_at, round_to_int8
from p2q.scales import Figures, check_exponents, choose_smaller, exponent_of, is_power_of_two, power_of_two
from p2q.scheme import method_of, raw_quantization
from p2q.shards import record_of
from p2q.target import check_target, new_directory

Progress = Callable[[str, int, int], None]
"""Called with (layer name, layers done, layers in all)."""

Scales = Literal["absmax", "power-of-two"]
_FLOATING = {"F32", "F16", "BF16"}
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Quantization:
    """What a quantization did: the layers made int8, and weight files of the source that were left out."""

    layers: list[str]
    skipped: list[str]


def quantize(
    source: Path, target: Path, *, scales: Scales = "absmax", overwrite: bool = False, progress: Progress | None = None
) -> Quantization:
    """Quantize every linear layer but the output head; the target is complete or untouched.

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
    names, head = linear_layers(checkpoint)
    layers = [Layer.linear(name) for name in names]
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
                levels, scale, figures = quantize_weight(weight, scales, file=file, tensor=layer.weight)
                for tensor, values in ((layer.weight, levels), (layer.scale, scale)):
                    writers[shard].write(layouts[shard].offsets[tensor], bytes_of(values))
                records[layer.weight] = record_of(weight.shape, figures)
                if progress is not None:
                    progress(layer.name, done, len(layers))
        copy_others(checkpoint, work)
        _write_configuration(checkpoint, head, layouts, work)
        if scales == "power-of-two":
            _write_manifest(checkpoint, records, work)
    return Quantization([layer.name for layer in layers], checkpoint.skipped)


def linear_layers(checkpoint: Checkpoint) -> tuple[list[str], str | None]:
    """Names of the linear layers whose weights the checkpoint holds in a floating dtype, and the output head's name.

    The model's own code says which modules are linear: it is built by transformers without weights.

    Raises:
        SchemeError: the checkpoint is quantized already, its weights are not floating point, or some are neither linear
            layers nor embeddings (experts that the model's code holds as one tensor, for example).
        CheckpointError: transformers does not know the model, or a linear layer's weight is missing or does not fit.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    file = checkpoint.path / "config.json"
    raw = raw_quantization(checkpoint.config)
    if raw is not None:
        raise SchemeError("already quantized", file=file, expected="bf16, fp16 or fp32 weights", got=method_of(raw))
    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever a model's configuration code raises
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"transformers cannot build this model: {first}", file=file) from error
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    linear = {name: module for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
    names = sorted(name for name, module in linear.items() if module is not head)
    for name in names:
        _check_linear(checkpoint, Layer.linear(name), tuple(linear[name].weight.shape))
    if not names:
        raise CheckpointError("the model has no linear layers to quantize", file=file)
    for tensor, info in sorted(checkpoint.tensors.items()):
        module = modules.get(tensor.removesuffix(".weight"))
        if (
            tensor.endswith(".weight")
            and len(info.shape) == 2
            and not isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        ):
            raise SchemeError(
                "not a weight that p2q quantizes, nor one that it may leave",
                file=checkpoint.file_of(tensor),
                tensor=tensor,
                expected="the weight of a linear layer or an embedding",
                got=f"that of {type(module).__name__}"
                if module is not None
                else "one that the model's code does not name",
            )
    return names, next((name for name, module in linear.items() if module is head), None)


def _check_linear(checkpoint: Checkpoint, layer: Layer, shape: tuple[int, ...]) -> None:
    info = checkpoint.tensors.get(layer.weight)
    if info is None:
        raise CheckpointError("a linear layer's weight is missing", file=checkpoint.path, tensor=layer.weight)
    file = checkpoint.file_of(layer.weight)
    if layer.scale in checkpoint.tensors:
        raise SchemeError("already quantized", file=file, tensor=layer.weight, expected="no scale", got=layer.scale)
    if info.dtype not in _FLOATING:
        raise SchemeError(
            "not a floating-point weight",
            file=file,
            tensor=layer.weight,
            expected=" or ".join(sorted(_FLOATING)),
            got=info.dtype,
        )
    if info.shape != shape:
        raise CheckpointError(
            "the weight does not fit config.json",
            file=file,
            tensor=layer.weight,
            expected=f"shape {list(shape)}",
            got=str(list(info.shape)),
        )


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
    clipped = 0
    errors: list[float] = []
    norms: list[float] = []
    step = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        scale[rows] = _row_scales(weight[rows].to(torch.float32), scales)
        rounded = round_to_int8(weight[rows], scale[rows])
        levels[rows] = rounded.levels
        clipped += rounded.clipped
        errors += rounded.errors
        norms += rounded.norms
    exponents = exponent_of(scale)
    if scales == "power-of-two":
        check_exponents(exponents, weight.shape[1], torch.float32, file=file, tensor=tensor)
    return levels, scale, Figures(exponents, clipped, math.fsum(errors), math.fsum(norms))


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
            rows, columns = info.shape
            entries[tensor] = ("I8", info.shape, rows * columns)
            entries[weights[tensor].scale] = ("F32", (rows, 1), 4 * rows)
        else:
            entries[tensor] = (info.dtype, info.shape, info.end - info.start)
    return lay_out(entries, {**checkpoint.shards[shard].metadata, "format": "pt"})


def _write_configuration(checkpoint: Checkpoint, head: str | None, layouts: dict[str, Layout], work: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    scheme = preset_name_to_scheme("W8A8", ["Linear"])
    quantization = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="int-quantized",
        quantization_status="compressed",
        ignore=[head] if head else [],
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
