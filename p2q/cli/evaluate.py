"""`p2q eval ...`."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from p2q.checkpoint import open_checkpoint
from p2q.cli.console import JsonOption, errors, output, print_json, say
from p2q.errors import P2QError
from p2q.eval.prompts import PROMPTS, read_prompts
from p2q.eval.report import prepare_folder, write_report
from p2q.eval.tokens import TokensReport, evaluate_tokens
from p2q.scheme import quantized_layers

app = typer.Typer(help="Evaluations that prove it.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Evaluations that prove it."""


@app.command("tokens")
def tokens(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="One or more W8A8 checkpoints.")],
    kernel: Annotated[
        list[str] | None,
        typer.Option(help="A kernel; give two or more. Default: cutlass-order and triton-order.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file, one prompt a line. Default: eight built-in prompts.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Greedy tokens of each answer.")] = 64,
    report: Annotated[Path | None, typer.Option(metavar="DIR", help="Write report.html and report.json there.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Send the same prompts through two or more int8 kernels of the real vLLM engine and compare every token.

    Exit code 1 where a stream or a layer differs.

    Example: p2q eval tokens SmolLM2-W8A8 SmolLM2-W8A8-p2q --kernel cutlass-order --kernel triton-order --report out
    """
    for path in [*paths, *([report] if report else [])]:
        require_utf8(path)
    for path in paths:
        quantized_layers(open_checkpoint(path))  # bad input is told before an engine takes half a minute to start
    labels = label_paths(paths)
    texts = read_prompts(prompts) if prompts else PROMPTS
    if report:
        prepare_folder(report)  # likewise
    with stages(quiet=as_json) as stage:
        result = evaluate_tokens(
            labels,
            kernel or ["cutlass-order", "triton-order"],
            texts,
            max_tokens=max_tokens,
            command=this_command(),
            stage=stage,
        )
    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        show(result)
    if report:
        page, data = write_report(result, report)
        if not as_json:
            say(f"report: {page}\n        {data}")
    if not all(checkpoint.passed for checkpoint in result.checkpoints):
        raise typer.Exit(1)


def label_paths(paths: list[Path]) -> dict[str, Path]:
    """The shortest labels that tell the checkpoints apart: folder names, or whole paths."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise P2QError("a checkpoint is given twice", got=", ".join(map(str, paths)))
    names = [path.resolve().name for path in paths]
    labels = names if len(set(names)) == len(names) else [str(path) for path in paths]
    return dict(zip(labels, paths, strict=True))


def this_command() -> str:
    """The command line, as it can be pasted."""
    return shlex.join(["p2q", *sys.argv[1:]]).encode(errors="backslashreplace").decode()


def require_utf8(path: Path) -> None:
    """Refuse a path that cannot stand in a report or reach an engine."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise P2QError("the path is not text", file=path, expected="UTF-8") from error


@contextlib.contextmanager
def stages(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A spinner on standard error that says what is being done; one line a stage where there is no terminal."""
    if quiet:
        yield lambda _text: None
    elif not errors.is_terminal:
        yield lambda text: errors.print(Text(text))
    else:
        with errors.status("starting") as status:
            yield lambda text: status.update(Text(text))


def show(report: TokensReport) -> None:
    """The result as a table, and where streams part."""
    table = Table(title="int8 kernels against each other in vLLM", title_justify="left")
    table.add_column("checkpoint", overflow="fold")
    table.add_column("kernels", overflow="fold")
    table.add_column("linear layers equal bit for bit", justify="right")
    table.add_column("outputs that differ", justify="right")
    table.add_column("identical streams", justify="right")
    for checkpoint in report.checkpoints:
        for pair in checkpoint.comparisons:
            table.add_row(
                Text(checkpoint.label),
                f"{pair.first}\n{pair.second}",
                _ratio(pair.agreeing, len(pair.layers)),
                f"{pair.differing_outputs:,} of {pair.outputs:,}",
                _ratio(pair.identical, len(pair.streams)),
            )
    output.print(table, highlight=False)
    for checkpoint in report.checkpoints:
        for pair in checkpoint.comparisons:
            for number, stream in enumerate(pair.streams, 1):
                if stream.divergence is not None:
                    part = stream.divergence
                    output.print(
                        f"{checkpoint.label}: prompt {number} parts at token {part.position + 1}: "
                        f"{part.first!r} ({pair.first}), {part.second!r} ({pair.second})",
                        highlight=False,
                        markup=False,
                    )
    for name, reason in report.inexact_kernels.items():
        output.print(f"{name} is not exact on this machine: {reason}", highlight=False, markup=False)


def _ratio(part: int, whole: int) -> str:
    return f"[{'green' if part == whole else 'red'}]{part} of {whole}[/]"
