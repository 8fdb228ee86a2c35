"""The registry of int8 kernels. A new kernel is a module here and one line below; tests and commands find it there."""

from __future__ import annotations

from p2q.errors import KernelError
from p2q.kernels.base import Kernel, Prepared
from p2q.kernels.cublaslt import CublasLt
from p2q.kernels.onednn import OneDNN
from p2q.kernels.p2q import P2Q
from p2q.kernels.reference import CutlassOrder, TritonOrder
from p2q.kernels.vllm_cuda import Cutlass, Triton

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel for kernel in (P2Q(), CutlassOrder(), TritonOrder(), OneDNN(), Cutlass(), Triton(), CublasLt())
}
DEFAULT_KERNEL = P2Q.name


def get_kernel(name: str) -> Kernel:
    """A kernel by its name.

    Raises:
        KernelError: there is none of that name.
    """
    if name not in KERNELS:
        raise KernelError("unknown kernel", expected=f"one of {', '.join(KERNELS)}", got=repr(name))
    return KERNELS[name]


__all__ = ["DEFAULT_KERNEL", "KERNELS", "Kernel", "Prepared", "get_kernel"]
