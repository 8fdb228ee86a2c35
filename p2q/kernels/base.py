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

    def prepare_grouped(self, q_w: torch.Tensor, s_w: torch.Tensor, out_dtype: torch.dtype) -> Prepared:
        """Take the weights (G, N, K) int8 and scales (G, N) float32 of G products, as `prepare` takes one."""
        each = [self.prepare(weight, scale, out_dtype) for weight, scale in zip(q_w, s_w, strict=True)]
        tensors = [tensor for prepared in each for tensor in prepared.tensors]
        return Prepared(tensors, each[0].n, owner=[prepared.owner for prepared in each], note=each[0].note)

    def apply_grouped(
        self,
        prepared: Prepared,
        q_x: torch.Tensor,
        s_x: torch.Tensor,
        group: torch.Tensor,
        groups: int,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Multiply each row by the weight of its group: one product a group here.

        Args:
            prepared: from `prepare_grouped`.
            q_x: (M, K) int8, contiguous.
            s_x: (M, 1) float32.
            group: (M,) int64 in [0, groups).
            groups: how many weights `prepared` holds.

        Returns:
            (M, N) in `out_dtype`.
        """
        y = q_x.new_empty((q_x.shape[0], prepared.n), dtype=out_dtype)
        per_group = len(prepared.tensors) // groups
        weights = [
            Prepared(prepared.tensors[i : i + per_group], prepared.n)
            for i in range(0, len(prepared.tensors), per_group)
        ]
        if q_x.is_cuda and torch.cuda.is_current_stream_capturing():
            # A graph's shapes are fixed, and how many rows a group has is not known: all rows through every weight.
            for i, weight in enumerate(weights):
                y = torch.where((group == i).unsqueeze(1), self.apply(weight, q_x, s_x, None, out_dtype), y)
            return y
        order = torch.argsort(group, stable=True)
        start = 0
        for weight, count in zip(weights, torch.bincount(group, minlength=groups).tolist(), strict=True):
            rows = order[start : start + count]
            start += count
            if count:
                y[rows] = self.apply(weight, q_x[rows], s_x[rows], None, out_dtype)
        return y


def pad_to(tensor: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """A contiguous tensor with zeros appended along a dimension, up to a multiple in length."""
    missing = -tensor.shape[dim] % multiple
    if not missing:
        return tensor.contiguous()
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)
