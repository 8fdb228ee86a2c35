"""Errors a user can meet. Each says, in this order: file, tensor, expected, got, and what to do."""

from __future__ import annotations

from pathlib import Path


class P2QError(Exception):
    """Bad input: one clear message, exit code 2."""

    exit_code = 2

    def __init__(
        self,
        message: str,
        *,
        file: str | Path | None = None,
        tensor: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        hint: str | None = None,
    ) -> None:
        where = ", ".join(str(part) for part in (file, tensor) if part is not None)
        text = f"{where}: {message}" if where else message
        if expected is not None:
            text += f"; expected {expected}"
        if got is not None:
            text += f", got {got}" if expected is not None else f"; got {got}"
        if hint is not None:
            text += f". {hint}"
        super().__init__(" ".join(text.splitlines()))  # one line, whatever a library's message or a path holds


class CheckpointError(P2QError):
    """The source is not a checkpoint that p2q can read."""


class SchemeError(P2QError):
    """The checkpoint's quantization scheme is not one that p2q converts or serves."""


class ScaleError(P2QError):
    """A scale is missing, not finite, not positive, or its power of two leaves the proven range."""


class TargetError(P2QError):
    """The target cannot be written: it exists, lies inside the source, or the disk is full."""


class KernelError(P2QError):
    """A kernel is unknown, cannot run here, or is not exact on this machine."""


class ContractError(P2QError):
    """A loaded layer does not satisfy the contract."""


class EngineError(P2QError):
    """vLLM is missing, outside the supported range, or failed to start."""


class CheckFailed(P2QError):
    """A check gave a negative result: exit code 1."""

    exit_code = 1
