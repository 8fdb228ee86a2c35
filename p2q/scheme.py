"""Which layers of a checkpoint are W8A8 int8, and refusing by name what p2q does not convert.

The configuration is parsed and its targets are matched by compressed-tensors, the library that defines it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from p2q.checkpoint import Checkpoint
from p2q.contract import MAX_K
from p2q.errors import CheckpointError, ScaleError, SchemeError

if TYPE_CHECKING:  # compressed-tensors imports transformers, which takes seconds: only where it is used
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

WEIGHT = ".weight"
SCALE = ".weight_scale"
ZERO_POINT = ".weight_zero_point"
SUPPORTED = (
    "compressed-tensors int-quantized W8A8: symmetric int8 weights per channel or per tensor, "
    "symmetric dynamic per-token int8 activations"
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
        CheckpointError: a scale without a weight, or int8 weights in a layer that the configuration does not target.
    """
    config = read_quantization_config(checkpoint.config, str(checkpoint.path / "config.json"))
    int8 = sorted(name for name, info in checkpoint.tensors.items() if info.dtype == "I8")
    layers = [Layer(name.removesuffix(WEIGHT)) for name in int8 if name.endswith(WEIGHT)]
    if not layers:
        raise SchemeError(
            "no int8 weights in a checkpoint whose configuration says W8A8", file=checkpoint.path, expected=SUPPORTED
        )
    for layer in layers:
        _check_layer(checkpoint, layer, config)
    scales = {layer.scale for layer in layers}
    for name in sorted(checkpoint.tensors):
        if name.endswith(SCALE) and name not in scales:
            weight = name.removesuffix("_scale")
            got = checkpoint.tensors[weight].dtype if weight in checkpoint.tensors else "none"
            raise CheckpointError(
                "a weight scale without an int8 weight",
                file=checkpoint.file_of(name),
                tensor=name,
                expected=f"{weight} in I8",
                got=got,
            )
    for name in int8:
        if not name.endswith(WEIGHT) and f"{name}_scale" in checkpoint.tensors:
            raise SchemeError(
                "int8 weights that are not a linear layer's",
                file=checkpoint.file_of(name),
                tensor=name,
                expected=f"a name that ends in {WEIGHT}",
            )
    return layers


def _check_layer(checkpoint: Checkpoint, layer: Layer, config: QuantizationConfig) -> None:
    info, where = checkpoint.tensors[layer.weight], checkpoint.file_of(layer.weight)
    if len(info.shape) != 2 or 0 in info.shape:
        raise SchemeError(
            "not a linear layer", file=where, tensor=layer.weight, expected="a shape [N, K]", got=str(list(info.shape))
        )
    if layer.scale not in checkpoint.tensors:
        raise ScaleError(
            "missing scale", file=where, tensor=layer.weight, expected=f"a tensor {layer.scale}", got="none"
        )
    ignored = [pattern for pattern in config.ignore or [] if _matches(checkpoint, layer, pattern)]
    if ignored:
        raise CheckpointError(
            "int8 weights in a layer that the quantization configuration ignores",
            file=where,
            tensor=layer.weight,
            expected="a floating dtype",
            got=f'I8, and "{ignored[0]}" in ignore',
        )
    targets = [target for scheme in config.config_groups.values() for target in scheme.targets]
    # Names of classes, as "Linear", take the model's code to match; names of layers and patterns do not.
    classes = any(not target.startswith("re:") and target.isidentifier() for target in targets)
    if not classes and not any(_matches(checkpoint, layer, target) for target in targets):
        raise CheckpointError(
            "int8 weights in a layer that the quantization configuration does not target",
            file=where,
            tensor=layer.weight,
            expected=f"a match of {' or '.join(targets) or 'nothing'}",
        )
    zero_point = layer.name + ZERO_POINT
    if zero_point in checkpoint.tensors and bool(checkpoint.read(zero_point).any()):
        raise SchemeError(
            "asymmetric weights",
            file=checkpoint.file_of(zero_point),
            tensor=zero_point,
            expected="zeros, for symmetric weights",
            got="others",
        )


def _matches(checkpoint: Checkpoint, layer: Layer, pattern: str) -> bool:
    from compressed_tensors.utils.match import match_name

    try:
        return bool(match_name(layer.name, pattern))
    except re.error as error:
        raise SchemeError(
            "bad quantization_config",
            file=checkpoint.path / "config.json",
            expected="a regular expression",
            got=f"{pattern} ({error})",
        ) from error


