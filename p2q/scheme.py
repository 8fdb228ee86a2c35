"""Which layers of a checkpoint are W8A8 int8, and refusing by name what p2q does not convert.

The configuration is parsed and its targets are matched by compressed-tensors, the library that defines it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from p2q.checkpoint import Checkpoint
from p2q.errors import CheckpointError, ScaleError, SchemeError
from p2q.layers import Layer, int8_layers

if TYPE_CHECKING:  # compressed-tensors imports transformers, which takes seconds: only where it is used
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

SUPPORTED = (
    "compressed-tensors int-quantized W8A8: symmetric int8 weights per channel or per tensor, "
    "symmetric int8 activations, dynamic per token or static per tensor"
)


def quantized_layers(checkpoint: Checkpoint) -> list[Layer]:
    """The W8A8 layers of a checkpoint, in the order of their names.

    Raises:
        SchemeError: the checkpoint is not quantized, or by a scheme that p2q does not convert: it is named, with the
            layer where there is one.
        ScaleError: an int8 weight, or a layer with static activations, without a scale.
        CheckpointError: a scale without a weight, or int8 weights in a layer that the configuration does not target.
    """
    config = read_quantization_config(checkpoint.config, str(checkpoint.path / "config.json"))
    layers = int8_layers(checkpoint)
    if not layers:
        raise SchemeError(
            "no int8 weights in a checkpoint whose configuration says W8A8", file=checkpoint.path, expected=SUPPORTED
        )
    groups = _Groups(checkpoint, config)
    for layer in layers:
        _check_activations(checkpoint, layer, groups.of(layer))
    return layers


def _check_activations(checkpoint: Checkpoint, layer: Layer, group: QuantizationScheme) -> None:
    where, inputs = checkpoint.file_of(layer.weight), group.input_activations
    if inputs is None or not inputs.symmetric:
        # Engines compute the zero point's term each in its own way (some in int32, some in floating point), so that no
        # weight scale makes them agree.
        raise SchemeError(
            "asymmetric activations", file=where, tensor=layer.weight, expected=SUPPORTED, got=describe(group)
        )
    if not inputs.dynamic and layer.input_scale is None:
        separator = "." if layer.weight != layer.name else "_"
        raise ScaleError(
            "static activations without their scale",
            file=where,
            tensor=layer.weight,
            expected=f"a tensor {layer.name}{separator}input_scale",
            got="none",
        )
    if inputs.dynamic and layer.input_scale is not None:
        raise CheckpointError(
            "an activation scale in a layer whose activations are dynamic",
            file=checkpoint.file_of(layer.input_scale),
            tensor=layer.input_scale,
            expected="none",
        )


class _Groups:
    """Which config group a layer belongs to, by compressed-tensors' own matching of names."""

    def __init__(self, checkpoint: Checkpoint, config: QuantizationConfig) -> None:
        self._checkpoint, self._ignore = checkpoint, config.ignore or []
        self._groups = list(config.config_groups.values())
        self._targets = [(target, group) for group in self._groups for target in group.targets]
        # The library prefers names to patterns, and patterns to classes.
        self._targets.sort(key=lambda pair: pair[0].startswith("re:"))
        # Names of classes, as "Linear", take the model's code to match; names of layers and patterns do not.
        self._of_classes = [pair for pair in self._targets if not pair[0].startswith("re:") and pair[0].isidentifier()]

    def of(self, layer: Layer) -> QuantizationScheme:
        """Raises CheckpointError where the layer is ignored, or no group targets it."""
        file = self._checkpoint.file_of(layer.weight)
        ignored = [pattern for pattern in self._ignore if self._matches(layer, pattern)]
        if ignored:
            raise CheckpointError(
                "int8 weights in a layer that the quantization configuration ignores",
                file=file,
                tensor=layer.weight,
                expected="a floating dtype",
                got=f'I8, and "{ignored[0]}" in ignore',
            )
        for target, group in self._targets:
            if self._matches(layer, target):
                return group
        if not self._of_classes:
            targets = " or ".join(target for target, _ in self._targets)
            raise CheckpointError(
                "int8 weights in a layer that the quantization configuration does not target",
                file=file,
                tensor=layer.weight,
                expected=f"a match of {targets or 'nothing'}",
            )
        linear = [group for target, group in self._of_classes if target == "Linear"]
        return linear[0] if linear else self._of_classes[0][1]

    def _matches(self, layer: Layer, pattern: str) -> bool:
        return _matches(self._checkpoint, layer, pattern)


def _matches(checkpoint: Checkpoint, layer: Layer, pattern: str) -> bool:
    from compressed_tensors.utils.match import match_name

    try:
        return bool(match_name(layer.name, pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise SchemeError(
            "bad quantization_config",
            file=checkpoint.path / "config.json",
            expected="a regular expression",
            got=f"{pattern[:80]} ({error})",
        ) from error


def raw_quantization(model_config: dict[str, Any]) -> Any:
    """What a model's config.json says of its quantization, None where it says nothing."""
    text = model_config.get("text_config")
    places = (
        model_config.get("quantization_config"),
        text.get("quantization_config") if isinstance(text, dict) else None,
        model_config.get("compression_config"),
    )
    return next((raw for raw in places if raw is not None), None)


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
            raise refused(f"{name}: {describe(scheme, config.format)}")
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
    """Whether a scheme is the W8A8 of `SUPPORTED`, or the same with asymmetric activations."""
    inputs = scheme.input_activations
    return (
        _is_int8(scheme.weights, {"channel", "tensor"}, dynamic=False)
        and bool(scheme.weights.symmetric)
        and (_is_int8(inputs, {"token"}, dynamic=True) or _is_int8(inputs, {"tensor"}, dynamic=False))
        and scheme.output_activations is None
        and scheme.format in (None, "int-quantized")
    )


def _is_int8(args: QuantizationArgs | None, strategies: set[str], *, dynamic: bool) -> bool:
    return (
        args is not None
        and args.type == "int"
        and args.num_bits == 8
        and args.strategy in strategies
        and args.dynamic is dynamic
    )


def describe(scheme: QuantizationScheme, fmt: str | None = "int-quantized") -> str:
    """A scheme in words, such as "W4A16 (int weights per group; pack-quantized)". fmt: where the scheme names none."""
    weights, inputs = scheme.weights, scheme.input_activations
    fmt = getattr(scheme.format or fmt, "value", scheme.format or fmt)
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
