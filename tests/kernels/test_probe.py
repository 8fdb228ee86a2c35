"""The exactness probe: what it must catch, and what it must let pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch

from p2q import contract
from p2q.errors import KernelError
from p2q.kernels import KERNELS, Kernel, Prepared
from p2q.kernels.probe import probe, require_exact

Accumulate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Scales = Callable[[torch.Tensor], torch.Tensor]


class Injected(Kernel):
    """The contract with another accumulation, other scales or another rounding."""

    name = "injected"
    formula = "a fault"
    devices = frozenset({"cpu"})

    def __init__(
        self,
        accumulate: Accumulate = contract.accumulate,
        token: Scales = lambda s_x: s_x,
        weight: Scales = lambda s_w: s_w,
        output: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = torch.Tensor.to,
        order: contract.Order = "weight-first",
    ) -> None:
        self.accumulate, self.token, self.weight, self.output, self.order = accumulate, token, weight, output, order

    def prepare(self, q_w: torch.Tensor, s_w: torch.Tensor, out_dtype: torch.dtype) -> Prepared:
        return Prepared([q_w, s_w], q_w.shape[0])

    def apply(
        self,
        prepared: Prepared,
        q_x: torch.Tensor,
        s_x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        q_w, s_w = prepared.tensors
        assert (s_x.dtype, s_w.dtype) == (torch.float32, torch.float32)
        acc = self.accumulate(q_x, q_w)
        y = contract.epilogue(acc, self.token(s_x), self.weight(s_w), torch.float32, order=self.order, bias=bias)
        return self.output(y, out_dtype)


def products(q_x: torch.Tensor, q_w: torch.Tensor) -> np.ndarray:
    """(M, N, K) int64: every product by itself."""
    return q_x.numpy().astype(np.int64)[:, None, :] * q_w.numpy().astype(np.int64)[None, :, :]


def saturating_pairs(q_x: torch.Tensor, q_w: torch.Tensor) -> torch.Tensor:
    """As x86 without VNNI does it: unsigned times signed, pairs summed in int16 that saturates, the offset undone."""
    shifted = (q_x.numpy().astype(np.int64) + 128)[:, None, :] * q_w.numpy().astype(np.int64)[None, :, :]
    pairs = np.clip(shifted[..., ::2] + shifted[..., 1::2], -(2**15), 2**15 - 1).sum(axis=-1)
    return torch.from_numpy((pairs - 128 * q_w.numpy().astype(np.int64).sum(axis=1)).astype(np.int32))


def saturating_sum(q_x: torch.Tensor, q_w: torch.Tensor) -> torch.Tensor:
    total = np.zeros((len(q_x), len(q_w)), dtype=np.int64)
    for step in np.moveaxis(products(q_x, q_w), -1, 0):
        total = np.clip(total + step, -(2**15), 2**15 - 1)
    return torch.from_numpy(total.astype(np.int32))


def running(dtype: type) -> Accumulate:
    def accumulate(q_x: torch.Tensor, q_w: torch.Tensor) -> torch.Tensor:
        """One product after the other in a narrow type."""
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.cumsum(products(q_x, q_w).astype(dtype), axis=-1, dtype=dtype)[..., -1]
            return torch.from_numpy(np.nan_to_num(total.astype(np.float64), posinf=2e9, neginf=-2e9).astype(np.int32))

    return accumulate


def float32_product(q_x: torch.Tensor, q_w: torch.Tensor) -> torch.Tensor:
    return (q_x.to(torch.float32) @ q_w.to(torch.float32).t()).to(torch.int32)


def without_last_product(q_x: torch.Tensor, q_w: torch.Tensor) -> torch.Tensor:
    return contract.accumulate(q_x[:, :-1], q_w[:, :-1])


def without_last_output(q_x: torch.Tensor, q_w: torch.Tensor) -> torch.Tensor:
    acc = contract.accumulate(q_x, q_w)
    acc[:, -1] = 0
    return acc


def split_with_rounding(dtype: torch.dtype) -> Accumulate:
    def accumulate(q_x: torch.Tensor, q_w: torch.Tensor) -> torch.Tensor:
        """Two halves of K, each rounded before they are added."""
        half = q_x.shape[1] // 2
        parts = ((q_x[:, :half], q_w[:, :half]), (q_x[:, half:], q_w[:, half:]))
        return sum(contract.accumulate(*part).to(dtype).to(torch.int32) for part in parts)  # type: ignore[return-value]

    return accumulate


def split_exactly(q_x: torch.Tensor, q_w: torch.Tensor) -> torch.Tensor:
    return contract.accumulate(q_x[:, :37], q_w[:, :37]) + contract.accumulate(q_x[:, 37:], q_w[:, 37:])


def off_by_one(q_x: torch.Tensor, q_w: torch.Tensor) -> torch.Tensor:
    acc = contract.accumulate(q_x, q_w)
    acc[-1, -1] += 1
    return acc


def symmetric_weight(q_x: torch.Tensor, q_w: torch.Tensor) -> torch.Tensor:
    return contract.accumulate(q_x, q_w.clamp_min(-127))


def truncated(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    assert dtype == torch.bfloat16
    return (y.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


FAULTS = {
    "int16 pairs that saturate": Injected(saturating_pairs),
    "int16 sum that saturates": Injected(saturating_sum),
    "int16 sum that wraps": Injected(running(np.int16)),
    "float16 sum": Injected(running(np.float16)),
    "float32 sum": Injected(running(np.float32)),
    "float32 product": Injected(float32_product),
    "last product dropped": Injected(without_last_product),
    "last output dropped": Injected(without_last_output),
    "split K rounded to bfloat16": Injected(split_with_rounding(torch.bfloat16)),
    "split K rounded to float16": Injected(split_with_rounding(torch.float16)),
    "one accumulator off by one": Injected(off_by_one),
    "-128 taken for -127": Injected(symmetric_weight),
    "token scale in bfloat16": Injected(token=lambda s_x: s_x.to(torch.bfloat16).to(torch.float32)),
    "token scale one unit high": Injected(token=lambda s_x: s_x.nextafter(torch.tensor(torch.inf))),
    "first weight scale for all": Injected(weight=lambda s_w: s_w[:1].expand_as(s_w)),
    "output truncated": Injected(output=truncated),
    "output rounded twice": Injected(output=lambda y, dtype: y.to(torch.float16).to(dtype)),
    "output in another dtype": Injected(output=lambda y, _: y),
    "output of another shape": Injected(output=lambda y, dtype: y.to(dtype)[:, :-1]),
}

HARMLESS = {
    "nothing": Injected(),
    "K split exactly": Injected(split_exactly),
    "weight scale in bfloat16": Injected(weight=lambda s_w: s_w.to(torch.bfloat16).to(torch.float32)),
    "token scale first": Injected(order="token-first"),
    "scales first": Injected(order="scales-first"),
}


@pytest.fixture(autouse=True)
def one_thread(threads: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """Small tensors: two OpenMP runtimes in a process (torch's, vLLM's) lose more time waiting than they gain."""
    with threads(1):
        yield


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Kernel], None]]:
    def enter(kernel: Kernel) -> None:
        monkeypatch.setitem(KERNELS, "injected", kernel)
        probe.cache_clear()

    yield enter
    probe.cache_clear()


@pytest.mark.parametrize("kernel", FAULTS.values(), ids=FAULTS.keys())
def test_probe_catches_an_injected_fault(kernel: Kernel, inject: Callable[[Kernel], None]) -> None:
    inject(kernel)
    result = probe("injected")
    assert result.runs
    assert not result.exact
    assert "M = " in result.reason
    with pytest.raises(KernelError) as caught:
        require_exact("injected")
    assert f"kernel injected is not exact on this machine: {result.reason}" in str(caught.value)


@pytest.mark.parametrize("kernel", HARMLESS.values(), ids=HARMLESS.keys())
def test_probe_lets_what_changes_no_bit_pass(kernel: Kernel, inject: Callable[[Kernel], None]) -> None:
    inject(kernel)
    result = probe("injected")
    assert (result.runs, result.exact) == (True, True)
    require_exact("injected")


def test_probe_of_a_kernel_that_cannot_run_says_why(inject: Callable[[Kernel], None]) -> None:
    inject(Injected())
    assert probe("injected", "meta").reason == "it runs on cpu, not on meta"
    with pytest.raises(KernelError, match="kernel injected cannot run here: it runs on cpu, not on meta"):
        require_exact("injected", "meta")


def test_probe_of_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(KernelError, match="unknown kernel"):
        probe("marlin")


@pytest.mark.parametrize("name", [*KERNELS, "injected"])
def test_probe_under_another_default_dtype_finds_the_same(name: str, inject: Callable[[Kernel], None]) -> None:
    inject(Injected())
    expected = probe(name)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # vLLM does so while it loads a model
    probe.cache_clear()
    try:
        assert probe(name) == expected
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", ["p2q", "cutlass-order", "triton-order"])
def test_probe_of_the_reference_orders_finds_them_exact(name: str) -> None:
    assert probe(name).exact
    require_exact(name)
