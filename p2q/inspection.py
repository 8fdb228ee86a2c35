"""What a checkpoint is, layer by layer: scheme, exponents, and whether the contract holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from p2q.checkpoint import Checkpoint, open_checkpoint
from p2q.contract import CONTRACT_VERSION, MAX_K
from p2q.errors import ScaleError
from p2q.layers import Layer
from p2q.manifest import Manifest, changed_files, read_manifest
from p2q.scales import check_exponents, check_input_scale, check_scale, decompose, exponent_of, is_power_of_two
from p2q.scheme import describe, quantized_layers, read_quantization_config


class LayerReport(BaseModel):
    """One layer.

    `exponents`: of floor(log2 scale). `at_limit`: weights at -128 or +-127. `problem`: why the contract does not hold.
    """

    name: str
    shape: tuple[int, ...]
    scale_dtype: str
    scale_shape: tuple[int, ...]
    power_of_two: int
    scales: int
    exponents: dict[int, int]
    at_limit: int
    problem: str | None


class Inspection(BaseModel):
    """A checkpoint. `changed`: files that differ from the manifest, or None where there is no manifest."""

    path: str
    scheme: list[str]
    layers: list[LayerReport]
    contract_holds: bool
    manifest: Manifest | None
    changed: dict[str, str] | None

    @property
    def exponents(self) -> dict[int, int]:
        """Histogram over all layers."""
        total: Counter[int] = Counter()
        for layer in self.layers:
            total.update(layer.exponents)
        return dict(sorted(total.items()))

    def summary(self) -> dict[str, Any]:
        """For machines."""
        return {**self.model_dump(mode="json"), "exponents": self.exponents}


def inspect(path: Path) -> Inspection:
    """Read a checkpoint's quantized layers and verify its manifest's digests.

    Raises:
        CheckpointError, SchemeError, ScaleError: not a W8A8 checkpoint.
    """
    checkpoint = open_checkpoint(path)
    layers = [_inspect_layer(checkpoint, layer) for layer in quantized_layers(checkpoint)]
    config = read_quantization_config(checkpoint.config, str(path / "config.json"))
    manifest = read_manifest(path)
    changed = changed_files(path, manifest) if manifest else None
    return Inspection(
        path=str(path),
        scheme=[describe(group, config.format) for group in config.config_groups.values()],
        layers=layers,
        contract_holds=all(layer.problem is None for layer in layers)
        and (manifest is None or manifest.contract == CONTRACT_VERSION),
        manifest=manifest,
        changed=changed,
    )


def _inspect_layer(checkpoint: Checkpoint, layer: Layer) -> LayerReport:
    weight, scale = checkpoint.read(layer.weight), checkpoint.read(layer.scale)
    file = checkpoint.tensors[layer.scale].shard
    problem, exact, floor = None, torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int32)
    try:
        values = check_scale(weight.shape, scale, lambda: weight, file=file, tensor=layer.scale)
        exact, floor = is_power_of_two(scale.reshape(-1)), decompose(values)[1]
        if not exact.all():
            problem = f"{int((~exact).sum())} of {exact.numel()} scales are not powers of two"
        elif weight.shape[-1] > MAX_K:
            problem = f"K = {weight.shape[-1]} is past {MAX_K}"
        else:
            check_exponents(exponent_of(scale), weight.shape[-1], scale.dtype, file=file, tensor=layer.scale)
        if layer.input_scale is not None:
            check_input_scale(checkpoint.read(layer.input_scale), file=file, tensor=layer.input_scale)
    except ScaleError as error:
        problem = str(error)
    return LayerReport(
        name=layer.name,
        shape=tuple(weight.shape),
        scale_dtype=str(scale.dtype).removeprefix("torch."),
        scale_shape=tuple(scale.shape),
        power_of_two=int(exact.sum()),
        scales=scale.numel(),
        exponents=dict(sorted(Counter(floor.tolist()).items())),
        at_limit=int(((weight <= -127) | (weight == 127)).sum()),
        problem=problem,
    )
