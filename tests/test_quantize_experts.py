"""Mixtures of experts: one tensor an expert and projection, or all experts in one; routers stay."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2q.checkpoint import open_checkpoint
from p2q.convert import convert
from p2q.errors import CheckpointError, SchemeError
from p2q.inspection import inspect
from p2q.quantize import Scales, quantize, quantize_weight
from p2q.scheme import quantized_layers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def save_qwen3_moe(path: Path) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, head_dim=16, **SIZES)
    return save(Qwen3MoeForCausalLM, config, path)


def save_mixtral(path: Path) -> Path:
    from transformers import MixtralConfig, MixtralForCausalLM

    return save(MixtralForCausalLM, MixtralConfig(num_local_experts=3, **SIZES), path)


def save(model: Any, config: Any, path: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model(config).to(torch.bfloat16).save_pretrained(path)
    return path


EXPERTS = {
    save_qwen3_moe: ("model.layers.0.mlp.gate", "model.layers.0.mlp.experts.3.down_proj", 4),
    save_mixtral: ("model.layers.0.block_sparse_moe.gate", "model.layers.0.block_sparse_moe.experts.2.w2", 3),
}
makers = pytest.mark.parametrize("make", EXPERTS, ids=lambda make: make.__name__.removeprefix("save_"))


@makers
@pytest.mark.parametrize("scales", ["absmax", "power-of-two"])
def test_quantize_experts_have_the_values_of_each_weight_and_routers_stay(
    make: Callable[[Path], Path], scales: Scales, tmp_path: Path
) -> None:
    router, expert, experts = EXPERTS[make]
    source = make(tmp_path / "source")
    done = quantize(source, tmp_path / "target", scales=scales)
    assert len(done.layers) == 4 + 3 * experts
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "target" / "model.safetensors")
    assert torch.equal(after[f"{router}.weight"], before[f"{router}.weight"])
    for name in done.layers:
        levels, scale, _ = quantize_weight(before[f"{name}.weight"], scales, file="f", tensor=name)
        assert torch.equal(after[f"{name}.weight"], levels)
        assert torch.equal(after[f"{name}.weight_scale"], scale)
    assert expert in done.layers
    config = json.loads((tmp_path / "target" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", router]
    assert [layer.name for layer in quantized_layers(open_checkpoint(tmp_path / "target"))] == done.layers
    assert inspect(tmp_path / "target").contract_holds == (scales == "power-of-two")


@makers
def test_quantize_then_convert_experts_satisfies_the_contract(make: Callable[[Path], Path], tmp_path: Path) -> None:
    quantize(make(tmp_path / "source"), tmp_path / "w8a8")
    convert(tmp_path / "w8a8", tmp_path / "p2q")
    assert inspect(tmp_path / "p2q").contract_holds


def fuse(path: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda _: None) -> Path:
    """Put the experts of a saved Qwen3-MoE into tensors of three dimensions, as its code holds them."""
    tensors = load_file(path / "model.safetensors")
    experts = "model.layers.0.mlp.experts"

    def take(projection: str) -> list[torch.Tensor]:
        return [tensors.pop(f"{experts}.{e}.{projection}.weight") for e in range(4)]

    pairs = zip(take("gate_proj"), take("up_proj"), strict=True)
    tensors[f"{experts}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    tensors[f"{experts}.down_proj"] = torch.stack(take("down_proj"))
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_quantize_fused_experts_equal_single_ones(tmp_path: Path) -> None:
    quantize(save_qwen3_moe(tmp_path / "single"), tmp_path / "single-w8a8")
    quantize(fuse(save_qwen3_moe(tmp_path / "fused")), tmp_path / "fused-w8a8")
    for done in ("w8a8", "p2q"):
        if done == "p2q":
            for kind in ("single", "fused"):
                convert(tmp_path / f"{kind}-w8a8", tmp_path / f"{kind}-p2q")
        single, fused = (load_file(tmp_path / f"{kind}-{done}" / "model.safetensors") for kind in ("single", "fused"))
        experts = "model.layers.0.mlp.experts"
        for e in range(4):
            for suffix in ("", "_scale"):
                parts = [single[f"{experts}.{e}.{part}_proj.weight{suffix}"] for part in ("gate", "up")]
                assert torch.equal(fused[f"{experts}.gate_up_proj{suffix}"][e], torch.cat(parts))
                assert torch.equal(
                    fused[f"{experts}.down_proj{suffix}"][e], single[f"{experts}.{e}.down_proj.weight{suffix}"]
                )
    assert inspect(tmp_path / "fused-p2q").contract_holds


def test_quantize_fused_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    def transpose(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.experts.down_proj"
        tensors[name] = tensors[name].transpose(1, 2).contiguous()

    source = fuse(save_qwen3_moe(tmp_path / "source"), transpose)
    with pytest.raises(CheckpointError, match=r"experts\.down_proj: the weight does not fit config\.json"):
        quantize(source, tmp_path / "target")


def test_quantize_experts_with_columns_as_outputs_are_refused(tmp_path: Path) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(num_local_experts=2, head_dim=16, layer_types=["full_attention"], **SIZES)
    source = save(GptOssForCausalLM, config, tmp_path / "source")
    with pytest.raises(SchemeError, match=r"experts\.\w+: experts whose columns are output features"):
        quantize(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()
