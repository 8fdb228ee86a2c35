"""vLLM's own int8 kernel for CPUs, oneDNN's matmul.

    onednn  bf16(fma(s_x, gemm(q_x, q_w; s_w folded in), bias))      csrc/cpu/dnnl_kernels.cpp (vLLM 0.32)

Without VNNI, oneDNN multiplies in int16 and saturates: the product is then not exact, and nothing says so. The probe
finds out.
"""

from __future__ import annotations

import importlib.util

import torch

from p2q.errors import EngineError
from p2q.kernels.base import Kernel, Prepared


class OneDNN(Kernel):
    name = "onednn"
    formula = "fma(s_x, s_w * acc, bias), rounded once"
    devices = frozenset({"cpu"})

    def obstacle(self, device: torch.device) -> str | None:
        reason = super().obstacle(device)
        if reason is not None:
            return reason
        if importlib.util.find_spec("vllm") is None:
            return "vLLM is not installed"
        try:
            from p2q import vllm_api
        except EngineError as error:
            return str(error)
        return None if vllm_api.has_onednn() else "this vLLM build has no oneDNN int8 kernel"

    def prepare(self, q_w: torch.Tensor, s_w: torch.Tensor, out_dtype: torch.dtype) -> Prepared:
        from p2q import vllm_api

        scale = s_w.to(torch.float32).reshape(-1, 1).contiguous()
        handler = vllm_api.onednn_handler(q_w, scale, out_dtype)
        # The handler copies the weight but keeps a bare pointer to the scales.
        return Prepared([handler.handler_tensor], q_w.shape[0], owner=(handler, scale))

    def apply(
        self,
        prepared: Prepared,
        q_x: torch.Tensor,
        s_x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        from p2q import vllm_api

        return vllm_api.onednn_product(prepared.tensors[0], q_x, s_x, bias, prepared.n, out_dtype)
