"""The CPU's int8 product against `contract.accumulate`, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from p2q import contract, machine
from p2q.kernels import get_kernel, int8_cpu

ROWS = [0, 1, 2, 3, 7, 16, 17, 33, 300]
SIZES = [1, 15, 16, 17, 31, 33, 576, 1025, 3420]

Threads = Callable[[int], AbstractContextManager[None]]

IN_A_PROCESS = """
import torch
from p2q import contract
from p2q.kernels import int8_cpu
torch.set_num_threads(2)
random = torch.Generator().manual_seed(3)
for _ in range(20):
    q_x, q_w = (torch.randint(-127, 128, (n, 1100), generator=random).to(torch.int8) for n in (9, 530))
    assert torch.equal(int8_cpu.accumulate(q_x, int8_cpu.pack(q_w), 530), contract.accumulate(q_x, q_w))
    torch.randn(300, 300) @ torch.randn(300, 300)

"""


def operands(m: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random, with full scale in the first two rows of each."""
    generator = torch.Generator().manual_seed(m * 1_000_003 + k * 1_009 + n)
    q_x = torch.randint(-127, 128, (m, k), generator=generator).to(torch.int8)
    q_w = torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8)
    q_x[:1], q_x[1:2], q_w[:1], q_w[1:2] = 127, -127, -128, 127
    return q_x, q_w


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return (
        got.dtype == expected.dtype
        and got.is_contiguous()
        and got.shape == expected.shape
        and torch.equal(got.view(torch.int32), expected.view(torch.int32))
    )


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "p2q.kernels.int8_cpu_loops", raising=False)
    monkeypatch.delattr("p2q.kernels.int8_cpu_loops", raising=False)
    int8_cpu._loops.cache_clear()
    yield
    int8_cpu._loops.cache_clear()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("k", SIZES)
def test_product_at_every_shape_equals_the_contract(k: int, number: int, threads: Threads) -> None:
    with threads(number):
        for n in SIZES:
            q_x, q_w = operands(max(ROWS), k, n)
            expected = contract.accumulate(q_x, q_w)
            packed = int8_cpu.pack(q_w)
            for m in ROWS:
                assert same_bits(int8_cpu.accumulate(q_x[:m], packed, n), expected[:m]), f"M = {m}, N = {n}"


@pytest.mark.parametrize("number", [1, 2])
def test_scaled_product_equals_the_contracts_epilogue(number: int, threads: Threads) -> None:
    with threads(number):
        for m, k, n in [(0, 40, 16), (1, 576, 960), (3, 1025, 33), (7, 17, 1), (33, 8192, 576)]:
            q_x, q_w = operands(m, k, n)
            generator = torch.Generator().manual_seed(n)
            s_x, s_w = torch.rand(m, 1, generator=generator), torch.rand(n, generator=generator) + 1
            s_x[2:3] = float("nan")
            expected = contract.epilogue(contract.accumulate(q_x, q_w), s_x, s_w, torch.float32)
            assert same_bits(int8_cpu.scaled(q_x, int8_cpu.pack(q_w), s_x, s_w, n), expected)


@pytest.mark.parametrize("k", [65_552, contract.SAFE_K, contract.MAX_K])
@pytest.mark.parametrize("x", [127, -127])
@pytest.mark.parametrize("w", [127, -127, -128])
def test_long_sums_of_full_scale_equal_the_integer_sum(x: int, w: int, k: int) -> None:
    for m in (1, 2, 5):
        q_x, q_w = torch.full((m, k), x, dtype=torch.int8), torch.full((17, k), w, dtype=torch.int8)
        got = int8_cpu.accumulate(q_x, int8_cpu.pack(q_w), 17)
        assert same_bits(got, torch.full((m, 17), x * w * k, dtype=torch.int32))


def test_activations_of_minus_128_fit_up_to_safe_k_and_overflow_past_it() -> None:
    q_x, q_w = (torch.full((n, contract.MAX_K), -128, dtype=torch.int8) for n in (1, 3))
    k = contract.SAFE_K
    assert int8_cpu.accumulate(q_x[:, :k], int8_cpu.pack(q_w[:, :k]), 3).tolist() == [[2**14 * k] * 3]
    packed = int8_cpu.pack(q_w)
    with pytest.raises(OverflowError):
        int8_cpu.accumulate(q_x, packed, 3)
    with pytest.raises(OverflowError):
        int8_cpu.scaled(q_x, packed, torch.ones(1, 1), torch.ones(3), 3)


