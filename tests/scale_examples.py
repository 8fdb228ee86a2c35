"""Scales and weights for tests, and what tests of scales share."""

from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import settings
from hypothesis import strategies as st

from p2q import scales

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WHERE = {"file": "model.safetensors", "tensor": "layers.4.mlp.up_proj.weight_scale"}

many = settings(deadline=None, max_examples=150)


def floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent - (value < Fraction(2) ** exponent)


def int8(rows: list[list[int]], columns: int = 5) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int8).reshape(-1, columns)


def checked_scale(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return scales.check_scale(weight.shape, scale, lambda: weight, **WHERE)


# Positive values that a dtype holds, subnormals included. Most are near enough to one another to share an exponent.
def positive(dtype: torch.dtype) -> st.SearchStrategy[float]:
    if dtype == torch.bfloat16:
        return st.integers(1, 0x7F7F).map(lambda pattern: torch.tensor(pattern).to(torch.int16).view(dtype).item())
    width = 32 if dtype == torch.float32 else 16
    largest = torch.finfo(dtype).max
    return st.one_of(
        st.floats(0, largest, width=width, exclude_min=True),
        st.floats(2.0**-9, 2.0**-7, width=width),
    )
