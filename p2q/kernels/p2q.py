"""The default kernel: the contract itself, in Triton on a GPU, in exact integers on a CPU.

p2q  bf16(s_x * (s_w * float(acc))) + bias
"""

from __future__ import annotations

import importlib.util

import torch

from p2q import contract
from p2q.kernels import int8_cpu
from p2q.kernels.base import Prepared
from p2q.kernels.reference import ReferenceKernel


class P2Q(ReferenceKernel):
    name = "p2q"
    formula = "s_x * (s_w * acc), rounded; then + bias, rounded"
    order = "weight-first"
    bias_mode = "after-rounding"

    def obstacle(self, device: torch.device) -> str | None:
        reason = super().obstacle(device)
        if reason is None and device.type == "cuda" and importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        return reason

    def apply(
        self,
        prepared: Prepared,
        q_x: torch.Tensor,
        s_x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        weight, s_w = prepared.tensors
        if weight.device.type == "cpu":
            y = int8_cpu.scaled(q_x, weight, s_x, s_w, prepared.n)
            return contract.add_bias(y.to(out_dtype), bias)
        from p2q.kernels.triton_gemm import int8_gemm

        return contract.add_bias(int8_gemm(q_x, weight, s_x.contiguous(), s_w, out_dtype), bias)

    def prepare_grouped(self, q_w: torch.Tensor, s_w: torch.Tensor, out_dtype: torch.dtype) -> Prepared:
        if q_w.device.type == "cpu":
            return super().prepare_grouped(q_w, s_w, out_dtype)
        contract.check_k(q_w.shape[2])
        return Prepared([q_w.contiguous(), s_w.to(torch.float32).contiguous()], q_w.shape[1])

    def apply_grouped(
        self,
        prepared: Prepared,
        q_x: torch.Tensor,
        s_x: torch.Tensor,
        group: torch.Tensor,
        groups: int,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        if q_x.device.type == "cpu":
            return super().apply_grouped(prepared, q_x, s_x, group, groups, out_dtype)
        from p2q.kernels.triton_gemm import int8_grouped_gemm

        weight, s_w = prepared.tensors
        return int8_grouped_gemm(q_x, weight, s_x.contiguous(), s_w, group, out_dtype)
