"""What the commands share: consoles, progress bars, JSON output, option types."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

output = Console(emoji=False)
errors = Console(stderr=True, emoji=False)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines instead of text.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an existing checkpoint at DST.")]
SourceArgument = Annotated[Path, typer.Argument(metavar="SRC", help="Checkpoint directory to read.")]
TargetArgument = Annotated[Path, typer.Argument(metavar="DST", help="Checkpoint directory to make.")]


def _device(text: str) -> str:
    if text == "cpu":
        return text
    import torch

    if not re.fullmatch(r"cuda(:[0-9]+)?", text):
        raise typer.BadParameter(f"expected cpu or cuda, got {text}")
    if torch.cuda.device_count() <= int(text.partition(":")[2] or 0):
        raise typer.BadParameter(f"there is no {text} here")
    return text


DeviceOption = Annotated[str, typer.Option(parser=_device, metavar="cpu|cuda", help="Where it is computed.")]


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on standard output."""
    print(json.dumps(value, indent=1))


def say(text: str) -> None:
    """A line on standard output, as it is: names of files and tensors may hold what rich takes for markup."""
    output.print(Text(text), soft_wrap=True)


def say_error(text: str) -> None:
    """An error in one line on standard error."""
    errors.print(Text.assemble(("error: ", "bold red"), text), soft_wrap=True)


@contextlib.contextmanager
def layer_progress(title: str, *, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar over layers, on standard error; silent for machines."""
    columns = (MofNCompleteColumn(), TextColumn("layers"), TimeElapsedColumn(), TimeRemainingColumn())
    with bar(title, *columns, quiet=quiet) as update:
        yield lambda _layer, done, total: update(done, total)


@contextlib.contextmanager
def byte_progress(title: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar over bytes with rate and time left, on standard error; silent for machines."""
    with bar(title, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), quiet=quiet) as update:
        yield update


@contextlib.contextmanager
def bar(title: str, *columns: ProgressColumn, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error with these columns, updated by a call with (done, in all)."""
    silent = quiet or not errors.is_terminal
    with Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, console=errors, disable=silent, transient=True
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def warn_skipped(skipped: list[str]) -> None:
    """Say which files of the source were left out."""
    if skipped:
        reason = "hidden files, and weight files that the checkpoint does not name"
        errors.print(Text.assemble(("left out: ", "yellow"), f"{', '.join(skipped)} ({reason})"), soft_wrap=True)
