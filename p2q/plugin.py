"""What vLLM calls: the quantization method `p2q` and its linear method.

A compressed-tensors checkpoint is served by p2q when it has a p2q manifest or when `quantization="p2q"` is asked for;
`quantization="compressed-tensors"` loads it by vLLM's own method, untouched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from p2q import vllm_api
from p2q.contract import CONTRACT_VERSION, check_k
from p2q.errors import ContractError, ScaleError, SchemeError
from p2q.kernels import Prepared, get_kernel
from p2q.kernels.probe import require_exact
from p2q.manifest import check_contract, read_manifest
from p2q.ops import int8_linear
from p2q.scales import check_exponents, exponent_of, is_power_of_two
from p2q.scheme import SUPPORTED
from p2q.settings import Settings, read_settings

NAME = "p2q"
_SHARD_IDS = ("q", "k", "v")  # vLLM names the parts of a fused qkv so, and numbers those of other fused layers


def register() -> None:
    """Entry point of the group `vllm.general_plugins`. May run several times in a process."""
    vllm_api.check_version()
    vllm_api.register_quantization_config(NAME)(P2QConfig)


@dataclass
class LoadedLayer:
    """A p2q linear layer after loading.

    `shards`: the checkpoint's names of the parts of a fused layer with their output features. `proved`: the scales are
    powers of two in the proved range, so that the contract holds.
    """

    name: str
    kernel: str
    prepared: Prepared
    shards: list[tuple[str, int]]
    proved: bool


class P2QConfig(vllm_api.CompressedTensorsConfig):
    """vLLM's compressed-tensors configuration, with p2q's linear method for the W8A8 int8 layers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if not arguments and not options:  # how vLLM makes a configuration of a checkpoint that has none
            raise SchemeError("the checkpoint is not quantized", expected=SUPPORTED, hint="`p2q quantize` makes it so")
        super().__init__(*arguments, **options)

    def get_name(self) -> str:
        return NAME

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        if hf_quant_cfg.get("quant_method") != "compressed-tensors":
            return None
        if user_quant not in (None, NAME):
            return None
        name = str(getattr(hf_config, "name_or_path", None) or "")
        manifest = read_manifest(Path(name)) if name else None
        if manifest is not None:
            check_contract(manifest, Path(name))
        return NAME if user_quant == NAME or manifest is not None else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        method = super().get_quant_method(layer, prefix)
        scheme = getattr(layer, "scheme", None)
        if method is None or isinstance(method, vllm_api.OUTSIDE_THE_CONTRACT):
            return method
        if not isinstance(method, vllm_api.CompressedTensorsLinearMethod):
            raise ContractError(
                "not a layer that the contract covers", tensor=prefix, expected=SUPPORTED, got=type(method).__name__
            )
        if not isinstance(scheme, vllm_api.CompressedTensorsW8A8Int8):
            raise ContractError(
                "not a layer that the contract covers", tensor=prefix, expected=SUPPORTED, got=type(scheme).__name__
            )
        if scheme.is_static_input_scheme or not scheme.input_symmetric:
            timing = "static" if scheme.is_static_input_scheme else "dynamic"
            kind = f"{timing} {'symmetric' if scheme.input_symmetric else 'asymmetric'} activations"
            raise ContractError("not a layer that the contract covers", tensor=prefix, expected=SUPPORTED, got=kind)
        del layer.scheme
        shard_names = self.packed_modules_mapping.get(prefix.rpartition(".")[2], [])
        return P2QLinearMethod(
            prefix,
            str(scheme.strategy.value if hasattr(scheme.strategy, "value") else scheme.strategy),
            shard_names,
            read_settings(vllm_api.engine_options()),
        )


