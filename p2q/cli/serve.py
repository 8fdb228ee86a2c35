"""`p2q serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2q.kernels import DEFAULT_KERNEL
from p2q.machine import default_device
from p2q.serve.launch import check_options, check_servable, launch


def command(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Converted checkpoint.")],
    kernel: Annotated[
        str, typer.Option(envvar="P2Q_KERNEL", help="int8 kernel; `p2q doctor` lists those that are exact here.")
    ] = DEFAULT_KERNEL,
) -> None:
    """Serve a converted checkpoint by vLLM's OpenAI-compatible server. Unknown options go to vLLM.

    Example: p2q serve SmolLM2-W8A8-p2q --kernel p2q --port 8000 --max-model-len 2048
    """
    check_options(context.args)
    check_servable(path, kernel, default_device())
    launch(path, kernel, context.args)
