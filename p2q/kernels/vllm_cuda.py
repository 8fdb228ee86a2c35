"""vLLM's own two int8 kernels for NVIDIA GPUs, called without the activation quantization that vLLM does before them.

cutlass  bf16(fma(s_x, s_w * float(acc), bias))       csrc/quantization/w8a8/cutlass, ScaledEpilogueBias
triton   bf16(s_w * (s_x * float(acc))) + bias        compressed_tensors/triton_scaled_mm.py (vLLM 0.24)

vLLM 0.32 and 0.33 add the bias of the Triton kernel before the rounding, 0.24 after it. In a layer for which the
contract holds no kernel is given a bias, so that neither kernel nor release decides.
"""

from __future__ import annotations

import torch

from p2q.contract import check_k
from p2q.errors import EngineError, KernelError
from p2q.kernels.base import Kernel, Prepared, pad_to


class VLLMKernel(Kernel):
    """A kernel of vLLM's CUDA build, for bfloat16 and float16 outputs."""

    devices = frozenset({"cuda"})

    def obstacle(self, device: torch.device) -> str | None:
        reason = super().obstacle(device)
        if reason is not None:
            return reason
        try:
            from p2q import vllm_api
        except EngineError as error:
            return str(error)
        return None if vllm_api.has_cutlass() else "this vLLM build has no CUDA kernels"

    def prepare(self, q_w: torch.Tensor, s_w: torch.Tensor, out_dtype: torch.dtype) -> Prepared:
        check_k(q_w.shape[1])
        if out_dtype not in (torch.bfloat16, torch.float16):
            raise KernelError(f"kernel {self.name}", expected="an output in bfloat16 or float16", got=str(out_dtype))
        return Prepared([q_w.contiguous(), s_w.to(torch.float32).reshape(-1, 1).contiguous()], q_w.shape[0])


class Cutlass(VLLMKernel):
    """Shapes that CUTLASS cannot take (N and K must be multiples of 16) are padded with zeros, which changes no sum."""

    name = "cutlass"
    formula = "fma(s_x, s_w * acc, bias), rounded once"
    multiple = 16

    def obstacle(self, device: torch.device) -> str | None:
        reason = super().obstacle(device)
        if reason is None and torch.cuda.get_device_capability(device) >= (10, 0):
            return "vLLM's CUTLASS kernels take int8 up to compute capability 9.0"
        return reason

    def prepare(self, q_w: torch.Tensor, s_w: torch.Tensor, out_dtype: torch.dtype) -> Prepared:
        n, k = q_w.shape
        padded = pad_to(pad_to(q_w, 1, self.multiple), 0, self.multiple)
        prepared = super().prepare(padded, pad_to(s_w, 0, self.multiple), out_dtype)
        return Prepared(prepared.tensors, n, note=self.padding_note(n, k))

    def apply(
        self,
        prepared: Prepared,
        q_x: torch.Tensor,
        s_x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        from p2q import vllm_api

        weight, s_w = prepared.tensors
        if not q_x.shape[0]:
            return q_x.new_empty((0, prepared.n), dtype=out_dtype)
        wide_bias = None if bias is None else pad_to(bias, 0, self.multiple)
        y = vllm_api.cutlass_product(pad_to(q_x, 1, self.multiple), weight, s_x, s_w, wide_bias, out_dtype)
        return y if y.shape[1] == prepared.n else y[:, : prepared.n].contiguous()


class Triton(VLLMKernel):
    name = "triton"
    formula = "s_w * (s_x * acc), rounded; then + bias, rounded"

    def apply(
        self,
        prepared: Prepared,
        q_x: torch.Tensor,
        s_x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        from p2q import vllm_api

        weight, s_w = prepared.tensors
        if not q_x.shape[0]:
            return q_x.new_empty((0, prepared.n), dtype=out_dtype)
        return vllm_api.triton_product(q_x, weight, s_x, s_w, bias, out_dtype)