@vllm_api.register_weight_loader_v2_supported_method
class P2QLinearMethod(vllm_api.LinearMethodBase):
    """Loads an int8 weight with its scales, proves the contract for it, and multiplies by the chosen kernel.

    `layer` is the module of vLLM whose parameters these are.
    """

    def __init__(self, name: str, strategy: str, shard_names: list[str], settings: Settings) -> None:
        self.name = name
        self.strategy = strategy
        self.shard_names = shard_names
        self.settings = settings

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        loader: Callable[..., None] = extra_weight_attrs["weight_loader"]
        rows = sum(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        layer.p2q_dtype = params_dtype
        layer.p2q_arrived = {"weight": set(), "weight_scale": set()}
        weight = torch.empty((rows, input_size_per_partition), dtype=torch.int8)
        weight_loader = _noting(loader, layer.p2q_arrived["weight"])
        layer.register_parameter(
            "weight", vllm_api.ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=weight_loader)
        )
        loader = _noting(loader, layer.p2q_arrived["weight_scale"])
        if self.strategy == "channel":
            scale = vllm_api.ChannelQuantScaleParameter(
                data=torch.empty((rows, 1), dtype=torch.float32), output_dim=0, weight_loader=loader
            )
        else:
            scale = vllm_api.PerTensorScaleParameter(
                data=torch.empty(len(output_partition_sizes), dtype=torch.float32), weight_loader=loader
            )
        layer.register_parameter("weight_scale", scale)

    def process_weights_after_loading(self, layer: Any) -> None:
        weight, scale = layer.weight.data, layer.weight_scale.data.reshape(-1)
        widths = list(layer.logical_widths)
        if scale.numel() != weight.shape[0]:  # one scale a shard: each keeps its own
            scale = scale.repeat_interleave(torch.tensor(widths, device=scale.device))
        shards = self._shards(widths)
        for tensor, arrived in layer.p2q_arrived.items():
            _require_all(arrived, shards, tensor, len(widths))
        proved = self._prove(weight, scale, shards)
        kernel = get_kernel(self.settings.kernel)
        if not self.settings.evaluate:
            require_exact(kernel.name, weight.device.type)
        prepared = kernel.prepare(weight, scale.contiguous(), layer.p2q_dtype)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale.reshape(-1, 1), requires_grad=False)
        layer.p2q = LoadedLayer(self.name, kernel.name, prepared, shards, proved)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        loaded: LoadedLayer = layer.p2q
        return int8_linear(x, loaded.prepared, bias, loaded.kernel, contract_bias=loaded.proved)

    def _shards(self, widths: list[int]) -> list[tuple[str, int]]:
        if len(widths) == 1 or len(self.shard_names) != len(widths):
            return [(self.name, sum(widths))]
        parent = self.name.rpartition(".")[0]
        return [
            (f"{parent}.{name}".removeprefix("."), width) for name, width in zip(self.shard_names, widths, strict=True)
        ]

    def _prove(self, weight: torch.Tensor, scale: torch.Tensor, shards: list[tuple[str, int]]) -> bool:
        """Whether the contract holds for this layer. Raises ContractError where it must and does not."""
        starts = itertools.accumulate([width for _, width in shards], initial=0)
        proved = True
        for (name, width), start in zip(shards, starts, strict=False):
            rows, scales = weight[start : start + width], scale[start : start + width]
            bad = ~torch.isfinite(scales) | (scales <= 0)
            if bad.any():
                row = int(bad.nonzero()[0])
                raise ContractError(
                    "bad scale",
                    tensor=name,
                    expected="a finite positive scale",
                    got=f"{scales[row].item()} at row {row}",
                )
            try:
                check_k(rows.shape[1])
                self._check_power_of_two(name, scales, rows.shape[1])
            except (ScaleError, ValueError) as error:
                if not self.settings.evaluate:
                    raise ContractError(f"the contract (version {CONTRACT_VERSION}) does not hold: {error}") from error
                proved = False
        return proved

    @staticmethod
    def _check_power_of_two(name: str, scales: torch.Tensor, k: int) -> None:
        odd = ~is_power_of_two(scales)
        if odd.any():
            row = int(odd.nonzero()[0])
            raise ScaleError(
                "a scale is not a power of two",
                tensor=name,
                expected="2^k",
                got=f"{scales[row].item()} at row {row}",
                hint="`p2q convert` makes it one",
            )
        check_exponents(exponent_of(scales), k, scales.dtype, file=name, tensor="weight_scale")


def _noting(loader: Callable[..., None], arrived: set[Any]) -> Callable[..., None]:
    """A weight loader that notes which shards of a fused layer it was given; None stands for all of them."""

    def load(parameter: Any, tensor: torch.Tensor, *shard: Any, **named: Any) -> None:
        loader(parameter, tensor, *shard, **named)
        for part in (*shard, *named.values()) or (None,):
            arrived.update(part if isinstance(part, tuple) else (part,))

    return load


def _require_all(arrived: set[Any], shards: list[tuple[str, int]], tensor: str, parts: int) -> None:
    """Refuse a layer of which a tensor, or a shard of it, never came: vLLM would serve what the memory held."""
    missing = [i for i in range(parts) if not {None, i, *_SHARD_IDS[i : i + 1]} & arrived]
    if missing:
        name = shards[missing[0]][0] if len(shards) == parts else shards[0][0]
        raise ContractError(
            "missing from the checkpoint", tensor=f"{name}.{tensor}", expected="it in a shard", got="none"
        )
