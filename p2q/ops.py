"""The custom ops of p2q's layers, opaque to torch.compile.

A compiler may keep more precision than asked for, fuse a multiplication into an addition or reorder a product; each
changes bits. Inside an op nothing is rewritten.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from p2q import contract
from p2q.kernels import Prepared, get_kernel


def _int8_linear(
    x: torch.Tensor,
    tensors: list[torch.Tensor],
    bias: torch.Tensor | None,
    kernel: str,
    n: int,
    contract_bias: bool,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if input_scale is None:
        q_x, s_x = contract.quantize_per_token(rows)
    else:
        q_x, s_x = contract.quantize_per_tensor(rows, input_scale)
    own_bias = None if contract_bias else bias
    y = get_kernel(kernel).apply(Prepared(tensors, n), q_x, s_x, own_bias, x.dtype)
    if contract_bias:
        y = contract.add_bias(y, bias)
    return y.reshape(*x.shape[:-1], n)


def _fake_linear(
    x: torch.Tensor,
    tensors: list[torch.Tensor],
    bias: torch.Tensor | None,
    kernel: str,
    n: int,
    contract_bias: bool,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], n))


def _int8_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: list[torch.Tensor],
    down: list[torch.Tensor],
    kernels: list[str],
    n: int,
    experts: int,
) -> torch.Tensor:
    m, slots = topk_ids.shape
    group = topk_ids.reshape(-1).to(torch.int64)
    rows = x.repeat_interleave(slots, dim=0)
    for tensors, kernel, features in ((gate_up, kernels[0], n), (down, kernels[1], x.shape[1])):
        if tensors is down:
            rows = gated(rows)
        q_x, s_x = contract.quantize_per_token(rows)
        rows = get_kernel(kernel).apply_grouped(Prepared(tensors, features), q_x, s_x, group, experts, x.dtype)
    shares = rows.reshape(m, slots, -1).to(torch.float32) * topk_weights.to(torch.float32).unsqueeze(-1)
    total = shares[:, 0]
    for slot in range(1, slots):  # one after another: a sum over a dimension may be taken in any order
        total = total + shares[:, slot]
    return total.to(x.dtype)


def _fake_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: list[torch.Tensor],
    down: list[torch.Tensor],
    kernels: list[str],
    n: int,
    experts: int,
) -> torch.Tensor:
    return torch.empty_like(x)


def gated(rows: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of rows (M, 2 * I), gate first, in their dtype: (M, I)."""
    gate, up = rows.chunk(2, dim=-1)
    return silu(gate) * up


_library = torch.library.Library("p2q", "DEF")
_library.define(
    "int8_linear(Tensor x, Tensor[] tensors, Tensor? bias, str kernel, int n, bool contract_bias, "
    "Tensor? input_scale=None) -> Tensor"
)
_library.define(
    "int8_experts(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor[] gate_up, Tensor[] down, str[] kernels, "
    "int n, int experts) -> Tensor"
)
for _name, _function, _fake in (
    ("int8_linear", _int8_linear, _fake_linear),
    ("int8_experts", _int8_experts, _fake_experts),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    _library._register_fake(_name, _fake)


def int8_linear(
    x: torch.Tensor,
    prepared: Prepared,
    bias: torch.Tensor | None,
    kernel: str,
    *,
    contract_bias: bool,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Quantize activations by the contract and multiply by a kernel.

    Args:
        x: (..., K) bfloat16, float16 or float32.
        prepared: the weight (N, K) in the kernel's form.
        bias: (N,) or None.
        kernel: its name in the registry.
        contract_bias: add the bias as the contract says, whatever the kernel would do with it.
        input_scale: (1,) float32, the scale of static activations; None for one scale a token.

    Returns:
        (..., N) in the dtype of x.
    """
    y: torch.Tensor = torch.ops.p2q.int8_linear(
        x, prepared.tensors, bias, kernel, prepared.n, contract_bias, input_scale
    )
    return y


def int8_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: Prepared,
    down: Prepared,
    kernels: tuple[str, str],
    experts: int,
) -> torch.Tensor:
    """A mixture of experts: for each token the sum of its experts' outputs, weighted, slot after slot, in float32.

    Both products of an expert follow the contract; between them stands silu(gate) * up in the dtype of x. A token's
    output depends on that token alone.

    Args:
        x: (M, H) bfloat16, float16 or float32.
        topk_weights: (M, T), the weight of each chosen expert.
        topk_ids: (M, T) integers in [0, experts).
        gate_up: the weights (E, 2 * I, H), gate first, from `prepare_grouped`.
        down: the weights (E, H, I), from `prepare_grouped`.
        kernels: the names of the kernels of `gate_up` and `down`.
        experts: E.

    Returns:
        (M, H) in the dtype of x.
    """
    y: torch.Tensor = torch.ops.p2q.int8_experts(
        x, topk_weights, topk_ids, gate_up.tensors, down.tensors, list(kernels), gate_up.n, experts
    )
    return y
