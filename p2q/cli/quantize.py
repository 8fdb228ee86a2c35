"""`p2q quantize`."""

from __future__ import annotations

from typing import Annotated

import typer

from p2q.cli.console import (
    JsonOption,
    OverwriteOption,
    SourceArgument,
    TargetArgument,
    layer_progress,
    print_json,
    say,
    warn_skipped,
)
from p2q.quantize import Scales, quantize


def command(
    source: SourceArgument,
    target: TargetArgument,
    scales: Annotated[
        Scales,
        typer.Option(help="absmax: the row's largest value / 127. power-of-two: satisfies the contract as it is."),
    ] = "absmax",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Quantize a bf16, fp16 or fp32 checkpoint to W8A8 int8 (round-to-nearest, per channel).

    Example: p2q quantize SmolLM2-135M SmolLM2-135M-W8A8
    """
    with layer_progress("quantizing", quiet=as_json) as progress:
        done = quantize(source, target, scales=scales, overwrite=overwrite, progress=progress)
    if as_json:
        print_json({"target": str(target), "scales": scales, "layers": done.layers, "skipped": done.skipped})
        return
    warn_skipped(done.skipped)
    say(f"quantized: {len(done.layers)} linear layers, {scales} scales")
    say(str(target))
