"""The int8 layers of a checkpoint, by the names, dtypes and shapes of its tensors alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from p2q.checkpoint import Checkpoint
from p2q.contract import MAX_K
from p2q.errors import CheckpointError, ScaleError, SchemeError

WEIGHT = ".weight"


@dataclass(frozen=True)
class Layer:
    """A quantized linear layer, or all experts of a layer in one tensor.

    name: of the module. weight: of its int8 tensor, (N, K) or (experts, N, K). scale: of the weight's scales.
    input_scale: of the activations' one scale where they are static.
    """

    name: str
    weight: str
    scale: str
    input_scale: str | None = None

    @classmethod
    def linear(cls, name: str) -> Layer:
        """A linear layer under its usual names."""
        return cls(name, f"{name}.weight", f"{name}.weight_scale")


def int8_layers(checkpoint: Checkpoint) -> list[Layer]:
    """The layers with int8 weights, in the order of their names. What the configuration says of them: `scheme`.

    Raises:
        SchemeError: int8 weights that are not a linear layer's, or asymmetric ones.
        ScaleError: a weight without a scale.
        CheckpointError: a scale without a weight.
    """
    layers = []
    for name in sorted(checkpoint.tensors):
        if checkpoint.tensors[name].dtype == "I8" and (layer := _layer_of(checkpoint, name)):
            _check_tensors(checkpoint, layer)
            layers.append(layer)
    scales: dict[str, str] = {}
    for layer in layers:
        if layer.scale in scales:
            raise CheckpointError(
                "two int8 weights have one scale",
                file=checkpoint.file_of(layer.scale),
                tensor=layer.scale,
                expected="that of one weight",
                got=f"{scales[layer.scale]} and {layer.weight}",
            )
        scales[layer.scale] = layer.weight
    for name in sorted(checkpoint.tensors):
        if name.endswith("weight_scale") and name not in scales:
            weight = name.removesuffix("_scale")
            got = checkpoint.tensors[weight].dtype if weight in checkpoint.tensors else "none"
            raise CheckpointError(
                "a weight scale without an int8 weight",
                file=checkpoint.file_of(name),
                tensor=name,
                expected=f"{weight} in I8",
                got=got,
            )
    return layers


def _layer_of(checkpoint: Checkpoint, weight: str) -> Layer | None:
    """The layer whose weight an int8 tensor is; None where it is none (a zero point, or anything without scales)."""
    info = checkpoint.tensors[weight]
    if weight.endswith(WEIGHT):
        layer = Layer.linear(weight.removesuffix(WEIGHT))
        input_scale = f"{layer.name}.input_scale"
        return replace(layer, input_scale=input_scale) if input_scale in checkpoint.tensors else layer
    # Experts in one tensor are parameters of a module: gate_up_proj and gate_up_proj_scale, or ..._weight_scale.
    scale = next((name for name in (f"{weight}_scale", f"{weight}_weight_scale") if name in checkpoint.tensors), None)
    if scale is None:
        if len(info.shape) == 3:
            raise ScaleError(
                "missing scale",
                file=checkpoint.file_of(weight),
                tensor=weight,
                expected=f"a tensor {weight}_scale or {weight}_weight_scale",
                got="none",
            )
        return None
    if len(info.shape) != 3:
        raise SchemeError(
            "int8 weights that are not a linear layer's",
            file=checkpoint.file_of(weight),
            tensor=weight,
            expected=f"a name that ends in {WEIGHT}, or the shape [experts, N, K]",
            got=str(list(info.shape)),
        )
    input_scale = f"{weight}_input_scale"
    return Layer(weight, weight, scale, input_scale if input_scale in checkpoint.tensors else None)


def _check_tensors(checkpoint: Checkpoint, layer: Layer) -> None:
    info, where = checkpoint.tensors[layer.weight], checkpoint.file_of(layer.weight)
    if len(info.shape) not in (2, 3) or 0 in info.shape:
        raise SchemeError(
            "not a linear layer",
            file=where,
            tensor=layer.weight,
            expected="a shape [N, K] or [experts, N, K]",
            got=str(list(info.shape)),
        )
    if layer.scale not in checkpoint.tensors:
        raise ScaleError(
            "missing scale", file=where, tensor=layer.weight, expected=f"a tensor {layer.scale}", got="none"
        )
    zero_point = f"{layer.weight}_zero_point"
    if zero_point in checkpoint.tensors and bool(checkpoint.read(zero_point).any()):
        raise SchemeError(
            "asymmetric weights",
            file=checkpoint.file_of(zero_point),
            tensor=zero_point,
            expected="zeros, for symmetric weights",
            got="others",
        )


def check_length(checkpoint: Checkpoint, layer: Layer) -> None:
    """Raise SchemeError where K is past the bound of exact int32 accumulation."""
    k = checkpoint.tensors[layer.weight].shape[-1]
    if k > MAX_K:
        raise SchemeError(
            "int32 cannot hold every sum of a row",
            file=checkpoint.file_of(layer.weight),
            tensor=layer.weight,
            expected=f"K of at most {MAX_K}",
            got=f"K = {k}",
        )


def check_not_fused(checkpoint: Checkpoint, layer: Layer, reason: str) -> None:
    """Raise SchemeError with a reason where a layer is many experts in one tensor."""
    shape = checkpoint.tensors[layer.weight].shape
    if len(shape) != 2:
        raise SchemeError(
            reason,
            file=checkpoint.file_of(layer.weight),
            tensor=layer.weight,
            expected="a weight [N, K]",
            got=str(list(shape)),
        )