def check_length(checkpoint: Checkpoint, layer: Layer) -> None:
    """Raise SchemeError where K is past the bound of exact int32 accumulation."""
    k = checkpoint.tensors[layer.weight].shape[1]
    if k > MAX_K:
        raise SchemeError(
            "int32 cannot hold every sum of a row",
            file=checkpoint.file_of(layer.weight),
            tensor=layer.weight,
            expected=f"K of at most {MAX_K}",
            got=f"K = {k}",
        )


def raw_quantization(model_config: dict[str, Any]) -> Any:
    """What a model's config.json says of its quantization, None where it says nothing."""
    raw = model_config.get("quantization_config")
    return model_config.get("compression_config") if raw is None else raw


def read_quantization_config(model_config: dict[str, Any], file: str) -> QuantizationConfig:
    """The W8A8 quantization configuration of a model's config.json.

    Raises:
        SchemeError: there is none, or it is another scheme than `SUPPORTED`; the message names it.
    """
    raw = raw_quantization(model_config)
    if raw is None:
        dtype = model_config.get("dtype", model_config.get("torch_dtype", "unquantized"))
        raise SchemeError(
            "not quantized",
            file=file,
            expected=SUPPORTED,
            got=f"{dtype} weights",
            hint="`p2q quantize` makes a W8A8 checkpoint of it",
        )

    def refused(got: str) -> SchemeError:
        return SchemeError("not W8A8 int8", file=file, expected=SUPPORTED, got=got)

    method = method_of(raw)
    if method != "compressed-tensors":
        raise refused(method)
    config = _parse(raw, file)
    if not config.config_groups:
        raise refused("a quantization_config without config_groups")
    for name, scheme in config.config_groups.items():
        if not is_supported(scheme):
            raise refused(f"{name}: {describe(scheme, scheme.format or config.format)}")
    if config.format != "int-quantized":
        raise refused(f"format {config.format}")
    if (sparsity := raw.get("sparsity_config")) and not (
        isinstance(sparsity, dict) and sparsity.get("format") == "dense"
    ):
        raise refused(f"sparse weights ({sparsity})")
    if raw.get("transform_config"):
        raise refused("activations that are transformed first (transform_config)")
    return config


def method_of(raw: Any) -> str:
    """The quantization method of a raw quantization_config, in words."""
    if not isinstance(raw, dict):
        return f"a quantization_config that is {raw!r}"
    method = str(raw.get("quant_method", "a quantization_config without quant_method"))
    bits = raw.get("bits", raw.get("w_bit"))
    return method if bits is None else f"{method} with {bits} bits"


def _parse(raw: dict[str, Any], file: str) -> QuantizationConfig:
    from compressed_tensors.quantization import QuantizationConfig
    from pydantic import ValidationError

    try:
        return QuantizationConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if "(" not in str(part))  # without validators' names
        problem = f"{place}: {first['msg']}"
    except Exception as error:  # its validators raise NotImplementedError and KeyError too
        problem = f"{type(error).__name__} {error}"
    raise SchemeError("bad quantization_config", file=file, expected=SUPPORTED, got=problem)


def is_supported(scheme: QuantizationScheme) -> bool:
    """Whether a scheme is the W8A8 of `SUPPORTED`."""
    return (
        _is_int8(scheme.weights, {"channel", "tensor"}, dynamic=False)
        and _is_int8(scheme.input_activations, {"token"}, dynamic=True)
        and scheme.output_activations is None
        and scheme.format in (None, "int-quantized")
    )


def _is_int8(args: QuantizationArgs | None, strategies: set[str], *, dynamic: bool) -> bool:
    return (
        args is not None
        and args.type == "int"
        and args.num_bits == 8
        and bool(args.symmetric)
        and args.strategy in strategies
        and args.dynamic is dynamic
    )


def describe(scheme: QuantizationScheme, fmt: str | None) -> str:
    """A scheme in words, such as "W4A16 (int weights per group; pack-quantized)"."""
    weights, inputs = scheme.weights, scheme.input_activations
    fmt = getattr(fmt, "value", fmt)
    bits = f"W{weights.num_bits if weights else 16}A{inputs.num_bits if inputs else 16}"
    outputs = f"; outputs {_in_words(scheme.output_activations)}" if scheme.output_activations else ""
    return f"{bits} (weights {_in_words(weights)}; activations {_in_words(inputs)}{outputs}; format {fmt})"


def _in_words(args: QuantizationArgs | None) -> str:
    if args is None:
        return "not quantized"
    symmetry = "symmetric" if args.symmetric else "asymmetric"
    timing = "dynamic " if args.dynamic else ""
    strategy = getattr(args.strategy, "value", args.strategy)
    return f"{symmetry} {timing}{getattr(args.type, 'value', args.type)}{args.num_bits} per {strategy}"
