"""p2q's int8 products in Triton with the contract's epilogue.

    y = round(s_x * (s_w * float(sum_k q_x * q_w)))

Any tile shape gives the same bits: the sum is exact in int32, and the epilogue rounds once under power-of-two scales.
The tiles below are a first choice, not tuned.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_N, BLOCK_K = 64, 128
MIN_BLOCK_M, MAX_BLOCK_M = 16, 128


@triton.jit
def _int8_gemm(  # type: ignore[no-untyped-def]  # a program of Triton's language
    q_x,
    q_w,
    s_x,
    s_w,
    y,
    tile_rows,
    tile_groups,
    M,
    N,
    K,
    GROUPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    if GROUPED:  # a tile's rows come from anywhere, and its weight is that of their group
        rows = tl.load(tile_rows + rows)
        group = tl.load(tile_groups + tl.program_id(0)).to(tl.int64)
        q_w += group * N * K
        s_w += group * N
    # int64: M * K of a long prompt passes int32.
    rows = rows.to(tl.int64)
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
        block_m = _block_m(m)
        grid = (triton.cdiv(m, block_m), triton.cdiv(n, BLOCK_N))
        _int8_gemm[grid](q_x, q_w, s_x, s_w, y, q_x, q_x, m, n, k, False, block_m, BLOCK_N, BLOCK_K)
    return y


def int8_grouped_gemm(
    q_x: torch.Tensor,
    q_w: torch.Tensor,
    s_x: torch.Tensor,
    s_w: torch.Tensor,
    group: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply each row by the weight of its group, and scale.

    Args:
        q_x: (M, K) int8, contiguous.
        q_w: (G, N, K) int8, contiguous.
        s_x: (M, 1) float32, contiguous.
        s_w: (G, N) float32, contiguous.
        group: (M,) int64 in [0, G).
        out_dtype: bfloat16, float16 or float32.

    Returns:
        (M, N) in `out_dtype`.
    """
    (m, k), (groups, n, _) = q_x.shape, q_w.shape
    y = torch.empty((m, n), dtype=out_dtype, device=q_x.device)
    if y.numel():
        block_m = _block_m(m // groups)
        tile_rows, tile_groups = _tiles(group, groups, block_m)
        grid = (tile_groups.numel(), triton.cdiv(n, BLOCK_N))
        _int8_gemm[grid](q_x, q_w, s_x, s_w, y, tile_rows, tile_groups, m, n, k, True, block_m, BLOCK_N, BLOCK_K)
    return y


def _block_m(rows: int) -> int:
    return min(MAX_BLOCK_M, max(MIN_BLOCK_M, int(triton.next_power_of_2(rows))))


def _tiles(group: torch.Tensor, groups: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows gathered by group into tiles of `block_m`: (T * block_m,) row numbers, M where a tile is not full, and (T,)
    groups. Shapes depend on M alone and nothing waits for the device, so that CUDA graphs can capture it."""
    m, device = group.numel(), group.device
    counts = torch.zeros(groups, dtype=torch.int64, device=device).scatter_add_(0, group, torch.ones_like(group))
    tile_ends = ((counts + block_m - 1) // block_m).cumsum(0)
    tiles = m // block_m + min(groups, m)  # at most one tile of a group is not full
    order = torch.argsort(group, stable=True)
    ordered = group[order]
    rank = torch.arange(m, device=device) - (counts.cumsum(0) - counts)[ordered]
    first = tile_ends - (counts + block_m - 1) // block_m
    rows = torch.full((tiles * block_m,), m, dtype=torch.int64, device=device)
    rows[first[ordered] * block_m + rank] = order
    number = torch.arange(tiles, device=device)
    return rows, torch.searchsorted(tile_ends, number, right=True).clamp(max=groups - 1)
