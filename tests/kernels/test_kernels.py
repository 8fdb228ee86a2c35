"""Every kernel of the registry against the formula that it states, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch

from p2q import contract, kernels
from p2q.errors import KernelError
from p2q.kernels import KERNELS, Kernel, Prepared
from p2q.kernels.probe import probe

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [1, 15, 16, 17, 576, 3420]

Epilogue = Callable[..., torch.Tensor]


def fused_bias(acc: torch.Tensor, s_x: torch.Tensor, s_w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """fma(s_x, s_w * acc, bias), in float32."""
    value = s_w * acc.to(torch.float32)
    return s_x * value if bias is None else contract.fused_multiply_add(s_x, value, bias.to(torch.float32))


FORMULAS: dict[str, Epilogue] = {
    "s_x * (s_w * acc), rounded; then + bias, rounded": lambda acc, s_x, s_w, bias, dtype: contract.add_bias(
        (s_x * (s_w * acc.to(torch.float32))).to(dtype), bias
    ),
    "s_w * (s_x * acc), rounded; then + bias, rounded": lambda acc, s_x, s_w, bias, dtype: contract.add_bias(
        (s_w * (s_x * acc.to(torch.float32))).to(dtype), bias
    ),
    "fma(s_x, s_w * acc, bias), rounded once": lambda acc, s_x, s_w, bias, dtype: fused_bias(acc, s_x, s_w, bias).to(
        dtype
    ),
}
"""What each formula means."""


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return got.dtype == expected.dtype and torch.equal(
        got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


def operands(m: int, k: int, n: int) -> tuple[torch.Tensor, ...]:
    """q_x, s_x, q_w, s_w and a bias; full scale in the first and last rows."""
    generator = torch.Generator().manual_seed(m * 1_000_003 + k * 1_009 + n)
    q_x = torch.randint(-127, 128, (m, k), generator=generator).to(torch.int8)
    q_w = torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8)
    q_x[:1], q_w[:1], q_w[-1:] = 127, 127, -128
    s_x = torch.rand(m, 1, generator=generator) + 0.01
    s_w = torch.ldexp(torch.ones(n), torch.randint(-12, -3, (n,), generator=generator))
    # As large as the products, so that its place in the order of operations shows.
    return q_x, s_x, q_w, s_w, torch.randn(n, generator=generator) * k


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


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("k", SIZES)
def test_kernel_at_every_shape_equals_its_formula(kernel: Kernel, k: int, with_bias: bool) -> None:
    formula = FORMULAS[kernel.formula]
    for n in SIZES:
        q_x, s_x, q_w, s_w, bias = operands(33, k, n)
        acc = contract.accumulate(q_x, q_w)
        addend = bias.to(torch.bfloat16) if with_bias else None
        expected = formula(acc, s_x, s_w, addend, torch.bfloat16)
        prepared = kernel.prepare(q_w, s_w, torch.bfloat16)
        for m in (1, 16, 17, 33):
            got = kernel.apply(prepared, q_x[:m], s_x[:m], addend, torch.bfloat16)
            assert same_bits(got, expected[:m]), f"M = {m}, N = {n}"
        if not with_bias:
            assert same_bits(expected, contract.epilogue(acc, s_x, s_w, torch.bfloat16))


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_in_every_output_dtype_equals_its_formula(kernel: Kernel, dtype: torch.dtype, with_bias: bool) -> None:
    q_x, s_x, q_w, s_w, bias = operands(17, 300, 65)
    s_x, s_w, addend = s_x / 32, s_w / 32, (bias / 64).to(dtype) if with_bias else None  # within float16
    got = kernel.apply(kernel.prepare(q_w, s_w, dtype), q_x, s_x, addend, dtype)
    assert torch.isfinite(got).all()
    assert same_bits(got, FORMULAS[kernel.formula](contract.accumulate(q_x, q_w), s_x, s_w, addend, dtype))


def test_kernel_with_other_scales_equals_its_formula(kernel: Kernel) -> None:
    q_x, s_x, q_w, s_w, bias = operands(33, 576, 64)
    s_w = s_w * torch.linspace(1, 2, 64)
    got = kernel.apply(kernel.prepare(q_w, s_w, torch.float32), q_x, s_x, bias, torch.float32)
    assert same_bits(got, FORMULAS[kernel.formula](contract.accumulate(q_x, q_w), s_x, s_w, bias, torch.float32))


def test_formulas_are_told_apart_by_a_bias() -> None:
    q_x, s_x, q_w, s_w, bias = operands(33, 576, 64)
    acc = contract.accumulate(q_x, q_w)
    after, token_first, fused = (
        formula(acc, s_x, s_w, bias.to(torch.bfloat16), torch.bfloat16) for formula in FORMULAS.values()
    )
    assert same_bits(after, token_first)
    assert not same_bits(after, fused)


@pytest.mark.parametrize(("m", "n"), [(0, 16), (0, 1), (3, 1)])
def test_kernel_few_rows_or_columns_keep_shape_and_dtype(kernel: Kernel, m: int, n: int) -> None:
    q_x, s_x, q_w, s_w, bias = operands(m, 40, n)
    got = kernel.apply(kernel.prepare(q_w, s_w, torch.bfloat16), q_x, s_x, bias.to(torch.bfloat16), torch.bfloat16)
    assert got.shape == (m, n)
    assert got.dtype == torch.bfloat16


def test_kernel_accumulators_past_float32_equal_the_contract(kernel: Kernel) -> None:
    k = 8192  # 8192 * 127 * 128 is near 2^27
    q_x, q_w = torch.full((2, k), 127, dtype=torch.int8), torch.full((16, k), -128, dtype=torch.int8)
    q_x[1, ::2], q_w[:, -1] = 126, 1
    s_x, s_w = torch.ones(2, 1), torch.ones(16)
    got = kernel.apply(kernel.prepare(q_w, s_w, torch.float32), q_x, s_x, None, torch.float32)
    assert same_bits(got, contract.epilogue(contract.accumulate(q_x, q_w), s_x, s_w, torch.float32))


def test_kernel_bits_do_not_depend_on_threads_batch_or_tiling(
    kernel: Kernel, threads: Callable[[int], AbstractContextManager[None]]
) -> None:
    q_x, s_x, q_w, s_w, bias = operands(33, 1100, 130)
    bias = bias.to(torch.bfloat16)
    prepared = kernel.prepare(q_w, s_w, torch.bfloat16)
    with threads(1):
        expected = kernel.apply(prepared, q_x, s_x, bias, torch.bfloat16)
    with threads(2):
        for m in (1, 2, 3, 33):  # fewer rows than threads, as many, more
            assert same_bits(kernel.apply(prepared, q_x[:m], s_x[:m], bias, torch.bfloat16), expected[:m])
    rows = [kernel.apply(prepared, q, s, bias, torch.bfloat16) for q, s in zip(q_x.split(5), s_x.split(5), strict=True)]
    assert same_bits(torch.cat(rows), expected)
    columns = []
    for tile in (slice(0, 1), slice(1, 48), slice(48, 130)):
        part = kernel.prepare(q_w[tile], s_w[tile], torch.bfloat16)
        columns.append(kernel.apply(part, q_x, s_x, bias[tile], torch.bfloat16))
    assert same_bits(torch.cat(columns, dim=1), expected)


def test_kernel_prepared_weight_outlives_what_it_was_made_from(kernel: Kernel) -> None:
    q_x, s_x, q_w, s_w, _ = operands(17, 576, 64)
    expected = contract.epilogue(contract.accumulate(q_x, q_w), s_x, s_w, torch.bfloat16)
    # Temporaries: freed, and their memory taken by others, before the weight is used.
    prepared = [kernel.prepare(q_w.clone(), s_w.clone(), torch.bfloat16) for _ in range(8)]
    filler = [torch.full((64,), float("nan")) for _ in range(64)]
    for one in prepared:
        assert same_bits(kernel.apply(one, q_x, s_x, None, torch.bfloat16), expected)
    assert all(torch.isnan(part).all() for part in filler)


def test_kernel_name_formula_and_devices_are_stated(kernel: Kernel) -> None:
    assert KERNELS[kernel.name] is kernel is kernels.get_kernel(kernel.name)
    assert kernel.formula in FORMULAS
    assert kernel.devices


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_kernel_on_another_device_has_an_obstacle(kernel: Kernel) -> None:
    reason = kernel.obstacle(torch.device("meta"))
    assert reason is not None
    assert reason.endswith("not on meta")


def test_get_kernel_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KernelError, match=r"unknown kernel; expected one of p2q, .*, got 'marlin'"):
        kernels.get_kernel("marlin")


def test_default_kernel_is_the_contract() -> None:
    assert kernels.DEFAULT_KERNEL in KERNELS
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    _, _, q_w, s_w, bias = operands(1, 40, 9)
    kernel = kernels.get_kernel(kernels.DEFAULT_KERNEL)
    q_x, s_x = contract.quantize_per_token(x)
    prepared: Prepared = kernel.prepare(q_w, s_w, x.dtype)
    assert prepared.n == 9
    assert same_bits(
        kernel.apply(prepared, q_x, s_x, bias.to(x.dtype), x.dtype), contract.linear(x, q_w, s_w, bias.to(x.dtype))
    )


@pytest.mark.parametrize("name", ["p2q", "cutlass-order", "triton-order"])
def test_reference_kernel_refuses_k_past_the_limit_at_load(name: str) -> None:
    q_w = torch.zeros(1, contract.MAX_K + 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="132105"):
        kernels.get_kernel(name).prepare(q_w, torch.ones(1), torch.bfloat16)
