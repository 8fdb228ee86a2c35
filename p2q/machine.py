"""What this machine is, in words."""

from __future__ import annotations

import platform

INT8_FLAGS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8")


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    return next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())


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
