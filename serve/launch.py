"""Starting vLLM's own OpenAI-compatible server with p2q's linear layers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from p2q.errors import ContractError
from p2q.inspection import inspect
from p2q.kernels.probe import require_exact
from p2q.machine import one_openmp


def check_servable(path: Path, kernel: str, device: str) -> None:
    """Refuse a checkpoint or a kernel that cannot be served under the contract, before vLLM starts.

    Raises:
        ContractError: a layer does not satisfy the contract, or the files are not what the manifest says.
        KernelError: the kernel is not exact here.
    """
    require_exact(kernel, device)
    found = inspect(path)
    broken = next((layer for layer in found.layers if layer.problem is not None), None)
    if broken is not None:
        raise ContractError(
            f"the contract does not hold: {broken.problem}",
            file=path,
            tensor=broken.name,
            hint="`p2q convert` makes a checkpoint that satisfies it",
        )
    if found.changed:
        name, problem = next(iter(found.changed.items()))
        raise ContractError(
            "the checkpoint is not what its manifest says",
            file=path / name,
            expected="the manifest's SHA-256",
            got=problem,
        )


def server_command(path: Path, options: list[str]) -> list[str]:
    """The command line of vLLM's server; it listens on 127.0.0.1 unless told otherwise."""
    given = {option.partition("=")[0] for option in options}
    host = [] if "--host" in given or "--uds" in given else ["--host", "127.0.0.1"]
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(path),
        "--quantization",
        "p2q",
        *host,
        *options,
    ]


def launch(path: Path, kernel: str, options: list[str]) -> NoReturn:
    """Become the server."""
    command = server_command(path, options)
    environment = {
        **os.environ,
        "P2Q_KERNEL": kernel,
        "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
        **one_openmp(),
    }
    environment.pop("P2Q_EVALUATE", None)
    sys.stdout.flush()
    os.execve(command[0], command, environment)
