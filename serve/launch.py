"""Starting vLLM's own OpenAI-compatible server with p2q's linear layers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from p2q.errors import ContractError
from p2q.inspection import inspect
from p2q.kernels.probe import require_exact
from p2q.machine import default_device, one_openmp


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
    """The command line of vLLM's server; it listens on 127.0.0.1 unless told otherwise.

    Raises:
        EngineError: vLLM is not installed, or outside the supported range.
    """
    from p2q import vllm_api  # importing vLLM takes seconds, and other commands do without it

    vllm_api.check_version()
    given = {option.partition("=")[0] for option in options}
    host = [] if "--host" in given or "--uds" in given else ["--host", "127.0.0.1"]
    return [
        sys.executable,
        "-m",
        vllm_api.SERVER_MODULE,
        "--model",
        str(path),
        "--quantization",
        "p2q",
        *host,
        *options,
    ]


def server_environment(kernel: str) -> dict[str, str]:
    """The server's variables. On a CPU vLLM would reserve nearly all memory for its cache: 4 GiB unless told."""
    cache = {"VLLM_CPU_KVCACHE_SPACE": "4"} if default_device() == "cpu" else {}
    environment = {**cache, "VLLM_NO_USAGE_STATS": "1", **os.environ, "P2Q_KERNEL": kernel, **one_openmp()}
    environment.pop("P2Q_EVALUATE", None)
    return environment


def launch(path: Path, kernel: str, options: list[str]) -> NoReturn:
    """Become the server."""
    command = server_command(path, options)
    sys.stdout.flush()
    os.execve(command[0], command, server_environment(kernel))
