"""What vLLM calls: the quantization method `p2q` and its linear method.

A compressed-tensors checkpoint is served by p2q when it has a p2q manifest or when `quantization="p2q"` is asked for;
`quantization="compressed-tensors"` loads it by vLLM's own method, untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from p2q import vllm_api
from p2q.errors import ContractError, SchemeError
from p2q.experts import P2QExpertsMethod
from p2q.loading import LoadedLayer, Loading, noting, one_input_scale, prove, require
from p2q.manifest import check_contract, read_manifest
from p2q.ops import int8_linear
from p2q.scheme import SUPPORTED
from p2q.settings import read_settings

NAME = "p2q"
_SHARD_IDS = ("q", "k", "v")  # vLLM names the parts of a fused qkv so, and numbers those of other fused layers


def register() -> None:
    """Entry point of the group `vllm.general_plugins`. May run several times in a process."""
    vllm_api.check_version()
    vllm_api.register_quantization_config(NAME)(P2QConfig)


class P2QConfig(vllm_api.CompressedTensorsConfig):
    """vLLM's compressed-tensors configuration, with p2q's linear method for the W8A8 int8 layers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if not arguments and not options:  # how vLLM makes a configuration of a checkpoint that has none
            raise SchemeError("the checkpoint is not quantized", expected=SUPPORTED, hint="`p2q quantize` makes it so")
        super().__init__(*arguments, **options)
        self.loading: Loading | None = None

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
        if isinstance(layer, vllm_api.RoutedExperts):
            scheme = vllm_api.scheme_of_experts(self, layer, prefix)
            if scheme is not None:
                return P2QExpertsMethod(prefix, layer.moe_config, scheme, self._loading())
        method = super().get_quant_method(layer, prefix)
        if method is None or isinstance(method, vllm_api.OUTSIDE_THE_CONTRACT):
            return method
        scheme = getattr(layer, "scheme", None)
        if not isinstance(method, vllm_api.CompressedTensorsLinearMethod):
            raise ContractError(
                "not a layer that the contract covers", tensor=prefix, expected=SUPPORTED, got=type(method).__name__
            )
        if not isinstance(scheme, vllm_api.CompressedTensorsW8A8Int8):
            raise ContractError(
                "not a layer that the contract covers", tensor=prefix, expected=SUPPORTED, got=type(scheme).__name__
            )
        if not scheme.input_symmetric:
            raise ContractError(
                "not a layer that the contract covers", tensor=prefix, expected=SUPPORTED, got="asymmetric activations"
            )
        del layer.scheme
        parts = self.packed_modules_mapping.get(prefix.rpartition(".")[2], [])
        return P2QLinearMethod(
            prefix,
            str(getattr(scheme.strategy, "value", scheme.strategy)),
            parts,
            static=scheme.is_static_input_scheme,
            loading=self._loading(),
        )

    def _loading(self) -> Loading:
        # The configuration is made before the engine's options are known; the first layer that asks finds them.
        if self.loading is None:
            self.loading = Loading(read_settings(vllm_api.engine_options()))
        return self.loading


@vllm_api.register_weight_loader_v2_supported_method
class P2QLinearMethod(vllm_api.LinearMethodBase):
    """Loads an int8 weight with its scales, proves the contract for it, and multiplies by the chosen kernel.

    `layer` is the module of vLLM whose parameters these are.
    """

    def __init__(self, name: str, strategy: str, parts: list[str], *, static: bool, loading: Loading) -> None:
        self.name = name
        self.strategy = strategy
        self.parts = parts
        self.static = static
        self.loading = loading

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
        rows, widths = sum(output_partition_sizes), output_partition_sizes
        layer.logical_widths = widths
        layer.p2q_dtype = params_dtype
        layer.p2q_arrived = {}

        def register(tensor: str, parameter: type, data: torch.Tensor, **dims: int) -> None:
            arrived: set[Any] = set()
            layer.p2q_arrived[tensor] = arrived
            layer.register_parameter(tensor, parameter(data=data, weight_loader=noting(loader, arrived), **dims))

        weight = torch.empty((rows, input_size_per_partition), dtype=torch.int8)
        register("weight", vllm_api.ModelWeightParameter, weight, input_dim=1, output_dim=0)
        if self.strategy == "channel":
            scale = torch.empty((rows, 1), dtype=torch.float32)
            register("weight_scale", vllm_api.ChannelQuantScaleParameter, scale, output_dim=0)
        else:
            register("weight_scale", vllm_api.PerTensorScaleParameter, torch.empty(len(widths), dtype=torch.float32))
        if self.static:
            register("input_scale", vllm_api.PerTensorScaleParameter, torch.empty(len(widths), dtype=torch.float32))
        self.loading.awaited.add(self.name)

    def process_weights_after_loading(self, layer: Any) -> None:
        weight, scale = layer.weight.data, layer.weight_scale.data.reshape(-1)
        widths = list(layer.logical_widths)
        if scale.numel() != weight.shape[0]:  # one scale a shard: each keeps its own
            scale = scale.repeat_interleave(torch.tensor(widths, device=scale.device))
        shards = self._shards(widths)
        names = [name for name, _ in shards]
        for tensor, arrived in layer.p2q_arrived.items():
            _require_all(arrived, names, tensor, len(widths))
        proved = prove(shards, weight, scale, evaluate=self.loading.settings.evaluate)
        kernel, why = self.loading.choose(self.name, names, weight.device)
        prepared = kernel.prepare(weight, scale.contiguous(), layer.p2q_dtype)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale.reshape(-1, 1), requires_grad=False)
        layer.p2q = LoadedLayer(self.name, kernel.name, why, prepared, tuple(weight.shape), shards, proved)
        if self.static:
            layer.p2q.input_scale = one_input_scale(self.name, layer.input_scale.data)
        self.loading.done(self.name, [layer.p2q])

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        loaded: LoadedLayer = layer.p2q
        return int8_linear(
            x, loaded.prepared, bias, loaded.kernel, contract_bias=loaded.proved, input_scale=loaded.input_scale
        )

    def _shards(self, widths: list[int]) -> list[tuple[str, int]]:
        if len(widths) == 1 or len(self.parts) != len(widths):
            return [(self.name, sum(widths))]
        parent = self.name.rpartition(".")[0]
        return [(f"{parent}.{name}".removeprefix("."), width) for name, width in zip(self.parts, widths, strict=True)]


def _require_all(arrived: set[Any], names: list[str], tensor: str, parts: int) -> None:
    """Refuse a layer of which a tensor, or a shard of it, never came."""
    for i in range(parts):
        name = names[i] if len(names) == parts else names[0]
        require(bool({None, i, *_SHARD_IDS[i : i + 1]} & arrived), f"{name}.{tensor}")
