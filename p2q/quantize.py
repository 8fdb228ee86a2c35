"""Quantizing a bf16, fp16 or fp32 checkpoint to W8A8 by round-to-nearest, per channel.

The result is an ordinary compressed-tensors `int-quantized` checkpoint: int8 weights, float32 scales of shape [N, 1],
dynamic per-token activations. Nothing is calibrated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

import p2q
from p2q.checkpoint import DTYPES, INDEX_NAME, Checkpoint, ShardWriter, bytes_of, copy_others, make_header, open_checkpoint
from p2q.contract import CONTRACT_VERSION, Q_MAX
from p2q.convert import Progress, record_of
from p2q.errors import CheckpointError, ScaleError, SchemeError
from p2q.manifest import MANIFEST_NAME, Manifest, digest_of_files, sha256_of
from p2q.scales import (
    Requantized,
    WideSum,
    check_exponents,
    choose_smaller,
    exponent_of,
    is_power_of_two,
    power_of_two,
    sum_of_squares,
)
from p2q.scheme import Layer
from p2q.target import check_target, new_directory

Scales = Literal["absmax", "power-of-two"]
_FLOATING = {"F32", "F16", "BF16"}
_ERROR_BITS = 20


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
            one with the smaller squared error of the row (ties to the larger); the result satisfies the contract as it is.
        overwrite: replace an existing checkpoint.
        progress: told of each finished layer.

    Raises:
        CheckpointError, SchemeError: the source is not a checkpoint, or is quantized already.
        ScaleError: a row holds a NaN or an infinity, or its power of two cannot be proved in range.
        TargetError: the target cannot be written.
    """
    checkpoint = open_checkpoint(source)
    names, head = linear_layers(checkpoint)
    layers = [Layer(name) for name in names]
    check_target(target, source=source, overwrite=overwrite)
    plans = {name: _plan_shard(checkpoint, name, layers) for name in checkpoint.shards}
    with new_directory(target, source=source, overwrite=overwrite) as work:
        writers = {name: ShardWriter(work / name, header, size) for name, (header, _, size) in plans.items()}
        offsets = {tensor: offset for _, where, _ in plans.values() for tensor, offset in where.items()}
        by_weight = {layer.weight for layer in layers}
        for tensor, info in checkpoint.tensors.items():
            if tensor not in by_weight:
                writers[info.shard].write(offsets[tensor], bytes_of(checkpoint.read(tensor)))
        records = {}
        for done, layer in enumerate(layers, 1):
            info = checkpoint.tensors[layer.weight]
            file = str(checkpoint.shards[info.shard].path)
            result, scale = quantize_weight(checkpoint.read(layer.weight), scales, file=file, tensor=layer.weight)
            writers[info.shard].write(offsets[layer.weight], bytes_of(result.weight))
            writers[info.shard].write(offsets[layer.scale], bytes_of(scale))
            records[layer.weight] = record_of(result)
            if progress is not None:
                progress(layer.name, done, len(layers))
        for writer in writers.values():
            writer.close()
        _write_configuration(checkpoint, head, plans, work)
        if scales == "power-of-two":
            manifest = Manifest(
                contract=CONTRACT_VERSION,
                made_by=f"p2q {p2q.__version__}",
                rule="quantize",
                source_digest=digest_of_files({name: sha256_of(source / name) for name in checkpoint.files()}),
                tensors=records,
                files={name: sha256_of(work / name) for name in checkpoint.files()},
            )
            (work / MANIFEST_NAME).write_text(manifest.dump(), encoding="utf-8")
    return Quantization([layer.name for layer in layers], checkpoint.skipped)


