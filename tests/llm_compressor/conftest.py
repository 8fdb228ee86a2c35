"""Checkpoints in the layouts of llm-compressor 0.14, made without it: names, dtypes, shapes and configurations."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, EXPERT, VOCABULARY, HEAD, KV_HEADS, LAYERS, EXPERTS = 64, 96, 32, 256, 16, 2, 2, 4
SHARD_BYTES = 36_000
MODELS = {"llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM"}
MOE = {"qwen3_moe": "mlp", "mixtral": "block_sparse_moe"}

Tensors = dict[str, torch.Tensor]
Args = dict[str, Any]


def args(strategy: str, **changes: Any) -> Args:
    """The settings of what is quantized, with every field that is written."""
    unused = ("actorder", "block_structure", "group_size", "observer", "scale_dtype", "zp_dtype")
    symmetric = changes.get("symmetric", True)
    return {
        **dict.fromkeys(unused),
        "dynamic": False,
        "num_bits": 8,
        "observer_kwargs": {},
        "strategy": strategy,
        "symmetric": True,
        "type": "int",
        "zp_dtype": None if symmetric else "torch.int8",
        **changes,
    }


def weights(strategy: str = "channel", **changes: Any) -> Args:
    return args(strategy, **{"observer": "memoryless_minmax", **changes})


def dynamic(**changes: Any) -> Args:
    return args("token", dynamic=True, **changes)


def static(**changes: Any) -> Args:
    return args("tensor", observer="minmax", **changes)


@dataclass(frozen=True)
class Group:
    """One of `config_groups`."""

    weights: Args = field(default_factory=weights)
    inputs: Args | None = field(default_factory=dynamic)
    targets: tuple[str, ...] = ("Linear",)
    form: str = "int-quantized"

    def targets_linear(self, name: str) -> bool:
        return any(
            target == "Linear" or (re.match(target[3:], name) if target.startswith("re:") else target == name)
            for target in self.targets
        )

    def config(self) -> dict[str, Any]:
        return {
            "format": self.form,
            "input_activations": self.inputs,
            "output_activations": None,
            "targets": list(self.targets),
            "weights": self.weights,
        }


@dataclass(frozen=True)
class Layout:
    """A model and a recipe. plain: patterns of the linear layers that the recipe leaves alone, besides routers."""

    model: str = "llama"
    dtype: torch.dtype = torch.bfloat16
    groups: tuple[Group, ...] = (Group(),)
    plain: tuple[str, ...] = ("lm_head",)
    form: str = "int-quantized"
    kv_cache: Args | None = None
    transforms: bool = False
    bias: bool = False
    tied: bool = False
    sharded: bool = False
    smoothed: bool = False

    def linear(self) -> dict[str, tuple[int, int]]:
        """Shapes of all linear layers that may be quantized, routers included, in the order of the model."""
        shapes = {}
        for layer in range(LAYERS):
            block = f"model.layers.{layer}"
            for name, rows in (("q", HIDDEN), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD), ("o", HIDDEN)):
                shapes[f"{block}.self_attn.{name}_proj"] = rows, HIDDEN
            if self.model == "llama":
                parts = [(f"{block}.mlp", INTERMEDIATE)]
            else:
                shapes[f"{block}.{MOE[self.model]}.gate"] = EXPERTS, HIDDEN
                parts = [(f"{block}.{MOE[self.model]}.experts.{expert}", EXPERT) for expert in range(EXPERTS)]
            for part, size in parts:
                shapes |= {f"{part}.{name}_proj": (size, HIDDEN) for name in ("gate", "up")}
                shapes[f"{part}.down_proj"] = HIDDEN, size
        return shapes if self.tied else {**shapes, "lm_head": (VOCABULARY, HIDDEN)}

    def group_of(self, name: str) -> Group | None:
        """None where the layer stays as it is."""
        if is_router(name) or any(re.match(pattern, name) for pattern in self.plain):
            return None
        return next((group for group in self.groups if group.targets_linear(name)), None)

    def quantized(self) -> list[str]:
        return [name for name in self.linear() if self.group_of(name)]

    def config(self) -> dict[str, Any]:
        """config.json, where patterns to ignore have become the names of the layers that they matched."""
        ignore = [name for name in self.linear() if self.group_of(name) is None]
        quantization = {
            "config_groups": {f"group_{i}": group.config() for i, group in enumerate(self.groups)},
            "format": self.form,
            "global_compression_ratio": None,
            "ignore": [*ignore, *(["lm_head"] if self.tied else [])] if self.groups else [],
            "kv_cache_scheme": self.kv_cache,
            "quant_method": "compressed-tensors",
            "quantization_status": "frozen" if self.form == "dense" and self.groups else "compressed",
            "sparsity_config": {},
            "transform_config": {"config_groups": {"R4": online_rotation()}} if self.transforms else {},
            "version": "0.19.0",
        }
        return {
            "architectures": [MODELS[self.model]],
            "dtype": str(self.dtype).removeprefix("torch."),
            "hidden_size": HIDDEN,
            "model_type": self.model,
            "num_hidden_layers": LAYERS,
            "quantization_config": quantization,
            "tie_word_embeddings": self.tied,
            "transformers_version": "5.17.0",
        }

    def tensors(self) -> Tensors:
        """All tensors, a layer's scales before its weight."""
        random = torch.Generator().manual_seed(11)

        def values(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=random) * 0.05).to(self.dtype)

        def scale(*shape: int) -> torch.Tensor:
            return (torch.rand(shape, generator=random) * 0.02 + 0.003).to(self.dtype)

        found: Tensors = {}
        if any("Embedding" in group.targets for group in self.groups):
            found |= packed("model.embed_tokens", values(VOCABULARY, HIDDEN), 8, None)
        else:
            found["model.embed_tokens.weight"] = values(VOCABULARY, HIDDEN)
        for name, shape in self.linear().items():
            weight, group = values(*shape), self.group_of(name)
            found |= {f"{name}.weight": weight} if group is None else quantized(name, weight, group)
            if group and is_static(group):
                found[f"{name}.input_scale"] = scale(1)
                if group.inputs and not group.inputs["symmetric"]:
                    found[f"{name}.input_zero_point"] = torch.tensor([-3], dtype=torch.int8)
            if self.bias and name != "lm_head":
                found[f"{name}.bias"] = values(shape[0])
        for layer in range(LAYERS):
            block = f"model.layers.{layer}"
            found |= {f"{block}.{name}_layernorm.weight": values(HIDDEN) for name in ("input", "post_attention")}
            if self.model == "qwen3_moe":
                found |= {f"{block}.self_attn.{name}_norm.weight": values(HEAD) for name in "qk"}
            if self.kv_cache:
                form = (KV_HEADS, 1, 1) if self.kv_cache["strategy"] == "attn_head" else (1,)
                found |= {f"{block}.self_attn.{name}_scale": scale(*form) for name in "kv"}
        if self.transforms:
            found["model.layers.0.mlp.down_proj.R4_input.weight"] = values(32, 32).to(torch.float64)
        return {**found, "model.norm.weight": values(HIDDEN)}

    def save(self, path: Path) -> Path:
        """The whole directory."""
        path.mkdir(parents=True)
        tensors, metadata = self.tensors(), {"format": "pt"}
        (path / "config.json").write_text(json.dumps(self.config(), indent=2, sort_keys=True) + "\n")
        (path / "generation_config.json").write_text('{\n  "eos_token_id": 2\n}\n')
        # Not what a safe loader of YAML takes: it must be carried over unread.
        tag = "    SmoothQuantModifier:\n      mappings:\n      - !!python/tuple\n        - ['re:.*q_proj']\n"
        recipe = "default_stage:\n  default_modifiers:\n    GPTQModifier:\n      targets: [Linear]\n"
        (path / "recipe.yaml").write_text(recipe + (tag if self.smoothed else ""))
        if not self.sharded:
            save_file(tensors, path / "model.safetensors", metadata)
            return path
        parts: list[Tensors] = [{}]
        for name, tensor in tensors.items():
            if parts[-1] and sum(other.nbytes for other in parts[-1].values()) + tensor.nbytes > SHARD_BYTES:
                parts.append({})
            parts[-1][name] = tensor
        files = {f"model-{i + 1:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts)}
        for file, part in files.items():
            save_file(part, path / file, metadata)
        total = {
            "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
            "total_size": sum(tensor.nbytes for tensor in tensors.values()),
        }
        index = {"metadata": total, "weight_map": {name: file for file, part in files.items() for name in part}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        return path


def is_static(group: Group) -> bool:
    return group.inputs is not None and not group.inputs["dynamic"]


def is_router(name: str) -> bool:
    return name.endswith((".mlp.gate", ".block_sparse_moe.gate"))


def quantized(name: str, weight: torch.Tensor, group: Group) -> Tensors:
    """What is stored of a layer's weight: absmax over 127.5 as the scale, in the model's dtype."""
    how = group.weights
    if group.form == "pack-quantized":
        return packed(name, weight, how["num_bits"], how["group_size"])
    if how["strategy"] == "tensor":
        rows = weight.reshape(1, -1)
    elif how["strategy"] == "group":
        rows = weight.reshape(-1, how["group_size"])
    else:
        rows = weight
    scale = (rows.abs().amax(dim=1, keepdim=True).to(torch.float32) / 127.5).to(weight.dtype)
    codes = (rows / scale).round().clamp(-128, 127).to(torch.int8).reshape(weight.shape)
    stored = scale.reshape(1) if how["strategy"] == "tensor" else scale.reshape(len(weight), -1)
    found = {f"{name}.weight_scale": stored, f"{name}.weight": weight if group.form == "dense" else codes}
    if not how["symmetric"] or group.form == "dense":
        zeros = torch.full(stored.shape, 0 if how["symmetric"] else 5, dtype=torch.int8)
        found[f"{name}.weight_zero_point"] = zeros
    return found


def packed(name: str, weight: torch.Tensor, bits: int, group_size: int | None) -> Tensors:
    """Several values in one int32, as weights of 16-bit activations are stored."""
    rows, columns = weight.shape
    return {
        f"{name}.weight_scale": weight[:, : columns // (group_size or columns)].abs().clone(),
        f"{name}.weight_packed": torch.arange(rows * columns * bits // 32, dtype=torch.int32).reshape(rows, -1),
        f"{name}.weight_shape": torch.tensor([rows, columns]),
    }


def online_rotation() -> dict[str, Any]:
    """SpinQuant's R4, which the inputs of down_proj go through. (R1 and R2, merged into the weights, are left out.)"""
    places = [("input", False), ("weight_input", True)]
    return {
        "apply": [
            {"ignore": [], "inverse": inverse, "location": where, "targets": ["re:.*down_proj$"]}
            for where, inverse in places
        ],
        "head_dim": 32,
        "precision": "torch.float64",
        "randomize": False,
        "requires_grad": False,
        "type": "hadamard",
    }


def kv_cache(strategy: str = "tensor", kind: str = "float") -> Args:
    return args(strategy, type=kind)


ATTENTION, MLP = ("re:.*self_attn.*",), ("re:.*mlp.*",)
GPTQ, STATIC = (Group(weights(actorder="static")),), (Group(inputs=static()),)
PACKED: dict[str, Any] = {"form": "pack-quantized", "inputs": None}

CONVERTIBLE = {
    "rtn": Layout(),
    "rtn-fp16": Layout(dtype=torch.float16),
    "rtn-fp32": Layout(dtype=torch.float32),
    "rtn-mse": Layout(groups=(Group(weights(observer="mse")),)),
    "rtn-bias": Layout(bias=True),
    "rtn-tied": Layout(tied=True),
    "rtn-lmhead": Layout(plain=()),
    "rtn-sharded": Layout(sharded=True),
    "rtn-layer-targets": Layout(
        groups=(Group(targets=("re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$", "model.layers.0.mlp.gate_proj")),),
        plain=(r"model\.layers\.1\.", "lm_head"),
    ),
    "gptq": Layout(groups=GPTQ),
    "gptq-actorder-group": Layout(groups=(Group(weights(actorder="weight")),)),
    "smoothquant-gptq": Layout(groups=GPTQ, smoothed=True),
    "dynamic-sym-wtensor": Layout(groups=(Group(weights("tensor")),)),
    "static-sym-wchannel": Layout(groups=STATIC),
    "static-sym-wtensor": Layout(groups=(Group(weights("tensor"), static()),)),
    "two-groups": Layout(
        groups=(Group(inputs=static(), targets=ATTENTION), Group(targets=MLP)),
        plain=(r".*layers\.1\.mlp\.down_proj$", r".*layers\.0\.self_attn\.o_proj$", "lm_head"),
    ),
    "two-groups-dynamic": Layout(
        groups=(Group(weights("tensor"), targets=ATTENTION), Group(targets=MLP)),
        plain=(r".*layers\.1\.mlp\.down_proj$", "lm_head"),
    ),
    "kv-float": Layout(kv_cache=kv_cache()),
    "kv-float-head": Layout(kv_cache=kv_cache("attn_head")),
    "kv-int": Layout(kv_cache=kv_cache(kind="int")),
    "qwen3moe-rtn": Layout("qwen3_moe"),
    "qwen3moe-gptq": Layout("qwen3_moe", groups=GPTQ),
    "qwen3moe-static": Layout("qwen3_moe", groups=STATIC),
    "qwen3moe-sharded": Layout("qwen3_moe", sharded=True),
    "mixtral-rtn": Layout("mixtral"),
    "mixtral-gptq": Layout("mixtral", groups=GPTQ),
}

REFUSED = {
    "dynamic-asym": Layout(groups=(Group(inputs=dynamic(symmetric=False)),)),
    "static-asym": Layout(groups=(Group(inputs=static(symmetric=False)),)),
    "weights-asym": Layout(groups=(Group(weights(symmetric=False)),)),
    "weights-group": Layout(groups=(Group(weights("group", group_size=32)),)),
    "w8a8-plus-w8a16": Layout(
        groups=(Group(targets=ATTENTION, **PACKED), Group(targets=MLP)),
        form="mixed-precision",
    ),
    "w8a8-plus-w4a16": Layout(
        groups=(Group(weights("group", num_bits=4, group_size=32), targets=ATTENTION, **PACKED), Group(targets=MLP)),
        form="mixed-precision",
    ),
    "rtn-embed": Layout(groups=(Group(targets=("Embedding",), **PACKED), Group()), form="mixed-precision"),
    "rtn-uncompressed": Layout(groups=(Group(form="dense"),), form="dense"),
    "spinquant-rtn": Layout(transforms=True),
    "kv-only": Layout(groups=(), form="dense", kv_cache=kv_cache()),
}


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk and how it was made."""

    name: str
    layout: Layout
    path: Path


@pytest.fixture
def save_layout(tmp_path: Path) -> Callable[[str], Saved]:
    """Save one of the layouts by its name."""

    def save(name: str) -> Saved:
        layout = {**CONVERTIBLE, **REFUSED}[name]
        return Saved(name, layout, layout.save(tmp_path / "source"))

    return save


@pytest.fixture(params=CONVERTIBLE)
def convertible(request: pytest.FixtureRequest, save_layout: Callable[[str], Saved]) -> Saved:
    """Each of the layouts that can be converted."""
    return save_layout(request.param)


@pytest.fixture(params=[name for name, layout in CONVERTIBLE.items() if any(map(is_static, layout.groups))])
def with_static(request: pytest.FixtureRequest, save_layout: Callable[[str], Saved]) -> Saved:
    """Each of those with static activation scales."""
    return save_layout(request.param)
