"""Starting vLLM's own OpenAI-compatible server with p2q's linear layers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from p2q.errors import ContractError, P2QError
from p2q.inspection import inspect
from p2q.kernels.probe import require_exact
from p2q.machine import default_device, one_openmp
from p2q.manifest import check_contract

OURS = ("model", "quantization", "additional-config")
"""Options of vLLM that say what is served and by which kernel."""


def check_servable(path: Path, kernel: str, device: str) -> None:
    """Refuse a checkpoint or a kernel that cannot be served under the contract, before vLLM starts.

    Raises:
        ContractError: a layer does not satisfy the contract, or the files are not what the manifest says.
        KernelError: the kernel is not exact here.
    """
    require_exact(kernel, device)
    found = inspect(path)
    if found.manifest is not None:
        check_contract(found.manifest, path)
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


def check_options(options: list[str]) -> None:
    """Refuse options that would have vLLM serve something else than what was checked.

    Raises:
        P2QError: naming the option.
    """
    for option in options:
        name = option.lstrip("-").partition("=")[0].partition(".")[0].replace("_", "-")
        if (option.startswith("--") and name in OURS) or option.startswith("-q"):
            raise P2QError(
                "p2q serve sets this option itself",
                expected="options of vLLM other than " + ", ".join(f"--{ours}" for ours in OURS),
                got=option,
                hint="The checkpoint is the first argument, the kernel is --kernel",
            )


def server_command(path: Path, kernel: str, options: list[str]) -> list[str]:
    """The command line of vLLM's server; it listens on 127.0.0.1 unless told otherwise.

    Raises:
        P2QError: see `check_options`.
        EngineError: vLLM is not installed, or outside the supported range.
    """
    check_options(options)
    from p2q import vllm_api  # importing vLLM takes seconds, and other commands do without it

    vllm_api.check_version()
    given = {option.partition("=")[0] for option in options}
    host = [] if "--host" in given or "--uds" in given else ["--host", "127.0.0.1"]
    settings = json.dumps({"p2q": {"kernel": kernel, "evaluate": False}})
    # Last, where they win over a configuration file and over abbreviated options.
    ours = ["--model", str(path), "--quantization", "p2q", "--additional-config", settings]
    return [sys.executable, "-m", vllm_api.SERVER_MODULE, *host, *options, *ours]


def server_environment() -> dict[str, str]:
    """The server's variables. On a CPU vLLM would reserve nearly all memory for its cache: 4 GiB unless told."""
    cache = {"VLLM_CPU_KVCACHE_SPACE": "4"} if default_device() == "cpu" else {}
    environment = {**cache, "VLLM_NO_USAGE_STATS": "1", **os.environ, **one_openmp()}
    # The kernel and the mode come with the command line alone.
    return {name: value for name, value in environment.items() if not name.startswith("P2Q_")}


def launch(path: Path, kernel: str, options: list[str]) -> NoReturn:
    """Become the server."""
    command = server_command(path, kernel, options)
    sys.stdout.flush()
    os.execve(command[0], command, server_environment())
