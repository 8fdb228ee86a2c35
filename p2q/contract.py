"""The arithmetic contract: exact reference arithmetic in torch, on any device.

    s_x = clamp(absmax(x) / 127, 2^-64, 2^64)          per token, float32; or one fixed scale for all
    q_x = clamp(rne(x / s_x), -127, 127)               int8
    acc = sum_k q_x * q_w                              int32, exact
    y   = round_to_out_dtype(s_x * (2^k * float32(acc)))
    y   = y + bias                                     in the output's dtype, after the rounding

This module is the one definition that every kernel is tested against. It imports nothing else of p2q.

Why the clamp on s_x: with s_x in [2^-64, 2^64] the range of every product of the epilogue follows from k and K
alone, so that the proof of `exponent_bounds` holds for all activations. Ordinary activations never reach either end:
below 2^-64 the row's values are quantized with that fixed scale, above it they saturate.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

CONTRACT_VERSION = 1

MAX_K = 132_104
"""Largest K for which int32 holds every sum of products of |q_x| <= 127 and |q_w| <= 128: 2^31 / (127 * 128)."""

Q_MAX = 127
TOKEN_SCALE_MIN = 2.0**-64
TOKEN_SCALE_MAX = 2.0**64

SAFE_K = 131_071
"""Largest K for which int32 holds every sum of products of any int8 values, -128 * -128 included: 2^31 / 2^14 - 1."""

EXACT_BLOCK = 1024
"""Columns of K whose int8 products sum to at most 2^24 in magnitude (1024 * 128 * 128): exact in float32."""

Order = Literal["weight-first", "token-first", "scales-first"]
"""Order of the two multiplications: s_x * (s_w * acc), s_w * (s_x * acc), (s_x * s_w) * acc."""

ORDERS: tuple[Order, ...] = get_args(Order)

BiasMode = Literal["after-rounding", "fused"]
"""Where a bias enters: added to the rounded output in its dtype, or by a fused multiply-add before the rounding."""


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations symmetrically, one scale a row (contract rule 1).

    Args:
        x: (M, K) bfloat16, float16 or float32.

    Returns:
        q_x (M, K) int8 in [-127, 127], contiguous, and s_x (M, 1) float32 in [2^-64, 2^64]. A row of zeros gets
        q_x = 0 and s_x = 1. A row with a NaN or an infinity gets q_x = 0 and s_x = NaN, so that it cannot pass for a
        number.
    """
    values = x.to(torch.float32)
    absmax = values.abs().amax(dim=-1, keepdim=True) if x.shape[-1] else values.new_zeros(*x.shape[:-1], 1)
    # True divisions: x * (1 / s) and x / s differ in the last bit, and engines disagree about which to use. Even torch
    # multiplies by the reciprocal where a divisor is a Python number and the device a GPU, hence the tensor of 127s.
    scale = (absmax / torch.full_like(absmax, Q_MAX)).clamp(TOKEN_SCALE_MIN, TOKEN_SCALE_MAX)
    scale = torch.where(absmax == 0, torch.ones_like(scale), scale)
    return _to_levels(values, scale, torch.isfinite(absmax))