def linear_layers(checkpoint: Checkpoint) -> tuple[list[str], str | None]:
    """Names of the linear layers whose weights the checkpoint holds in a floating dtype, and the output head's name.

    The model's own code says which modules are linear: it is built by transformers without weights.

    Raises:
        SchemeError: the checkpoint is quantized already, or its weights are not floating point.
        CheckpointError: transformers does not know the model, or a linear layer's weight is missing.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    file = checkpoint.path / "config.json"
    if any(key in checkpoint.config for key in ("quantization_config", "compression_config")):
        method = (checkpoint.config.get("quantization_config") or {}).get("quant_method", "unknown")
        raise SchemeError("already quantized", file=file, expected="bf16, fp16 or fp32 weights", got=method)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint.path))
    except Exception as error:  # whatever a model's configuration code raises
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"transformers cannot build this model: {first}", file=file) from error
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    names = sorted(name for name, module in linear.items() if module is not head)
    for name in names:
        info = checkpoint.tensors.get(name + ".weight")
        if info is None:
            raise CheckpointError("a linear layer's weight is missing", file=checkpoint.path, tensor=name + ".weight")
        if info.dtype not in _FLOATING:
            raise SchemeError(
                "not a floating-point weight", file=checkpoint.path / info.shard, tensor=name + ".weight",
                expected=" or ".join(sorted(_FLOATING)), got=info.dtype,
            )
    if not names:
        raise CheckpointError("the model has no linear layers to quantize", file=file)
    return names, next((name for name, module in linear.items() if module is head), None)


def quantize_weight(weight: torch.Tensor, scales: Scales, *, file: str, tensor: str) -> tuple[Requantized, torch.Tensor]:
    """Round a weight to int8 with one scale a row.

    Args:
        weight: (N, K) bfloat16, float16 or float32.
        scales: see `quantize`.

    Returns:
        the int8 weight with its figures, and the scales (N, 1) float32. A row of zeros gets scale 1.
    """
    values = weight.to(torch.float32)
    absmax = values.abs().amax(dim=1, keepdim=True)
    bad = ~torch.isfinite(absmax)
    if bad.any():
        raise ScaleError("a weight is NaN or infinite", file=file, tensor=tensor, got=f"row {int(bad.nonzero()[0, 0])}")
    zero = absmax == 0
    scale = torch.where(zero, torch.ones_like(absmax), absmax / Q_MAX)
    # A row so small that its scale underflows has no usable scale: the smallest normal one rounds it to zeros.
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
    if scales == "power-of-two":
        exponents = _smaller_error(values, exponent_of(scale), is_power_of_two(scale).reshape(-1))
        check_exponents(exponents, values.shape[1], torch.float32, file=file, tensor=tensor)
        scale = power_of_two(exponents, scale)
    rounded = (values / scale).round()
    levels = rounded.clamp(-128, 127)
    difference = (levels.to(torch.float64) * scale.to(torch.float64) - values.to(torch.float64)).square()
    return (
        Requantized(
            levels.to(torch.int8),
            exponent_of(scale),
            int((rounded != levels).sum()),
            float(difference.sum()),
            float(values.to(torch.float64).square().sum()),
        ),
        scale,
    )


def _smaller_error(values: torch.Tensor, floor: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Of floor and floor + 1 the exponent whose rounding has the smaller squared error of the row; floor where `exact`."""
    ceil = torch.where(exact, floor, floor + 1)

    def error(exponents: torch.Tensor) -> WideSum:
        # In units of 2^(floor - 20), rounded to integers, so that the sum does not depend on its order.
        level = torch.ldexp(values.to(torch.float64), -exponents.reshape(-1, 1))
        unit = torch.ldexp(torch.ones_like(level[:, :1]), (exponents - floor + _ERROR_BITS).reshape(-1, 1))
        return sum_of_squares(((level - level.round().clamp(-128, 127)) * unit).round())

    return choose_smaller(floor, ceil, error(floor), error(ceil))


def _plan_shard(checkpoint: Checkpoint, shard: str, layers: list[Layer]) -> tuple[bytes, dict[str, int], int]:
    weights = {layer.weight: layer for layer in layers}
    entries: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor, info in checkpoint.tensors.items():
        if info.shard != shard:
            continue
        if tensor in weights:
            entries[tensor] = ("I8", info.shape)
            entries[weights[tensor].scale] = ("F32", (info.shape[0], 1))
        else:
            entries[tensor] = (info.dtype, info.shape)
    return make_header(entries, {"format": "pt"})


def _write_configuration(
    checkpoint: Checkpoint, head: str | None, plans: dict[str, tuple[bytes, dict[str, int], int]], work: Path
) -> None:
    copy_others(checkpoint, work)
    scheme = preset_name_to_scheme("W8A8", ["Linear"])
    quantization = QuantizationConfig(
        config_groups={"group_0": scheme}, format="int-quantized", quantization_status="compressed", ignore=[head] if head else []
    )
    config = {**checkpoint.config, "quantization_config": quantization.model_dump(mode="json", exclude_none=True)}
    _write_json(work / "config.json", config)
    if (work / INDEX_NAME).is_file():
        weight_map = {tensor: shard for shard, (_, where, _) in plans.items() for tensor in where}
        total = sum(size for _, _, size in plans.values())
        _write_json(work / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
