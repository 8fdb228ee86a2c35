"""p2q's int8 product in Triton with the contract's epilogue.

    y = round(s_x * (s_w * float(sum_k q_x * q_w)))

Any tile shape gives the same bits: the sum is exact in int32, and the epilogue rounds once under power-of-two scales.
The tiles below are a first choice, not tuned.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_N, BLOCK_K = 64, 128


@triton.jit
def _int8_gemm(  # type: ignore[no-untyped-def]  # a program of Triton's language
    q_x,
    q_w,
    s_x,
    s_w,
    y,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # int64: M * K of a long prompt passes int32.
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(0, K, BLOCK_K):
        depth = start + tl.arange(0, BLOCK_K)
        inside = depth < K
        x = tl.load(q_x + rows[:, None] * K + depth[None, :], mask=(rows < M)[:, None] & inside[None, :], other=0)
        w = tl.load(q_w + columns[None, :] * K + depth[:, None], mask=(columns < N)[None, :] & inside[:, None], other=0)
        acc = tl.dot(x, w, acc, out_dtype=tl.int32)
    weight_scale = tl.load(s_w + columns, mask=columns < N, other=0.0)
    token_scale = tl.load(s_x + rows, mask=rows < M, other=0.0)
    value = token_scale[:, None] * (weight_scale[None, :] * acc.to(tl.float32))
    tl.store(
        y + rows[:, None] * N + columns[None, :],
        value.to(y.dtype.element_ty),
        mask=(rows < M)[:, None] & (columns < N)[None, :],
    )


def int8_gemm(
    q_x: torch.Tensor, q_w: torch.Tensor, s_x: torch.Tensor, s_w: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Multiply and scale.

    Args:
        q_x: (M, K) int8, contiguous.
        q_w: (N, K) int8, contiguous.
        s_x: (M, 1) float32, contiguous.
        s_w: (N,) float32, contiguous.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        (M, N) in `out_dtype`.
    """
    (m, k), n = q_x.shape, q_w.shape[0]
    y = torch.empty((m, n), dtype=out_dtype, device=q_x.device)
    if y.numel():
        block_m = min(128, max(16, triton.next_power_of_2(m)))
        grid = (triton.cdiv(m, block_m), triton.cdiv(n, BLOCK_N))
        _int8_gemm[grid](q_x, q_w, s_x, s_w, y, m, n, k, BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K)
    return y
