"""`p2q convert`."""

from __future__ import annotations

from pathlib import Path
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
from p2q.convert import convert
from p2q.scales import Rule


def command(
    source: SourceArgument,
    target: TargetArgument,
    rule: Annotated[
        Rule,
        typer.Option(
            help="mse: of the two neighbouring exponents the one with the smaller squared error. "
            "nearest: in log2. ceil: never clips."
        ),
    ] = "mse",
    overwrite: OverwriteOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and compute everything, write nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Rewrite a W8A8 checkpoint's weight scales to powers of two and requantize its weights to match.

    Example: p2q convert Qwen3-8B-W8A8 Qwen3-8B-W8A8-p2q
    """
    with layer_progress("requantizing", quiet=as_json) as progress:
        done = convert(source, target, rule=rule, overwrite=overwrite, dry_run=dry_run, progress=progress)
    manifest = done.manifest
    clipped = sum(record.clipped for record in manifest.tensors.values())
    values = sum(record.shape[0] * record.shape[1] for record in manifest.tensors.values())
    if as_json:
        print_json(
            {
                "target": None if dry_run else str(Path(target)),
                "rule": manifest.rule,
                "changed": done.changed,
                "layers": len(manifest.tensors),
                "values": values,
                "clipped": clipped,
                "checkpoint_digest": None if dry_run else manifest.checkpoint_digest,
                "skipped": done.skipped,
            }
        )
        return
    warn_skipped(done.skipped)
    done_what = "converted" if done.changed else "copied (every scale was a power of two already)"
    verb = "would convert" if dry_run else done_what
    layers = len(manifest.tensors)
    say(f"{verb}: {layers} layers, rule {manifest.rule}, {clipped:,} of {values:,} values clipped")
    worst = max(manifest.tensors.items(), key=lambda item: item[1].relative_error)
    say(f"largest relative weight error: {worst[1].relative_error:.4f} in {worst[0]}")
    if not dry_run:
        say(f"{target}  SHA-256 {manifest.checkpoint_digest}")
