"""`p2q inspect`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from p2q.cli.console import JsonOption, output, print_json
from p2q.contract import CONTRACT_VERSION
from p2q.inspection import Inspection, inspect


def command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Checkpoint directory.")],
    layers: Annotated[bool, typer.Option("--layers", help="List every layer.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a checkpoint's scheme, scale exponents, clipping and manifest, and verify its digests.

    Exit code 1 where files differ from the manifest, or a checkpoint with a manifest breaks the contract.

    Example: p2q inspect SmolLM2-135M-W8A8-p2q
    """
    found = inspect(path)
    if as_json:
        print_json(found.summary())
    else:
        _show(found, layers)
    if found.changed or (found.manifest is not None and not found.contract_holds):
        raise typer.Exit(1)


def _show(found: Inspection, layers: bool) -> None:
    weights = sum(math.prod(layer.shape) for layer in found.layers)
    scales = sum(layer.scales for layer in found.layers)
    exact = sum(layer.power_of_two for layer in found.layers)
    broken = [layer for layer in found.layers if layer.problem is not None]
    facts = Table.grid(padding=(0, 2))
    facts.add_column()
    facts.add_column(overflow="fold")
    facts.add_row("checkpoint", Text(found.path))
    for scheme in found.scheme:
        facts.add_row("scheme", scheme)
    facts.add_row("layers", f"{len(found.layers):,} quantized, {weights:,} weights, {scales:,} scales")
    facts.add_row("powers of two", f"{exact:,} of {scales:,} scales")
    facts.add_row("at the limit", f"{sum(layer.at_limit for layer in found.layers):,} weights at -128 or ±127")
    if found.manifest is not None and found.manifest.contract != CONTRACT_VERSION:
        rest = f": made for version {found.manifest.contract}, and this is version {CONTRACT_VERSION}"
        facts.add_row("contract", Text.assemble(("does not hold", "red"), rest))
    elif not broken:
        facts.add_row("contract", f"[green]holds[/] for all {len(found.layers)} layers")
    else:
        rest = f" for {len(broken)} of {len(found.layers)} layers; first {broken[0].name}: {broken[0].problem}"
        facts.add_row("contract", Text.assemble(("does not hold", "red"), rest))
    if found.manifest is None:
        facts.add_row("manifest", "none")
    else:
        manifest = found.manifest
        clipped = sum(record.clipped for record in manifest.tensors.values())
        parts = (f"contract version {manifest.contract}", manifest.made_by, f"rule {manifest.rule}")
        facts.add_row("manifest", Text(f"{', '.join(parts)}, {clipped:,} values clipped"))
        facts.add_row("source digest", manifest.source_digest)
        facts.add_row("digest", manifest.checkpoint_digest)
        if found.changed:
            listed = ", ".join(f"{name} ({problem})" for name, problem in found.changed.items())
            facts.add_row("files", Text.assemble(("differ from the manifest", "red"), f": {listed}"))
        else:
            facts.add_row("files", f"[green]{len(manifest.files)} files, every SHA-256 verified[/]")
    output.print(facts, highlight=False)
    _show_histogram(found)
    if layers:
        _show_layers(found)


def _show_histogram(found: Inspection) -> None:
    title = "scale exponents k (scale = 2^k)" if found.contract_holds else "scale exponents, floor(log2 scale)"
    table = Table(title=title, title_justify="left")
    table.add_column("k", justify="right")
    table.add_column("scales", justify="right")
    table.add_column("")
    largest = max(found.exponents.values(), default=1)
    for exponent, count in found.exponents.items():
        table.add_row(str(exponent), f"{count:,}", "█" * max(1, round(40 * count / largest)))
    output.print(table, highlight=False)


def _show_layers(found: Inspection) -> None:
    table = Table(title="layers", title_justify="left")
    for name, justify in (
        ("layer", "left"),
        ("N x K", "right"),
        ("scales", "left"),
        ("exponents", "right"),
        ("contract", "left"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for layer in found.layers:
        exponents = f"{min(layer.exponents)} to {max(layer.exponents)}" if layer.exponents else "-"
        shape = "x".join(map(str, layer.scale_shape)) or "scalar"
        table.add_row(
            Text(layer.name),
            " x ".join(map(str, layer.shape)),
            f"{layer.scale_dtype} {shape}",
            exponents,
            Text(layer.problem or "holds"),
        )
    output.print(table, highlight=False)
