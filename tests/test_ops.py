"""The custom op, eager and compiled, against the contract."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch

from p2q import contract
from p2q.kernels import KERNELS, Kernel, get_kernel
from p2q.kernels.probe import probe
from p2q.ops import int8_linear

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return got.dtype == expected.dtype and torch.equal(
        got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


def layer(*leading: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """x (..., 40), q_w (24, 40), s_w (24,) and a bias as large as the products."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(*leading, 40, generator=generator).to(dtype)
    q_w = torch.randint(-128, 128, (24, 40), generator=generator).to(torch.int8)
    s_w = torch.ldexp(torch.ones(24), torch.randint(-9, -3, (24,), generator=generator))
    return x, q_w, s_w, torch.randn(24, generator=generator).to(dtype)


@pytest.fixture(autouse=True)
def one_thread(threads: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """Small tensors: two OpenMP runtimes in a process (torch's, vLLM's) lose more time waiting than they gain."""
    with threads(1):
        yield


@pytest.fixture(params=KERNELS.values(), ids=KERNELS.keys())
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """Each kernel that is exact on this machine's CPU."""
    found: Kernel = request.param
    result = probe(found.name)
    if not result.exact:
        pytest.skip(f"{found.name}: {result.reason}")
    return found


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_op_with_the_contract_bias_equals_the_contract_whatever_the_kernel(
    kernel: Kernel, dtype: torch.dtype, with_bias: bool
) -> None:
    x, q_w, s_w, bias = layer(33, dtype=dtype)
    addend = bias if with_bias else None
    got = int8_linear(x, kernel.prepare(q_w, s_w, dtype), addend, kernel.name, contract_bias=True)
    assert same_bits(got, contract.linear(x, q_w, s_w, addend))


def test_op_without_the_contract_bias_leaves_it_to_the_kernel(kernel: Kernel) -> None:
    x, q_w, s_w, bias = layer(33)
    prepared = kernel.prepare(q_w, s_w, x.dtype)
    got = int8_linear(x, prepared, bias, kernel.name, contract_bias=False)
    assert same_bits(got, kernel.apply(prepared, *contract.quantize_per_token(x), bias, x.dtype))


def test_op_bias_flag_changes_bits_where_the_kernel_fuses_the_bias() -> None:
    x, q_w, s_w, bias = layer(33)
    prepared = get_kernel("cutlass-order").prepare(q_w, s_w, x.dtype)
    by_contract, by_kernel = (
        int8_linear(x, prepared, bias, "cutlass-order", contract_bias=flag) for flag in (True, False)
    )
    assert not same_bits(by_contract, by_kernel)


@pytest.mark.parametrize("leading", [(), (1,), (0,), (2, 3), (2, 0, 3), (2, 1, 5)], ids=str)
def test_op_keeps_leading_dimensions(kernel: Kernel, leading: tuple[int, ...]) -> None:
    x, q_w, s_w, bias = layer(*leading)
    got = int8_linear(x, kernel.prepare(q_w, s_w, x.dtype), bias, kernel.name, contract_bias=True)
    assert got.shape == (*leading, 24)
    assert same_bits(got, contract.linear(x.reshape(-1, 40), q_w, s_w, bias).reshape(*leading, 24))


@pytest.mark.parametrize("stride", ["transposed", "every other row", "every other column", "expanded"])
def test_op_of_a_strided_input_equals_that_of_a_contiguous_one(kernel: Kernel, stride: str) -> None:
    _, q_w, s_w, bias = layer()
    generator = torch.Generator().manual_seed(3)
    x = {
        "transposed": torch.randn(40, 6, generator=generator).t(),
        "every other row": torch.randn(12, 40, generator=generator)[::2],
        "every other column": torch.randn(6, 80, generator=generator)[:, ::2],
        "expanded": torch.randn(1, 40, generator=generator).expand(6, 40),
    }[stride].to(torch.bfloat16)
    prepared = kernel.prepare(q_w, s_w, x.dtype)
    got = int8_linear(x, prepared, bias, kernel.name, contract_bias=True)
    assert same_bits(got, contract.linear(x.contiguous(), q_w, s_w, bias))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.usefixtures("fresh_compiler")
def test_op_compiled_in_one_graph_gives_the_bits_of_eager(backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("inductor needs a C++ compiler")
    x, q_w, s_w, bias = layer(2, 17)
    prepared = get_kernel("p2q").prepare(q_w, s_w, x.dtype)

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(int8_linear(x * 0.5, prepared, bias, "p2q", contract_bias=True))

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    assert same_bits(compiled(x), block(x))
    expected = torch.relu(contract.linear((x * 0.5).reshape(-1, 40), q_w, s_w, bias)).reshape(2, 17, 24)
    assert same_bits(compiled(x), expected)


@pytest.mark.parametrize("contract_bias", [False, True])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("leading", [(5,), (2, 3), (0,)], ids=str)
def test_op_passes_the_checks_of_torch(leading: tuple[int, ...], with_bias: bool, contract_bias: bool) -> None:
    x, q_w, s_w, bias = layer(*leading)
    tensors = get_kernel("p2q").prepare(q_w, s_w, x.dtype).tensors
    arguments = (x, tensors, bias if with_bias else None, "p2q", 24, contract_bias)
    results = torch.library.opcheck(torch.ops.p2q.int8_linear.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_op_on_meta_tensors_gives_shape_and_dtype(dtype: torch.dtype) -> None:
    x, q_w, s_w, _ = layer(2, 3, dtype=dtype)
    prepared = get_kernel("p2q").prepare(q_w, s_w, dtype)
    meta = [tensor.to("meta") for tensor in prepared.tensors]
    y = torch.ops.p2q.int8_linear(x.to("meta"), meta, None, "p2q", 24, True)
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, 24), dtype, "meta")
