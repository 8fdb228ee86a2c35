"""Which weights of an unquantized checkpoint are linear layers, those of experts included.

The model's own code says which modules are linear: it is built by transformers without weights. Experts are one module
there, whatever the file has: a tensor for each expert and projection (Qwen3-MoE, Mixtral), or one of three dimensions.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from p2q.checkpoint import Checkpoint, TensorInfo
from p2q.errors import CheckpointError, SchemeError
from p2q.layers import WEIGHT, Layer
from p2q.scheme import method_of, raw_quantization

_FLOATING = {"F32", "F16", "BF16"}
_EXPERT = re.compile(r"(.+\.)?experts\.\d+\.\w+\.weight")
_ROUTERS = {"gate", "router", "shared_expert_gate"}


def linear_layers(checkpoint: Checkpoint) -> tuple[list[Layer], list[str]]:
    """The layers to quantize, and the names of linear modules that stay as they are: the output head and routers.

    Raises:
        SchemeError: the checkpoint is quantized already, its weights are not floating point, or some are neither linear
            layers nor embeddings.
        CheckpointError: transformers does not know the model, or a linear layer's weight is missing or does not fit.
    """
    file = checkpoint.path / "config.json"
    raw = raw_quantization(checkpoint.config)
    if raw is not None:
        raise SchemeError("already quantized", file=file, expected="bf16, fp16 or fp32 weights", got=method_of(raw))
    model = _build(checkpoint)
    head, modules = model.get_output_embeddings(), dict(model.named_modules())
    linear = {name: module for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
    stay = [name for name, module in linear.items() if module is head]
    layers, unknown = [], []
    for name, module in linear.items():
        if _is_router(checkpoint, name):
            stay.append(name)
        elif module is not head:
            layers.append(_check(checkpoint, Layer.linear(name), tuple(module.weight.shape)))
    for tensor, info in checkpoint.tensors.items():
        name = tensor.removesuffix(WEIGHT)
        if name in linear or isinstance(modules.get(name), torch.nn.Embedding):
            continue
        if _EXPERT.fullmatch(tensor) and len(info.shape) == 2:
            layers.append(_check(checkpoint, Layer.linear(name), info.shape))
        elif (layer := _fused_experts(checkpoint, tensor, info, modules)) is not None:
            layers.append(_check(checkpoint, layer, info.shape))
        elif _is_router(checkpoint, name):
            stay.append(name)
        elif tensor.endswith(WEIGHT) and len(info.shape) == 2:
            unknown.append(tensor)
    if not layers:
        raise CheckpointError("the model has no linear layers to quantize", file=file)
    for tensor in sorted(unknown)[:1]:
        owner = modules.get(tensor.removesuffix(WEIGHT))
        raise SchemeError(
            "not a weight that p2q quantizes, nor one that it may leave",
            file=checkpoint.file_of(tensor),
            tensor=tensor,
            expected="the weight of a linear layer or an embedding",
            got=f"that of {type(owner).__name__}" if owner is not None else "one that the model's code does not name",
        )
    return sorted(layers, key=lambda layer: layer.name), sorted(stay)


def _build(checkpoint: Checkpoint) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever a model's configuration code raises
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"transformers cannot build this model: {first}", file=checkpoint.path / "config.json"
        ) from error


def _is_router(checkpoint: Checkpoint, module: str) -> bool:
    """Whether a module chooses among experts, which lie beside it."""
    parent, _, name = module.rpartition(".")
    return name in _ROUTERS and any(tensor.startswith(f"{parent}.experts.") for tensor in checkpoint.tensors)


def _fused_experts(
    checkpoint: Checkpoint, tensor: str, info: TensorInfo, modules: dict[str, torch.nn.Module]
) -> Layer | None:
    """All experts of a layer in one tensor [experts, N, K]; None where a tensor is something else."""
    parent, _, parameter = tensor.rpartition(".")
    module = modules.get(parent)
    held = getattr(module, parameter, None)
    if not parent.endswith("experts") or len(info.shape) != 3 or not isinstance(held, torch.nn.Parameter):
        return None
    if getattr(module, "is_transposed", False):
        raise SchemeError(
            "experts whose columns are output features",
            file=checkpoint.file_of(tensor),
            tensor=tensor,
            expected="[experts, output features, input features]",
            got=str(list(info.shape)),
        )
    return _check(checkpoint, Layer(tensor, tensor, f"{tensor}_scale"), tuple(held.shape))


def _check(checkpoint: Checkpoint, layer: Layer, shape: tuple[int, ...]) -> Layer:
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
    return layer
