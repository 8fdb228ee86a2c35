"""The custom op of a p2q linear layer, opaque to torch.compile.

A compiler may keep more precision than asked for, fuse a multiplication into an addition or reorder a product; each
changes bits. Inside an op nothing is rewritten.
"""

from __future__ import annotations

import torch

from p2q import contract
from p2q.kernels import Prepared, get_kernel


def _int8_linear(
    x: torch.Tensor, tensors: list[torch.Tensor], bias: torch.Tensor | None, kernel: str, n: int, contract_bias: bool
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    q_x, s_x = contract.quantize_per_token(rows)
    own_bias = None if contract_bias else bias
    y = get_kernel(kernel).apply(Prepared(tensors, n), q_x, s_x, own_bias, x.dtype)
    if contract_bias:
        y = contract.add_bias(y, bias)
    return y.reshape(*x.shape[:-1], n)


def _fake(
    x: torch.Tensor, tensors: list[torch.Tensor], bias: torch.Tensor | None, kernel: str, n: int, contract_bias: bool
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], n))


_library = torch.library.Library("p2q", "DEF")
_library.define(
    "int8_linear(Tensor x, Tensor[] tensors, Tensor? bias, str kernel, int n, bool contract_bias) -> Tensor"
)
_library.impl("int8_linear", _int8_linear, "CompositeExplicitAutograd")
_library._register_fake("int8_linear", _fake)


def int8_linear(
    x: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None, kernel: str, *, contract_bias: bool
) -> torch.Tensor:
    """Quantize activations by the contract and multiply by a kernel.

    Args:
        x: (..., K) bfloat16, float16 or float32.
        prepared: the weight (N, K) in the kernel's form.
        bias: (N,) or None.
        kernel: its name in the registry.
        contract_bias: add the bias as the contract says, whatever the kernel would do with it.

    Returns:
        (..., N) in the dtype of x.
    """
    y: torch.Tensor = torch.ops.p2q.int8_linear(x, prepared.tensors, bias, kernel, prepared.n, contract_bias)
    return y