def quantize_per_tensor(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations symmetrically by a fixed scale, as `quantize_per_token` does by one of the row's own.

    Args:
        x: (M, K) bfloat16, float16 or float32.
        scale: one float32 value in [2^-64, 2^64].

    Returns:
        q_x (M, K) int8 in [-127, 127], contiguous, and s_x (M, 1) float32, the scale for every row. A row with a NaN or
        an infinity gets q_x = 0 and s_x = NaN.
    """
    values = x.to(torch.float32)
    finite = torch.isfinite(values).all(dim=-1, keepdim=True)
    return _to_levels(values, scale.reshape(1, 1).expand(finite.shape).contiguous(), finite)


def _to_levels(values: torch.Tensor, scale: torch.Tensor, finite: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # torch.round rounds halves to even. A NaN has no int8 value, so non-finite rows are zeroed before the cast.
    levels = torch.where(finite, values / scale, torch.zeros_like(values)).round().clamp(-Q_MAX, Q_MAX)
    # Rows in order whatever the strides of x: kernels read q_x as contiguous.
    q_x = levels.to(torch.int8, memory_format=torch.contiguous_format)
    return q_x, torch.where(finite, scale, torch.full_like(scale, float("nan")))


def accumulate(q_x: torch.Tensor, q_w: torch.Tensor) -> torch.Tensor:
    """Multiply int8 matrices with exact int32 accumulation (contract rule 2).

    On a CPU the product is taken in float32 over blocks of `EXACT_BLOCK` columns, whose every partial sum is an integer
    of at most 2^24 in magnitude and therefore exact in any order of summation, and the blocks are added in integers.
    Other devices use one float64 product, exact up to 2^53.

    Args:
        q_x: (M, K) int8.
        q_w: (N, K) int8 (or float32 holding int8 values, which saves the conversion of a fixed weight).

    Returns:
        (M, N) int32.

    Raises:
        ValueError: K above `MAX_K`.
        OverflowError: the exact sum does not fit int32 (only possible with q_x = -128, which rule 1 never gives).
    """
    k = q_x.shape[-1]
    check_k(k)
    if q_x.device.type != "cpu":
        product = q_x.to(torch.float64) @ q_w.to(torch.float64).t()
        # Without a look at the values, which would wait for the device and forbid its capture in a CUDA graph.
        return product.to(torch.int32) if k <= SAFE_K else _to_int32(product)
    total = torch.zeros(q_x.shape[0], q_w.shape[0], dtype=torch.int32 if k <= SAFE_K else torch.int64)
    for start in range(0, k, EXACT_BLOCK):
        block = slice(start, start + EXACT_BLOCK)
        total += (q_x[:, block].to(torch.float32) @ q_w[:, block].to(torch.float32).t()).to(torch.int32)
    return total if k <= SAFE_K else _to_int32(total)


def check_k(k: int) -> None:
    """Raise ValueError when K is past the bound of exact int32 accumulation."""
    if k > MAX_K:
        raise ValueError(f"K = {k} is past {MAX_K}: int32 cannot hold every sum of {k} int8 products")


def _to_int32(total: torch.Tensor) -> torch.Tensor:
    limits = torch.iinfo(torch.int32)
    if total.numel() and (total.min() < limits.min or total.max() > limits.max):
        raise OverflowError(
            "an accumulator leaves int32: q_x holds -128, which the contract's quantization never gives"
        )
    return total.to(torch.int32)


def epilogue(
    acc: torch.Tensor,
    s_x: torch.Tensor,
    s_w: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    order: Order = "weight-first",
    bias: torch.Tensor | None = None,
    bias_mode: BiasMode = "after-rounding",
) -> torch.Tensor:
    """Scale an accumulator to the output's dtype in a given order of operations (contract rules 3 and 4).

    Args:
        acc: (M, N) int32.
        s_x: (M, 1) float32.
        s_w: (N,) float32.
        out_dtype: bfloat16, float16 or float32.
        order: the order of the two multiplications.
        bias: (N,) in any floating dtype, or None.
        bias_mode: the contract's "after-rounding", or "fused" as CUTLASS does it.

    Returns:
        (M, N) in `out_dtype`.
    """
    value = acc.to(torch.float32)  # rounds to nearest even past 2^24, the same way on every device
    s_w = s_w.to(torch.float32).reshape(1, -1)
    if order == "weight-first":
        left, right = s_x, s_w * value
    elif order == "token-first":
        left, right = s_w, s_x * value
    else:
        left, right = s_x * s_w, value
    if bias is not None and bias_mode == "fused":
        return fused_multiply_add(left, right, bias.to(torch.float32).reshape(1, -1)).to(out_dtype)
    return add_bias((left * right).to(out_dtype), bias)


def add_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Add a bias (N,) to a rounded output (M, N), in the output's dtype (contract rule 4)."""
    return y if bias is None else y + bias.to(y.dtype)


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in float32 with one rounding, as a hardware fused multiply-add gives it.

    The float64 product of two float32 numbers is exact. The sum is rounded to odd in float64, which makes its later
    rounding to float32 the rounding of the exact sum (Boldo and Melquiond, "Emulation of FMA and correctly rounded
    sums: proved algorithms using rounding to odd", 2008).
    """
    product = a.to(torch.float64) * b.to(torch.float64)
    addend = c.to(torch.float64).expand_as(product)
    total = product + addend
    # TwoSum: the exact error of that addition.
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    bits = total.contiguous().view(torch.int64)
    inexact_even = (error != 0) & (bits & 1 == 0) & torch.isfinite(total)
    # One step toward the exact sum lands on the odd neighbour: bits order like magnitudes.
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact_even, bits + step, bits).view(torch.float64).to(torch.float32)


def linear(x: torch.Tensor, q_w: torch.Tensor, s_w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The whole contract for one linear layer.

    Args:
        x: (M, K) bfloat16, float16 or float32.
        q_w: (N, K) int8.
        s_w: (N,) or (N, 1) float32, powers of two.
        bias: (N,) or None.

    Returns:
        (M, N) in the dtype of x.
    """
    q_x, s_x = quantize_per_token(x)
    return epilogue(accumulate(q_x, q_w), s_x, s_w, x.dtype, bias=bias)


def exponent_bounds(k: int) -> tuple[int, int]:
    """Smallest and largest weight-scale exponent e for which every order gives the same bits, and finite ones.

    With s_x in [2^-64, 2^64], s_w = 2^e and 1 <= |acc| <= K * 127 * 128 < 2^b, multiplying by s_w is exact as long
    as no product of the epilogue is subnormal (below 2^-126) or rounds to 2^128. Then s_x * (2^e * acc),
    2^e * (s_x * acc) and (s_x * 2^e) * acc are all 2^e times the one rounding of s_x * acc.

    Args:
        k: the reduction length K of the layer.

    Raises:
        ValueError: K above `MAX_K`.
    """
    check_k(k)
    bits = (max(k, 1) * Q_MAX * 128).bit_length()
    # Largest product: 2^64 * 2^e * |acc| < 2^(64 + e + bits), to stay at or below 2^127, clear of rounding to infinity.
    return -126 + 64, 127 - 64 - bits
