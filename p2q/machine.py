"""What this machine is, in words."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import torch

INT8_FLAGS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8")


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    return next(
        (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine()
    )


def cpu_flags() -> list[str]:
    """Which of the instruction sets that matter to int8 products this processor has."""
    present = next((set(line.partition(":")[2].split()) for line in _cpuinfo() if line.startswith("flags")), set())
    return [flag for flag in INT8_FLAGS if flag in present]


def _cpuinfo() -> list[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return f.read().splitlines()
    except OSError:
        return []


def default_device() -> str:
    """The type of the device that vLLM serves on here."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    """The name of that device."""
    return torch.cuda.get_device_name() if default_device() == "cuda" else cpu_name()


def one_openmp() -> dict[str, str]:
    """The variable that gives a CPU engine one OpenMP runtime, or none where it is not needed or not there.

    torch and vLLM each bring a runtime whose threads spin while they wait. With as many threads as cores in both, each
    starves the other: vLLM advises to preload one for all.
    """
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    loaded = os.environ.get("LD_PRELOAD", "")
    # The variable's separators cannot be escaped.
    if (
        default_device() != "cpu"
        or not library.is_file()
        or any(c in str(library) for c in " :")
        or "libiomp5" in loaded
    ):
        return {}
    return {"LD_PRELOAD": ":".join(filter(None, [loaded, str(library)]))}
