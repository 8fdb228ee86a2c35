"""The exact int8 product on a CPU, over weights that stay int8.

A weight is packed once: 16 rows of it lie interleaved by pairs of K, so that one load feeds 16 sums. The loops are in
`int8_cpu_loops`. Threads are those of torch's own OpenMP runtime: a second runtime's would contend with them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from p2q import contract
from p2q.kernels.base import pad_to

WORK_A_THREAD = 1 << 17
"""Products that keep a thread busy for longer than it takes to wake it."""

ACTIVATION_BYTES = 1 << 18
"""int16 activations that stay in a core's cache while the weights pass by."""

TASKS_A_THREAD = 4
"""Into how many parts a thread's share is cut, so that one that is held up leaves work to the others."""


@functools.cache
def _loops() -> Any:
    """The compiled loops, or None without numba."""
    try:
        from p2q.kernels import int8_cpu_loops
    except ImportError:
        return None
    return int8_cpu_loops


@functools.cache
def _parallel() -> Callable[..., None] | None:
    """GOMP_parallel of the OpenMP runtime that torch runs on, or None where it has another interface."""
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def pack(q_w: torch.Tensor) -> torch.Tensor:
    """Bring a weight into the form that the products here read.

    Args:
        q_w: (N, K) int8.

    Returns:
        (P, K' / 2, 16, 2) int8: P panels of 16 rows, K' = K up to a multiple of 8, both padded with zeros. Without
        numba, or where a sum might leave int32 (K above `contract.SAFE_K`), the weight itself: the products here then
        leave the work to `contract.accumulate`.

    Raises:
        ValueError: K above `contract.MAX_K`.
    """
    k = q_w.shape[1]
    contract.check_k(k)
    loops = _loops()
    if loops is None or k > contract.SAFE_K:
        return q_w.contiguous()
    padded = pad_to(pad_to(q_w, 0, loops.COLUMNS), 1, 2 * loops.PAIRS)
    n, k = padded.shape
    return padded.reshape(n // loops.COLUMNS, loops.COLUMNS, k // 2, 2).transpose(1, 2).contiguous()


def accumulate(q_x: torch.Tensor, packed: torch.Tensor, n: int) -> torch.Tensor:
    """`contract.accumulate` with a packed weight.

    Args:
        q_x: (M, K) int8.
        packed: (N, K) by `pack`.
        n: N.

    Returns:
        (M, N) int32, contiguous.

    Raises:
        OverflowError: as `contract.accumulate`.
    """
    if packed.dim() == 2:
        return contract.accumulate(q_x, packed)
    return _product(q_x, packed, None, n, torch.int32)


def scaled(q_x: torch.Tensor, packed: torch.Tensor, s_x: torch.Tensor, s_w: torch.Tensor, n: int) -> torch.Tensor:
    """s_x * (s_w * float32(acc)), the contract's epilogue before its rounding to the output's dtype.

    Args:
        q_x: (M, K) int8.
        packed: (N, K) by `pack`.
        s_x: (M, 1) float32.
        s_w: (N,) float32, contiguous.
        n: N.

    Returns:
        (M, N) float32, contiguous.

    Raises:
        OverflowError: as `contract.accumulate`.
    """
    if packed.dim() == 2:
        return contract.epilogue(contract.accumulate(q_x, packed), s_x, s_w, torch.float32)
    return _product(q_x, packed, (s_x.contiguous(), pad_to(s_w, 0, packed.shape[2])), n, torch.float32)


def _product(
    q_x: torch.Tensor,
    packed: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    n: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    loops = _loops()
    panels, pairs, columns, _ = packed.shape
    m, padded_n = q_x.shape[0], panels * columns
    out = torch.empty(m, padded_n, dtype=dtype)
    x = pad_to(q_x.to(torch.int16), 1, 2 * loops.PAIRS)
    work = m * padded_n * pairs * 2
    threads = min(torch.get_num_threads(), max(1, work // WORK_A_THREAD))
    rows_a_task = max(4, ACTIVATION_BYTES // max(1, pairs * 4) // 4 * 4)
    panels_a_task = max(1, -(-panels // (threads * TASKS_A_THREAD)))
    next_task = ctypes.c_int64(0)
    s_x, s_w = (0, 0) if scales is None else (scale.data_ptr() for scale in scales)
    addresses = (x.data_ptr(), packed.data_ptr(), s_x, s_w, out.data_ptr())
    sizes = (m, padded_n, pairs, rows_a_task, panels_a_task, ctypes.addressof(next_task))
    fields = (ctypes.c_int64 * len(loops.FIELDS))(*addresses, *sizes)
    parallel = _parallel() if threads > 1 else None
    if parallel is None:
        loops.worker.ctypes(ctypes.cast(fields, ctypes.POINTER(ctypes.c_int64)))
    else:
        parallel(loops.worker.address, ctypes.addressof(fields), threads, 0)
    return out if n == padded_n else out[:, :n].contiguous()
