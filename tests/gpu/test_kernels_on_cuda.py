"""Every kernel that runs on a GPU against the contract on a CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from p2q import contract
from p2q.kernels import KERNELS, Kernel
from p2q.kernels.probe import probe

SIZES = [1, 15, 16, 17, 576, 3420]
ON_CUDA = {name: kernel for name, kernel in KERNELS.items() if "cuda" in kernel.devices}


@pytest.fixture(params=ON_CUDA.values(), ids=ON_CUDA.keys())
def kernel(request: pytest.FixtureRequest) -> Kernel:
    found: Kernel = request.param
    obstacle = found.obstacle(torch.device("cuda"))
    if obstacle is not None:
        pytest.skip(obstacle)
    return found


def operands(m: int, k: int, n: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(m * 1_000_003 + k * 1_009 + n)
    q_x = torch.randint(-127, 128, (m, k), generator=generator).to(torch.int8)
    q_w = torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8)
    q_x[:1], q_w[:1] = 127, -128
    s_x = torch.rand(m, 1, generator=generator) / 50 + 1e-4
    s_w = torch.ldexp(torch.ones(n), torch.randint(-12, -3, (n,), generator=generator))
    return q_x, q_w, s_x, s_w


def differing(got: torch.Tensor, expected: torch.Tensor) -> int:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    return int((got.cpu().contiguous().view(torch.int16) != expected.view(torch.int16)).sum())


def multiply(kernel: Kernel, operands: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
    q_x, q_w, s_x, s_w = (tensor.cuda() for tensor in operands)
    return kernel.apply(kernel.prepare(q_w, s_w, dtype), q_x, s_x, None, dtype)


def test_kernel_on_cuda_is_exact(kernel: Kernel) -> None:
    found = probe(kernel.name, "cuda")
    assert found.exact, found.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", SIZES)
def test_kernel_on_cuda_at_every_shape_equals_the_contract_on_a_cpu(kernel: Kernel, k: int, dtype: torch.dtype) -> None:
    for n in SIZES:
        q_x, q_w, s_x, s_w = operands(33, k, n)
        s_w = s_w / 64  # within float16
        expected = contract.epilogue(contract.accumulate(q_x, q_w), s_x, s_w, dtype)
        for m in (1, 16, 17, 33):
            got = multiply(kernel, (q_x[:m], q_w, s_x[:m], s_w), dtype)
            assert differing(got, expected[:m]) == 0, f"M = {m}, N = {n}"


@pytest.mark.parametrize("m", [1, 7, 64, 1000])
@pytest.mark.parametrize(
    ("n", "k"), [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)], ids=["qkv", "o", "gate_up", "down"]
)
def test_kernel_on_shapes_of_qwen3_8b_equals_the_reference(kernel: Kernel, n: int, k: int, m: int) -> None:
    q_x, q_w, s_x, s_w = (tensor.cuda() for tensor in operands(m, k, n))
    expected = contract.epilogue(contract.accumulate(q_x, q_w), s_x, s_w, torch.bfloat16)
    got = kernel.apply(kernel.prepare(q_w, s_w, torch.bfloat16), q_x, s_x, None, torch.bfloat16)
    assert differing(got, expected.cpu()) == 0


def test_kernel_without_rows_gives_none(kernel: Kernel) -> None:
    q_x, q_w, s_x, s_w = operands(1, 40, 24)
    assert multiply(kernel, (q_x[:0], q_w, s_x[:0], s_w), torch.bfloat16).shape == (0, 24)
