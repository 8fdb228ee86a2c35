"""cuBLASLt's int8 product with int32 output, through torch, and the contract's epilogue.

cublaslt  bf16(s_x * (s_w * float(acc))) + bias        torch._int_mm, then contract.epilogue
"""

from __future__ import annotations

import torch

from p2q import contract
from p2q.kernels.base import Kernel, Prepared, pad_to

_MIN_ROWS = 32
"""torch._int_mm takes more than 16 rows."""


class CublasLt(Kernel):
    """N and K that are not multiples of 16, and few rows, are padded with zeros, which changes no sum."""

    name = "cublaslt"
    formula = "s_x * (s_w * acc), rounded; then + bias, rounded"
    devices = frozenset({"cuda"})
    multiple = 16

    def obstacle(self, device: torch.device) -> str | None:
        reason = super().obstacle(device)
        return reason or (None if hasattr(torch, "_int_mm") else "this torch has no int8 product with int32 output")

    def prepare(self, q_w: torch.Tensor, s_w: torch.Tensor, out_dtype: torch.dtype) -> Prepared:
        n, k = q_w.shape
        contract.check_k(k)
        padded = pad_to(pad_to(q_w, 1, self.multiple), 0, self.multiple)
        return Prepared([padded, s_w.to(torch.float32).contiguous()], n, note=self.padding_note(n, k))

    def apply(
        self,
        prepared: Prepared,
        q_x: torch.Tensor,
        s_x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        weight, s_w = prepared.tensors
        m = q_x.shape[0]
        if not m:
            return q_x.new_empty((0, prepared.n), dtype=out_dtype)
        acc = torch._int_mm(pad_to(pad_to(q_x, 1, self.multiple), 0, _MIN_ROWS), weight.t())
        return contract.epilogue(acc[:m, : prepared.n], s_x, s_w, out_dtype, bias=bias)
