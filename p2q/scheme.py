"""Which layers of a checkpoint are W8A8 int8, and refusing by name what p2q does not convert.

The configuration is parsed and its targets are matched by compressed-tensors, the library that defines it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import match_name
from pydantic import ValidationError

from p2q.checkpoint import Checkpoint
from p2q.errors import CheckpointError, ScaleError, SchemeError

WEIGHT = ".weight"
SCALE = ".weight_scale"
SUPPORTED = (
    "compressed-tensors int-quantized W8A8: symmetric int8 weights per channel or per tensor, symmetric dynamic per-token int8 activations"
)


@dataclass(frozen=True)
class Layer:
    """A quantized linear layer: its module name, and the tensors that hold its int8 weight and its scale."""

    name: str

    @property
    def weight(self) -> str:
        return self.name + WEIGHT

    @property
    def scale(self) -> str:
        return self.name + SCALE


def quantized_layers(checkpoint: Checkpoint) -> list[Layer]:
    """The W8A8 layers of a checkpoint, in the order of their names.

    Raises:
        SchemeError: the checkpoint is not quantized, or by a scheme that p2q does not convert: it is named.
        ScaleError: an int8 weight without a scale.
        CheckpointError: a scale without a weight, or int8 weights in a layer that the configuration ignores.
    """
    file = checkpoint.path / "config.json"
    config = read_quantization_config(checkpoint.config, str(file))
    layers = [Layer(name.removesuffix(WEIGHT)) for name, info in sorted(checkpoint.tensors.items()) if name.endswith(WEIGHT) and info.dtype == "I8"]
    if not layers:
        raise SchemeError("no int8 weights in a checkpoint whose configuration says W8A8", file=checkpoint.path, expected=SUPPORTED)
    for layer in layers:
        info = checkpoint.tensors[layer.weight]
        where = checkpoint.shards[info.shard].path
        if len(info.shape) != 2 or 0 in info.shape:
            raise SchemeError("not a linear layer", file=where, tensor=layer.weight, expected="a shape [N, K]", got=str(list(info.shape)))
        if layer.scale not in checkpoint.tensors:
            raise ScaleError("missing scale", file=where, tensor=layer.weight, expected=f"a tensor {layer.scale}")
        if any(match_name(layer.name, target) for target in config.ignore or []):
            raise CheckpointError("int8 weights in a layer that the quantization configuration ignores", file=where, tensor=layer.weight)
    names = {layer.scale for layer in layers}
    for name, info in sorted(checkpoint.tensors.items()):
        if name.endswith(SCALE) and name not in names:
            raise CheckpointError(
                "a weight scale without an int8 weight", file=checkpoint.shards[info.shard].path, tensor=name,
                expected=f"{name.removesuffix('_scale')} in int8",
            )
    return layers


def read_quantization_config(model_config: dict[str, Any], file: str) -> QuantizationConfig:
    """The W8A8 quantization configuration of a model's config.json.

    Raises:
        SchemeError: there is none, or it is another scheme than `SUPPORTED`; the message names it.
    """
    raw = model_config.get("quantization_config", model_config.get("compression_config"))
    if raw is None:
        dtype = model_config.get("dtype", model_config.get("torch_dtype", "unknown dtype"))
        raise SchemeError(
            "not quantized", file=file, expected=SUPPORTED, got=f"{dtype} weights", hint="`p2q quantize` makes a W8A8 checkpoint of it"
        )
    method = raw.get("quant_method", "no quant_method") if isinstance(raw, dict) else type(raw).__name__
    if method != "compressed-tensors":
        bits = f" with {raw['bits']} bits" if isinstance(raw, dict) and "bits" in raw else ""
        raise SchemeError("not W8A8 int8", file=file, expected=SUPPORTED, got=f"{method}{bits}")
    try:
        config = QuantizationConfig.model_validate(raw)
    except ValidationError as error:
        problem = error.errors()[0]
        raise SchemeError(f"bad quantization_config: {'.'.join(map(str, problem['loc']))}: {problem['msg']}", file=file) from error
    if not config.config_groups:
        raise SchemeError("not W8A8 int8", file=file, expected=SUPPORTED, got="a quantization_config without config_groups")
    for name, scheme in config.config_groups.items():
        if isinstance(scheme, QuantizationScheme) and not is_supported(scheme):
            raise SchemeError(f"{name} is not W8A8 int8", file=file, expected=SUPPORTED, got=describe(scheme, config.format))
    if config.format not in (None, "int-quantized"):
        raise SchemeError("not W8A8 int8", file=file, expected=SUPPORTED, got=f"format {config.format}")
    return config


def is_supported(scheme: QuantizationScheme) -> bool:
    """Whether a scheme is the W8A8 of `SUPPORTED`."""
    return _is_int8(scheme.weights, {"channel", "tensor"}, dynamic=False) and _is_int8(scheme.input_activations, {"token"}, dynamic=True)


def _is_int8(args: QuantizationArgs | None, strategies: set[str], *, dynamic: bool) -> bool:
    return (
        args is not None
        and args.type == "int"
        and args.num_bits == 8
        and bool(args.symmetric)
        and args.strategy in strategies
        and bool(args.dynamic) == dynamic
    )


def describe(scheme: QuantizationScheme, fmt: str | None) -> str:
    """A scheme in words, such as "W4A16 (int weights per group; pack-quantized)"."""
    weights, inputs = scheme.weights, scheme.input_activations
    bits = f"W{weights.num_bits if weights else 16}A{inputs.num_bits if inputs else 16}"
    return f"{bits} (weights {_in_words(weights)}; activations {_in_words(inputs)}; format {fmt})"


def _in_words(args: QuantizationArgs | None) -> str:
    if args is None:
        return "not quantized"
    symmetry = "symmetric" if args.symmetric else "asymmetric"
    timing = "dynamic " if args.dynamic else ""
    strategy = getattr(args.strategy, "value", args.strategy)
    return f"{symmetry} {timing}{getattr(args.type, 'value', args.type)}{args.num_bits} per {strategy}"
