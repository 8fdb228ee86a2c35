"""`cutlass-order` and `triton-order` are what vLLM's CUTLASS and Triton int8 kernels do, bit for bit, bias included."""

import pytest
import torch

from p2q.kernels import get_kernel

pytest.importorskip("vllm", reason="needs vLLM with CUDA kernels")

SHAPES = [(1, 576, 576), (17, 576, 1536), (128, 1536, 576), (1024, 4096, 1024)]


def operands(m: int, k: int, n: int, powers: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(m + k + n)
    q_x, q_w = (torch.randint(-127, 128, shape, generator=generator).to(torch.int8) for shape in ((m, k), (n, k)))
    s_x = torch.rand(m, 1, generator=generator) / 50
    s_w = torch.rand(n, generator=generator) / 100
    if powers:
        s_w = torch.ldexp(torch.ones(n), torch.randint(-10, -4, (n,), generator=generator))
    bias = torch.randn(n, generator=generator).to(torch.bfloat16)
    return tuple(t.cuda() for t in (q_x, q_w, s_x, s_w, bias))


def cutlass(q_x, q_w, s_x, s_w, bias):
    from vllm import _custom_ops

    return _custom_ops.cutlass_scaled_mm(q_x, q_w.t(), s_x, s_w.reshape(-1, 1), torch.bfloat16, bias)


def triton(q_x, q_w, s_x, s_w, bias):
    from vllm.model_executor.layers.quantization.compressed_tensors.triton_scaled_mm import triton_scaled_mm

    return triton_scaled_mm(q_x, q_w.t(), s_x, s_w.reshape(-1, 1), torch.bfloat16, bias)


REAL = {"cutlass-order": cutlass, "triton-order": triton}


@pytest.mark.parametrize("powers", [False, True], ids=["own-scales", "power-of-two"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("name", REAL)
def test_reference_kernel_equals_the_real_one(name: str, m: int, k: int, n: int, with_bias: bool, powers: bool) -> None:
    q_x, q_w, s_x, s_w, bias = operands(m, k, n, powers)
    chosen = bias if with_bias else None
    kernel = get_kernel(name)
    expected = REAL[name](q_x, q_w, s_x, s_w, chosen)
    got = kernel.apply(kernel.prepare(q_w, s_w, torch.bfloat16), q_x, s_x, chosen, torch.bfloat16)
    different = int((got.view(torch.int16) != expected.view(torch.int16)).sum())
    assert different == 0, f"{different} of {got.numel()} outputs differ"


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_real_kernels_agree_under_powers_of_two_without_bias(m: int, k: int, n: int) -> None:
    q_x, q_w, s_x, s_w, _ = operands(m, k, n, True)
    assert torch.equal(cutlass(q_x, q_w, s_x, s_w, None), triton(q_x, q_w, s_x, s_w, None))
