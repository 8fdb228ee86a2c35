"""Exact kernels that follow the order of operations of vLLM's two CUDA kernels.

cutlass-order  bf16(fma(s_x, s_w * float(acc), bias))     csrc/quantization/w8a8/cutlass, ScaledEpilogueBias (vLLM 0.24)
triton-order   bf16(s_w * (s_x * float(acc))) + bias      compressed_tensors/triton_scaled_mm.py (vLLM 0.24)
"""

from __future__ import annotations

from typing import ClassVar

import torch

from p2q import contract
from p2q.contract import BiasMode, Order
from p2q.kernels import int8_cpu
from p2q.kernels.base import Kernel, Prepared


class ReferenceKernel(Kernel):
    """Exact accumulation, then an epilogue in the order of the subclass."""

    devices = frozenset({"cpu", "cuda"})
    order: ClassVar[Order]
    bias_mode: ClassVar[BiasMode]

    def prepare(self, q_w: torch.Tensor, s_w: torch.Tensor, out_dtype: torch.dtype) -> Prepared:
        contract.check_k(q_w.shape[1])
        weight = int8_cpu.pack(q_w) if q_w.device.type == "cpu" else q_w.contiguous()
        return Prepared([weight, s_w.to(torch.float32).contiguous()], q_w.shape[0])

    def apply(
        self,
        prepared: Prepared,
        q_x: torch.Tensor,
        s_x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        weight, s_w = prepared.tensors
        on_cpu = weight.device.type == "cpu"
        acc = int8_cpu.accumulate(q_x, weight, prepared.n) if on_cpu else contract.accumulate(q_x, weight)
        return contract.epilogue(acc, s_x, s_w, out_dtype, order=self.order, bias=bias, bias_mode=self.bias_mode)


class CutlassOrder(ReferenceKernel):
    name = "cutlass-order"
    formula = "fma(s_x, s_w * acc, bias), rounded once"
    order = "weight-first"
    bias_mode = "fused"


class TritonOrder(ReferenceKernel):
    name = "triton-order"
    formula = "s_w * (s_x * acc), rounded; then + bias, rounded"
    order = "token-first"
    bias_mode = "after-rounding"
