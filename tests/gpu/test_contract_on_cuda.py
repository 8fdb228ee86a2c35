"""The contract gives the same bits on a GPU as on a CPU."""

import pytest
import torch

from p2q import contract

SHAPES = [(1, 16, 16), (17, 576, 48), (33, 1537, 65), (256, 4096, 512)]


def activations(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(m * 7 + k)
    x = torch.randn(m, k, generator=generator) * torch.logspace(-30, 30, m).reshape(-1, 1)
    x[0] = 0
    if m > 2:
        x[1, 0] = float("nan")
        x[2] = torch.finfo(dtype).smallest_normal / 4
    return x.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_quantize_per_token_on_cuda_equals_cpu(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    x = activations(m, k, dtype)
    for on_cpu, on_gpu in zip(contract.quantize_per_token(x), contract.quantize_per_token(x.cuda()), strict=True):
        finite = ~torch.isnan(on_cpu.float())
        assert torch.equal(finite, ~torch.isnan(on_gpu.cpu().float()))
        assert same_bits(on_cpu[finite], on_gpu.cpu()[finite])


@pytest.mark.parametrize("order", contract.ORDERS)
@pytest.mark.parametrize("bias_mode", ["after-rounding", "fused"])
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_product_and_epilogue_on_cuda_equal_cpu(
    m: int, k: int, n: int, order: contract.Order, bias_mode: contract.BiasMode
) -> None:
    generator = torch.Generator().manual_seed(k)
    q_x, q_w = (torch.randint(-127, 128, shape, generator=generator).to(torch.int8) for shape in ((m, k), (n, k)))
    s_x, s_w = torch.rand(m, 1, generator=generator), torch.rand(n, generator=generator)
    bias = torch.randn(n, generator=generator).to(torch.bfloat16)
    on_cpu = contract.accumulate(q_x, q_w)
    on_gpu = contract.accumulate(q_x.cuda(), q_w.cuda())
    assert torch.equal(on_cpu, on_gpu.cpu())
    options = {"order": order, "bias_mode": bias_mode}
    expected = contract.epilogue(on_cpu, s_x, s_w, torch.bfloat16, bias=bias, **options)
    got = contract.epilogue(on_gpu, s_x.cuda(), s_w.cuda(), torch.bfloat16, bias=bias.cuda(), **options)
    assert same_bits(expected, got)
