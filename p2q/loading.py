"""Loading a model's int8 layers: what must have arrived, what must hold, and a table of which kernel serves what."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from p2q.contract import CONTRACT_VERSION, TOKEN_SCALE_MAX, TOKEN_SCALE_MIN, check_k
from p2q.errors import ContractError, KernelError, ScaleError
from p2q.kernels import Kernel, Prepared, get_kernel
from p2q.kernels.choice import KernelChoice
from p2q.kernels.probe import require_exact
from p2q.scales import check_exponents, exponent_of, is_power_of_two
from p2q.settings import Settings

logger = logging.getLogger("vllm.p2q")  # below vLLM's own, so that its handler and level are used


@dataclass
class LoadedLayer:
    """A p2q layer after loading: a linear layer, or one of the two products of all experts of a layer.

    `shards`: the checkpoint's names of the parts that one product computes, with their output features. `proved`: the
    contract holds. `why`: what chose the kernel. `prepared`: one product's weight. `experts`: how many products
    `prepared` holds, 0 for a linear layer. `input_scale`: the scale of static activations, None for dynamic ones.
    """

    name: str
    kernel: str
    why: str
    prepared: Prepared
    shape: tuple[int, int]
    shards: list[tuple[str, int]]
    proved: bool
    experts: int = 0
    input_scale: torch.Tensor | None = None


@dataclass
class Loading:
    """A model being loaded. Layers announce themselves when they are made; after the last one the table is logged."""

    settings: Settings
    awaited: set[str] = field(default_factory=set)
    layers: list[LoadedLayer] = field(default_factory=list)

    def choose(self, name: str, shards: list[str], device: torch.device) -> tuple[Kernel, str]:
        """The kernel of a layer and what chose it.

        Raises:
            KernelError: it is not exact on this machine (unless under evaluation), or is chosen inconsistently.
        """
        choice = KernelChoice.parse(self.settings.kernel)
        pattern = choice.pattern_of(name, shards)
        kernel = get_kernel(choice.kernel_of(pattern))
        if not self.settings.evaluate:
            require_exact(kernel.name, device.type)
        return kernel, "for all layers" if pattern is None else f"by the pattern {pattern}"

    def done(self, name: str, layers: list[LoadedLayer]) -> None:
        """Take a loaded layer.

        Raises:
            KernelError: it was the last one, and a pattern of the chosen kernels matched none.
        """
        self.layers += layers
        self.awaited.discard(name)
        if self.awaited:
            return
        used = {layer.why for layer in self.layers}
        for pattern, kernel in KernelChoice.parse(self.settings.kernel).patterns:
            if f"by the pattern {pattern}" not in used:
                raise KernelError(
                    "a pattern that decides for no layer", expected="a layer's name", got=f"{pattern}={kernel}"
                )
        logger.info("%s", table(self.layers))
        self.layers = []


def table(layers: list[LoadedLayer]) -> str:
    """Which kernel serves which layers and why, one line for layers that differ in their numbers only."""
    groups: dict[tuple[str, ...], list[LoadedLayer]] = {}
    for layer in layers:
        n, k = layer.shape
        note = "; ".join(filter(None, [layer.why, layer.prepared.note, "" if layer.proved else "NOT PROVED"]))
        shape = f"{n} x {k}" if not layer.experts else f"{layer.experts} of {n} x {k}"
        groups.setdefault((re.sub(r"\d+", "*", layer.name), shape, layer.kernel, note), []).append(layer)
    rows = [
        ("layers", "N x K", "kernel", "count", "why"),
        *((name, shape, kernel, str(len(found)), why) for (name, shape, kernel, why), found in groups.items()),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    parts = sum(len(layer.shards) for layer in layers)
    head = f"p2q serves {parts} int8 layers of the checkpoint (contract version {CONTRACT_VERSION})"
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
    ]
    return "\n".join([head, *(f"  {line}" for line in lines)])


def prove(shards: list[tuple[str, int]], weight: torch.Tensor, scale: torch.Tensor, *, evaluate: bool) -> bool:
    """Whether the contract holds for a weight.

    Args:
        shards: names and output features of the parts of the weight, in order.
        weight: (N, K) int8.
        scale: (N,) float32.
        evaluate: say so instead of raising where scales are not powers of two in the proved range.

    Raises:
        ContractError: it does not hold; the shard and the row are named. A scale that is no positive number is an
            error under evaluation as well.
    """
    proved, start = True, 0
    for name, width in shards:
        scales = scale[start : start + width]
        start += width
        bad = ~torch.isfinite(scales) | (scales <= 0)
        if bad.any():
            row = int(bad.nonzero()[0])
            raise ContractError(
                "bad scale", tensor=name, expected="a finite positive scale", got=f"{scales[row].item()} at row {row}"
            )
        try:
            check_k(weight.shape[-1])
            _check_power_of_two(name, scales, weight.shape[-1])
        except (ScaleError, ValueError) as error:
            if not evaluate:
                raise ContractError(f"the contract (version {CONTRACT_VERSION}) does not hold: {error}") from error
            proved = False
    return proved


def _check_power_of_two(name: str, scales: torch.Tensor, k: int) -> None:
    odd = ~is_power_of_two(scales)
    if odd.any():
        row = int(odd.nonzero()[0])
        raise ScaleError(
            "a scale is not a power of two",
            tensor=name,
            expected="2^k",
            got=f"{scales[row].item()} at row {row}",
            hint="`p2q convert` makes it one",
        )
    check_exponents(exponent_of(scales), k, scales.dtype, file=name, tensor="weight_scale")


def one_input_scale(name: str, scales: torch.Tensor) -> torch.Tensor:
    """The scale of static activations of a layer, the largest of its shards' (S,), as (1,) float32.

    Raises:
        ContractError: a scale outside the range for which the contract is proved.
    """
    for value in scales.tolist():
        if not TOKEN_SCALE_MIN <= value <= TOKEN_SCALE_MAX:
            raise ContractError(
                "bad scale of static activations", tensor=name, expected="a scale in [2^-64, 2^64]", got=str(value)
            )
    return scales.max().reshape(1)


def noting(loader: Callable[..., Any], arrived: set[Any]) -> Callable[..., Any]:
    """A weight loader that notes which shards of a fused layer it was given; None stands for all of them."""

    def load(parameter: Any, tensor: torch.Tensor, *shard: Any, **named: Any) -> Any:
        result = loader(parameter, tensor, *shard, **named)
        for part in (*shard, *named.values()) or (None,):
            arrived.update(part if isinstance(part, tuple) else (part,))
        return result

    return load


def require(present: bool, tensor: str) -> None:
    """Refuse a layer of which a tensor never came: vLLM would serve what the memory held."""
    if not present:
        raise ContractError("missing from the checkpoint", tensor=tensor, expected="it in a shard", got="none")
