"""The exactness probe: is a kernel, on this machine, bit for bit the contract? Measured, never assumed.

The operands are chosen so that a lost bit shows in a bfloat16 output: products of full scale that cancel to small
integers. A kernel that saturates, wraps or rounds a partial sum cannot get those right.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from p2q import contract
from p2q.errors import KernelError
from p2q.kernels import get_kernel
from p2q.kernels.base import Kernel

_SHAPES = ((1, 64, 32), (17, 576, 48), (33, 1536, 64))
"""(M, K, N): one row and several, K past one exact float32 block, N and K multiples of 16 as CUTLASS wants them."""

_LONG = (2, 65_552, 16)
"""Partial sums pass the integers that float32 holds, even where 16 vector lanes share them."""


@dataclass(frozen=True)
class Probe:
    """`exact`: every output agreed bit for bit. `reason`: what differed, or why the kernel cannot run."""

    kernel: str
    runs: bool
    exact: bool
    reason: str


@functools.cache
def probe(name: str, device: str = "cpu") -> Probe:
    """Compare a kernel with the contract on this machine (milliseconds; remembered for the life of the process)."""
    kernel = get_kernel(name)
    obstacle = kernel.obstacle(torch.device(device))
    if obstacle is not None:
        return Probe(name, False, False, obstacle)
    cases = [case for shape in _SHAPES for case in _operands(*shape)] + _operands(*_LONG)[:1]
    for label, q_x, q_w in cases:
        difference = _compare(kernel, q_x.to(device), q_w.to(device))
        if difference is not None:
            (m, k), n = q_x.shape, q_w.shape[0]
            return Probe(name, True, False, f"{label}, M = {m}, K = {k}, N = {n}: {difference}")
    return Probe(name, True, True, f"bit for bit the contract on {len(cases)} products")


def require_exact(name: str, device: str = "cpu") -> None:
    """Refuse a kernel that cannot run here or is not exact here.

    Raises:
        KernelError: with the kernel's name and the reason.
    """
    result = probe(name, device)
    if not result.exact:
        problem = "is not exact on this machine" if result.runs else "cannot run here"
        raise KernelError(
            f"kernel {name} {problem}: {result.reason}", hint="`p2q doctor` lists the kernels that are exact here"
        )


def _operands(m: int, k: int, n: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(m * 1_000_003 + k * 1_009 + n)
    half = k // 2
    # Large products of one sign in the first half of K; the same, in another order and negated, in the second; one last
    # product remains. Partial sums leave int16 and, in `_LONG`, the integers of float32.
    q_x = torch.full((m, k), 127, dtype=torch.int8)
    q_x[:, half:] = -127
    q_w = torch.randint(96, 128, (n, k), generator=generator).to(torch.int8)
    q_w[::2] = ~q_w[::2]  # -97 to -128
    q_w[:, half - 1] = 0
    q_w[:, half:-1] = q_w[:, torch.randperm(half - 1, generator=generator)]
    q_x[:, -1] = torch.arange(1, m + 1)
    # Random signs against one weight row and its negative: each output is the sum over half of K minus itself.
    mirrored_x = torch.randint(-127, 128, (m, half), generator=generator).to(torch.int8)
    mirrored_w = torch.randint(-128, 128, (n, half), generator=generator).to(torch.int8)
    offset = torch.zeros(n, half, dtype=torch.int8)
    offset[:, 0] = 1
    negative_w = (-mirrored_w.to(torch.int16) + offset).clamp(-128, 127).to(torch.int8)
    random_x, random_w = (
        torch.randint(-127, 128, shape, generator=generator).to(torch.int8) for shape in ((m, k), (n, k))
    )
    return [
        ("large products that cancel", q_x, q_w),
        (
            "mirrored products that cancel",
            torch.cat([mirrored_x, mirrored_x], 1),
            torch.cat([mirrored_w, negative_w], 1),
        ),
        ("random operands", random_x, random_w),
    ]


def _compare(kernel: Kernel, q_x: torch.Tensor, q_w: torch.Tensor) -> str | None:
    m, n = q_x.shape[0], q_w.shape[0]
    # In so many words: vLLM loads models with another default dtype.
    s_w = torch.ldexp(torch.ones(n, dtype=torch.float32), torch.arange(n).remainder(9) - 12).to(q_x.device)
    # Token scales with full significands: the epilogue's one rounding is part of what is compared.
    s_x = (torch.arange(1, m + 1, dtype=torch.float32).reshape(-1, 1) / 127).to(q_x.device)
    expected = contract.epilogue(contract.accumulate(q_x, q_w), s_x, s_w, torch.bfloat16)
    prepared = kernel.prepare(q_w, s_w, torch.bfloat16)
    got = kernel.apply(prepared, q_x, s_x, None, torch.bfloat16)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"expected {tuple(expected.shape)} {expected.dtype}, got {tuple(got.shape)} {got.dtype}"
    wrong = got.view(torch.int16) != expected.view(torch.int16)
    if not wrong.any():
        return None
    row, column = (int(i) for i in wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} of {wrong.numel()} outputs differ; at row {row}, column {column} "
        f"expected {expected[row, column].item():.6g}, got {got[row, column].item():.6g}"
    )