@pytest.mark.parametrize("x", [127, -127, -128])
@pytest.mark.parametrize("w", [127, -127, -128])
def test_runs_that_would_saturate_int16_equal_the_contract(x: int, w: int) -> None:
    for k in (2, 64, 577):
        q_x, q_w = operands(5, k, 33)
        q_x[:, : k // 2 + 1], q_w[:, : k // 2 + 1] = x, w
        assert same_bits(int8_cpu.accumulate(q_x, int8_cpu.pack(q_w), 33), contract.accumulate(q_x, q_w))


def test_operands_that_are_not_contiguous_equal_the_contract() -> None:
    q_x, q_w = operands(34, 1200, 40)
    for x, w in ((q_x[::2], q_w), (q_x[:, ::3], q_w[:, ::3]), (q_x[:, 5:205], q_w[:, 7:207]), (q_x[:, :34].t(),) * 2):
        assert same_bits(int8_cpu.accumulate(x, int8_cpu.pack(w), len(w)), contract.accumulate(x, w))


def test_empty_sums_are_zero() -> None:
    packed = int8_cpu.pack(torch.zeros(5, 0, dtype=torch.int8))
    assert int8_cpu.accumulate(torch.zeros(3, 0, dtype=torch.int8), packed, 5).tolist() == [[0] * 5] * 3


def test_calls_of_several_threads_at_once_equal_the_contract(threads: Threads) -> None:
    q_x, q_w = operands(33, 1025, 576)
    expected, packed = contract.accumulate(q_x, q_w), int8_cpu.pack(q_w)

    def many(number: int) -> bool:
        torch.set_num_threads(number)  # of this thread
        return all(same_bits(int8_cpu.accumulate(q_x, packed, 576), expected) for _ in range(50))

    with threads(2), ThreadPoolExecutor(2) as pool:
        assert all(pool.map(many, [2, 2, 1, 2]))


def test_forked_process_equals_the_contract(fork: Callable[[Callable[[], object]], int], threads: Threads) -> None:
    q_x, q_w = operands(7, 600, 300)
    expected, packed = contract.accumulate(q_x, q_w), int8_cpu.pack(q_w)
    with threads(2):
        int8_cpu.accumulate(q_x, packed, 300)

    def child() -> None:
        if not same_bits(int8_cpu.accumulate(q_x, packed, 300), expected):
            raise SystemExit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(fork(child), 0)[1]) == 0


@pytest.mark.parametrize("one_runtime", [False, True], ids=["torch's OpenMP", "one OpenMP for all"])
def test_process_with_two_threads_equals_the_contract(one_runtime: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in machine.one_openmp().items() if one_runtime else ():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_weight_is_held_as_int8() -> None:
    for name in ("p2q", "cutlass-order", "triton-order"):
        weight = get_kernel(name).prepare(torch.zeros(960, 576, dtype=torch.int8), torch.ones(960), torch.bfloat16)
        assert (weight.tensors[0].dtype, weight.tensors[0].numel()) == (torch.int8, 960 * 576)


@pytest.mark.usefixtures("without_numba")
def test_without_numba_the_contract_multiplies() -> None:
    q_x, q_w = operands(5, 1100, 33)
    packed = int8_cpu.pack(q_w)
    assert packed.shape == q_w.shape
    acc, s_x, s_w = contract.accumulate(q_x, q_w), torch.rand(5, 1), torch.rand(33)
    assert same_bits(int8_cpu.accumulate(q_x, packed, 33), acc)
    assert same_bits(int8_cpu.scaled(q_x, packed, s_x, s_w, 33), contract.epilogue(acc, s_x, s_w, torch.float32))


def test_pack_refuses_k_past_the_limit() -> None:
    with pytest.raises(ValueError, match="132105"):
        int8_cpu.pack(torch.zeros(1, contract.MAX_K + 1, dtype=torch.int8))


def test_loops_compile_where_no_cache_can_be_written(tmp_path: Path) -> None:
    """In a package that cannot be written, without a home: they are compiled for the process alone."""
    script = (
        "import numba\n"
        "real = numba.cfunc\n"
        "def cfunc(*a, **k):\n"
        "    if k.pop('cache', False): raise RuntimeError('no locator available')\n"
        "    return real(*a, **k)\n"
        "numba.cfunc = cfunc\n" + IN_A_PROCESS
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
