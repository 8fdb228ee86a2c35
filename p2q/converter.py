"""The requantization as a `Converter` of compressed-tensors, for that library's own `convert_checkpoint`.

    from compressed_tensors.entrypoints.convert import convert_checkpoint
    from p2q.converter import PowerOfTwoConverter

    convert_checkpoint(source, target, converter=PowerOfTwoConverter(source))

The tensors are those of `p2q convert`. The library moves a scale into the shard of its weight, holds a shard in memory,
writes into the target as it goes, and writes no manifest.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from p2q.checkpoint import Checkpoint, check_tied, open_checkpoint
from p2q.errors import CheckpointError
from p2q.layers import Layer, check_length
from p2q.manifest import MANIFEST_NAME
from p2q.requantize import requantize, requantizer_on
from p2q.scales import Rule, check_exponents, check_scale, power_of_two
from p2q.scheme import quantized_layers, read_quantization_config
from p2q.shards import input_exponent, stored_input_exponent

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig


def _check_library_can(checkpoint: Checkpoint, scales: set[str]) -> None:
    """Refuse what `convert_checkpoint` would stop at half-way, or carry over though it is no longer true."""
    for name in checkpoint.shards:
        if scales.issuperset(tensor for tensor, info in checkpoint.tensors.items() if info.shard == name):
            raise CheckpointError(
                "compressed-tensors cannot convert a shard of nothing but scales",
                file=checkpoint.shards[name].path,
                hint="`p2q convert` can",
            )
    if (checkpoint.path / MANIFEST_NAME).exists():
        raise CheckpointError(
            "the source has a manifest, which compressed-tensors would copy",
            file=checkpoint.path / MANIFEST_NAME,
            hint="`p2q convert --overwrite` copies a converted checkpoint",
        )


class PowerOfTwoConverter:
    """Implements `compressed_tensors.entrypoints.convert.converters.Converter` (compressed-tensors 0.17).

    Args:
        source: the W8A8 checkpoint that is converted.
        rule, input_scales, device: see `p2q.convert.convert`.

    Raises:
        CheckpointError, SchemeError, ScaleError: the source is not a checkpoint that can be converted.
    """

    def __init__(
        self, source: str | Path, *, rule: Rule = "mse", input_scales: bool = False, device: str = "cpu"
    ) -> None:
        checkpoint = open_checkpoint(Path(source))
        self._layers = {layer.weight: layer for layer in quantized_layers(checkpoint)}
        check_tied(checkpoint)
        for layer in self._layers.values():
            check_length(checkpoint, layer)
            if layer.input_scale is not None:
                stored_input_exponent(checkpoint, layer.input_scale)
        _check_library_can(checkpoint, {layer.scale for layer in self._layers.values()})
        self._config = read_quantization_config(checkpoint.config, str(Path(source) / "config.json"))
        self._rule, self._input_scales = rule, input_scales
        self._requantizer = requantizer_on(device)
        self._source = str(source)

    def process(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Requantize the weights among some tensors of the source; the others stay as they are.

        Args:
            tensors: by name, every weight with its scale.

        Raises:
            ScaleError: a scale or its power of two is not one that can be used.
        """
        converted = dict(tensors)
        for layer in self._among(tensors):
            weight, stored = tensors[layer.weight], tensors[layer.scale]
            scale = self._scale(layer, tensors)
            converted[layer.weight], figures = requantize(weight, scale, self._rule, self._requantizer)
            k_dim = weight.shape[-1]
            check_exponents(figures.exponents, k_dim, stored.dtype, file=self._source, tensor=layer.scale)
            converted[layer.scale] = power_of_two(figures.exponents, stored)
        if self._input_scales:
            for name in tensors.keys() & {layer.input_scale for layer in self._layers.values()}:
                k = input_exponent(tensors[name], file=self._source, tensor=name)
                converted[name] = power_of_two(torch.tensor([k]), tensors[name])
        return converted

    def validate(self, tensors: dict[str, torch.Tensor]) -> None:
        """Check the scales among some tensors of the source. Raises ScaleError."""
        for layer in self._among(tensors):
            self._scale(layer, tensors)

    def create_config(self) -> QuantizationConfig | None:
        """The source's own: the scheme stays what it was."""
        return self._config

    def get_dependencies(self, weight_name: str) -> set[str]:
        """The scale that goes with a weight."""
        return {self._layers[weight_name].scale} if weight_name in self._layers else set()

    def _scale(self, layer: Layer, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        weight, stored = tensors[layer.weight], tensors[layer.scale]
        return check_scale(weight.shape, stored, lambda: weight, file=self._source, tensor=layer.scale)

    def _among(self, tensors: dict[str, torch.Tensor]) -> list[Layer]:
        return [layer for name, layer in self._layers.items() if name in tensors]
