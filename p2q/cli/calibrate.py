"""`p2q calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from p2q.cli.console import DeviceOption, JsonOption, SourceArgument, bar, errors, print_json, say
from p2q.statistics import collect


def command(
    source: SourceArgument,
    target: Annotated[Path, typer.Argument(metavar="STATS", help="File to make.")],
    text: Annotated[Path, typer.Option(metavar="FILE", help="Text to run the model on, in UTF-8.")],
    windows: Annotated[int, typer.Option(min=1, help="Pieces of 512 tokens to read, from the text's beginning.")] = 128,
    device: DeviceOption = "cpu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file at STATS.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Collect statistics of a W8A8 checkpoint's activations over a text, for p2q convert --feedback.

    Example: p2q calibrate Qwen3-8B-W8A8 Qwen3-8B.stats --text wikitext.txt
    """
    columns = (MofNCompleteColumn(), TextColumn("windows"), TimeElapsedColumn(), TimeRemainingColumn())
    with bar("calibrating", *columns, quiet=as_json) as progress:
        done = collect(source, target, text, windows=windows, device=device, overwrite=overwrite, progress=progress)
    if done.windows < windows:
        short = f"the text has only {done.windows} of the {windows} windows asked for"
        errors.print(Text.assemble(("note: ", "yellow"), short), soft_wrap=True)
    if as_json:
        print_json(
            {
                "target": str(target),
                "windows": done.windows,
                "tokens": done.tokens,
                "layers": done.layers,
                "groups": done.groups,
            }
        )
        return
    say(f"calibrated: {done.layers} layers, {done.groups} inputs, {done.windows} windows, {done.tokens:,} tokens")
    say(str(target))
