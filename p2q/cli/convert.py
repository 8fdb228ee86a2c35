"""`p2q convert`."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from p2q.cli.console import (
    DeviceOption,
    JsonOption,
    OverwriteOption,
    SourceArgument,
    TargetArgument,
    byte_progress,
    errors,
    print_json,
    say,
    warn_skipped,
)
from p2q.convert import FINISH, Conversion, Part, convert
from p2q.manifest import Manifest
from p2q.scales import Rule
from p2q.unfinished import unfinished_folder


def _part(text: str) -> Part:
    found = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
    if text == "finish":
        return FINISH
    if not found or int(found[1]) > int(found[2]):
        raise typer.BadParameter(f"expected i/n with i from 1 to n, or finish, got {text}")
    return Part(int(found[1]), int(found[2]))


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
    input_scales: Annotated[
        bool, typer.Option("--input-scales", help="Make static activation scales powers of two as well.")
    ] = False,
    from_weights: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Requantize from the original bf16, fp16 or fp32 weights in DIR."),
    ] = None,
    feedback: Annotated[
        Path | None,
        typer.Option(
            metavar="STATS",
            help="Statistics of p2q calibrate: errors are carried from column to column, which costs less perplexity.",
        ),
    ] = None,
    overwrite: OverwriteOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and compute everything, write nothing.")] = False,
    part: Annotated[
        Part | None,
        typer.Option(
            metavar="I/N|finish",
            parser=_part,
            help="Convert only the I-th of N parts of the shards; finish: check that all are there, complete DST.",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Shards converted side by side.", show_default="cores + 1")
    ] = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Rewrite a W8A8 checkpoint's weight scales to powers of two and requantize its weights to match.

    A conversion that was stopped goes on where it ended when it is called again.

    Example: p2q convert Qwen3-8B-W8A8 Qwen3-8B-W8A8-p2q

    With better weights: p2q convert Qwen3-8B-W8A8 Qwen3-8B-W8A8-p2q --feedback Qwen3-8B.stats

    On two machines: p2q convert SRC DST --part 1/2, --part 2/2, and then --part finish
    """
    try:
        with byte_progress("converting", quiet=as_json) as progress:
            done = convert(
                source,
                target,
                rule=rule,
                input_scales=input_scales,
                from_weights=from_weights,
                feedback=feedback,
                overwrite=overwrite,
                dry_run=dry_run,
                part=part,
                workers=workers,
                device=device,
                progress=progress,
            )
    except KeyboardInterrupt:
        folder = unfinished_folder(target)
        if folder.is_dir():
            errors.print(
                Text(f"finished shards are kept in {folder}; the same command goes on from there"), soft_wrap=True
            )
        raise
    if as_json:
        print_json(_summary(done, None if dry_run else target))
        return
    warn_skipped(done.skipped)
    if done.kept:
        say(f"{done.kept} shards of an earlier run were verified and kept")
    if done.manifest is None and part is not None:
        say(f"converted part {part.number} of {part.count}: {done.shards} shards")
        say("when all parts are there, give the same command with --part finish")
    elif done.manifest is not None:
        _tell(done.manifest, done.changed, None if dry_run else target)


def _tell(manifest: Manifest, changed: bool, target: Path | None) -> None:
    done_what = "converted" if changed else "copied (every scale was a power of two already)"
    verb = "would convert" if target is None else done_what
    values, clipped = _totals(manifest)
    say(f"{verb}: {len(manifest.tensors)} layers, rule {manifest.rule}, {clipped:,} of {values:,} values clipped")
    if manifest.input_scales:
        say(f"{len(manifest.input_scales)} activation scales rewritten")
    worst = max(manifest.tensors.items(), key=lambda item: item[1].relative_error)
    say(f"largest relative weight error: {worst[1].relative_error:.4f} in {worst[0]}")
    if target is not None:
        say(f"{target}  SHA-256 {manifest.checkpoint_digest}")


def _totals(manifest: Manifest) -> tuple[int, int]:
    """Values, and clipped ones."""
    records = manifest.tensors.values()
    return sum(math.prod(record.shape) for record in records), sum(record.clipped for record in records)


def _summary(done: Conversion, target: Path | None) -> dict[str, object]:
    known: dict[str, object] = {
        "target": None if target is None else str(target),
        "changed": done.changed,
        "shards": done.shards,
        "kept": done.kept,
        "skipped": done.skipped,
    }
    if done.manifest is not None:
        values, clipped = _totals(done.manifest)
        known |= {
            "rule": done.manifest.rule,
            "layers": len(done.manifest.tensors),
            "values": values,
            "clipped": clipped,
            "checkpoint_digest": None if target is None else done.manifest.checkpoint_digest,
        }
    return known
