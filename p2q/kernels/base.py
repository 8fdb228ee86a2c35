"""What a kernel is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch


@dataclass(frozen=True)
class Prepared:
    """A weight in a kernel's own form.

    `tensors`: what `apply` reads; `n`: output features; `owner`: kept alive; `note`: what was done to make it fit.
    """

    tensors: list[torch.Tensor]
    n: int
    owner: Any = None
    note: str = ""


class Kernel(ABC):
    """An int8 matrix product with its epilogue: y = epilogue(q_x @ q_w^T, s_x, s_w, bias).

    `formula` states the order of operations, bias included. `multiple`: what N and K are padded to a multiple of.
    """

    name: ClassVar[str]
    formula: ClassVar[str]
    devices: ClassVar[frozenset[str]]
    multiple: ClassVar[int] = 1

    def obstacle(self, device: torch.device) -> str | None:
        """Why this kernel cannot run on a device of this machine, or None. Exactness is the probe's business."""
        if device.type not in self.devices:
            return f"it runs on {', '.join(sorted(self.devices))}, not on {device.type}"
        return None

    def padding_note(self, n: int, k: int) -> str:
        """Which sizes of a weight (n, k) are padded, for the report after loading; empty where none is."""
        sizes = [f"{name} {size} to {size + -size % self.multiple}" for name, size in (("N", n), ("K", k))]
        padded = [text for text, size in zip(sizes, (n, k), strict=True) if size % self.multiple]
        return f"padded with zeros: {', '.join(padded)}" if padded else ""

    @abstractmethod
    def prepare(self, q_w: torch.Tensor, s_w: torch.Tensor, out_dtype: torch.dtype) -> Prepared:
        """Take a weight (N, K) int8 and scales (N,) float32, once, at load."""

    @abstractmethod
    def apply(
        self,
        prepared: Prepared,
        q_x: torch.Tensor,
        s_x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Multiply.

        Args:
            prepared: the weight.
            q_x: (M, K) int8, contiguous.
            s_x: (M, 1) float32.
            bias: (N,) in `out_dtype`, or None; treated in this kernel's own way.
            out_dtype: bfloat16, float16 or float32.

        Returns:
            (M, N) in `out_dtype`.
        """


def pad_to(tensor: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """A contiguous tensor with zeros appended along a dimension, up to a multiple in length."""
    missing = -tensor.shape[dim] % multiple
    if not missing:
        return tensor.contiguous()
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)
