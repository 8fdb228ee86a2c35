"""The experts of a mixture-of-experts layer in vLLM, by the contract.

vLLM's own int8 kernel for experts adds int8 products in float32 across blocks of K (fused_moe.py, fused_moe_kernel),
which is not exact past 2^24. Here every expert's products are those of p2q's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from p2q import vllm_api
from p2q.errors import ContractError
from p2q.loading import LoadedLayer, Loading, prove, require
from p2q.ops import int8_experts

SUPPORTED = "symmetric int8 weights per channel and symmetric int8 activations, dynamic per token"
_PROJECTIONS = {"w13": ("w1", "w3"), "w2": ("w2",)}
"""vLLM's parameters, and the names by which its loader tells the projections of an expert: gate, up; down."""


class P2QExpertsMethod(vllm_api.FusedMoEMethodBase):
    """Loads the int8 weights of all experts of a layer, proves the contract for them, and multiplies.

    `layer` is the module of vLLM whose parameters these are. Its weights are (E, 2 * I, H), gate first, and (E, H, I).
    """

    def __init__(self, name: str, moe: Any, scheme: dict[str, Any], loading: Loading) -> None:
        super().__init__(moe)
        self.name = name
        self.loading = loading
        weights, inputs = scheme["weights"], scheme["input_activations"]
        if not (_is_int8(weights, "channel", dynamic=False) and _is_int8(inputs, "token", dynamic=True)):
            raise ContractError(
                "not experts that the contract covers", tensor=name, expected=SUPPORTED, got=f"{weights}, {inputs}"
            )

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self._check(layer)
        layer.p2q_dtype = params_dtype
        layer.p2q_arrived = {}
        loader = extra_weight_attrs.pop("weight_loader")
        features = {"w13": (2 * intermediate_size_per_partition, hidden_size)}
        features["w2"] = (hidden_size, intermediate_size_per_partition)
        for name, (n, k) in features.items():
            weight = torch.empty((num_experts, n, k), dtype=torch.int8)
            scale = torch.empty((num_experts, n, 1), dtype=torch.float32)
            for tensor, data in ((f"{name}_weight", weight), (f"{name}_weight_scale", scale)):
                parameter = torch.nn.Parameter(data, requires_grad=False)
                layer.register_parameter(tensor, parameter)
                arrived: set[tuple[str, int]] = set()
                layer.p2q_arrived[tensor] = arrived
                # "channel" is vLLM's word for one scale a row.
                attributes = {
                    **extra_weight_attrs,
                    "weight_loader": _noting(loader, arrived),
                    "quant_method": "channel",
                }
                for attribute, value in attributes.items():
                    setattr(parameter, attribute, value)
        self.loading.awaited.add(self.name)

    def _check(self, layer: Any) -> None:
        """Raise ContractError for what p2q does not do with experts."""
        activation = str(getattr(layer.activation, "value", layer.activation))
        parallel = self.moe.moe_parallel_config
        for problem, expected, got in (
            (activation != "silu", "the activation silu", activation),
            (parallel.use_ep, "experts that are not spread over devices", "expert parallelism"),
            (layer.apply_router_weight_on_input, "router weights on the outputs", "router weights on the inputs"),
            (getattr(self.moe, "has_bias", False), "experts without biases", "biases"),
        ):
            if problem:
                raise ContractError(
                    "not experts that the contract covers", tensor=self.name, expected=expected, got=got
                )

    def process_weights_after_loading(self, layer: Any) -> None:
        evaluate = self.loading.settings.evaluate
        names = dict(zip(("w1", "w3", "w2"), vllm_api.names_of_experts(layer), strict=True))
        loaded = []
        for name, projections in _PROJECTIONS.items():
            weight, scale = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data[..., 0]
            (experts, n, k), width = weight.shape, weight.shape[1] // len(projections)
            own = [(part, i) for i in range(experts) for part in projections]
            shards = [(f"{self.name}.{i}.{names[part]}", width) for part, i in own]
            for (shard, _), key in zip(shards, own, strict=True):
                for tensor in ("weight", "weight_scale"):
                    require(key in layer.p2q_arrived[f"{name}_{tensor}"], f"{shard}.{tensor}")
            proved = prove(shards, weight.flatten(0, 1), scale.flatten(), evaluate=evaluate)
            kernel, why = self.loading.choose(self.name, [shard for shard, _ in shards], weight.device)
            prepared = kernel.prepare_grouped(weight, scale.contiguous(), layer.p2q_dtype)
            label = f"{self.name} ({', '.join(names[part] for part in projections)})"
            loaded.append(LoadedLayer(label, kernel.name, why, prepared, (n, k), shards, proved, experts))
        layer.p2q_experts = loaded
        self.loading.done(self.name, loaded)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None  # what vLLM's own kernels for experts would need

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        gate_up, down = layer.p2q_experts
        return int8_experts(
            x,
            topk_weights,
            topk_ids,
            gate_up.prepared,
            down.prepared,
            (gate_up.kernel, down.kernel),
            gate_up.experts,
        )


def _is_int8(args: Any, strategy: str, *, dynamic: bool) -> bool:
    return (
        args is not None
        and (args.type, args.num_bits, args.strategy) == ("int", 8, strategy)
        and bool(args.symmetric)
        and bool(args.dynamic) is dynamic
    )


def _noting(loader: Callable[..., Any], arrived: set[tuple[str, int]]) -> Callable[..., Any]:
    """A weight loader of experts that notes which projection of which expert it was given."""

    def load(parameter: Any, tensor: torch.Tensor, *names: Any, shard_id: str, expert_id: int, **named: Any) -> Any:
        result = loader(parameter, tensor, *names, shard_id=shard_id, expert_id=expert_id, **named)
        arrived.add((shard_id, expert_id))
        return result

    return load
