"""The plug-in in real vLLM: what it takes, what it leaves alone, what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from p2q.eval.prompts import PROMPTS
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from p2q.kernels.probe import probe

from .conftest import Demo, run_llm


def test_checkpoint_with_a_manifest_loads_through_p2q_and_gives_the_same_bytes(demo: Demo) -> None:
    # A third kernel, chosen by the environment, without any engine option: the streams are the demo's.
    found, output = run_llm(
        demo.converted, PROMPTS, max_tokens=64, env={"P2Q_KERNEL": "p2q"}, max_num_seqs=8, enable_prefix_caching=False
    )
    assert found is not None, output[-3000:]
    assert found["methods"] == {"P2QLinearMethod p2q True": 120}
    assert found["texts"] == [stream.text for stream in demo.report.checkpoints[1].comparisons[0].streams]


def test_stock_load_of_a_converted_checkpoint_keeps_working(demo: Demo) -> None:
    found, output = run_llm(demo.converted, PROMPTS[:1], quantization="compressed-tensors")
    assert found is not None, output[-3000:]
    assert found["methods"] == {"CompressedTensorsLinearMethod - -": 120}
    if not probe("onednn").exact:
        pytest.skip("loaded, but vLLM's own kernel is not exact on this CPU: " + probe("onednn").reason)
    assert "Paris" in found["texts"][0]


def test_engine_option_wins_over_the_environment(demo: Demo) -> None:
    found, output = run_llm(
        demo.converted, PROMPTS[:1], env={"P2Q_KERNEL": "p2q"}, additional_config={"p2q": {"kernel": "triton-order"}}
    )
    assert found is not None, output[-3000:]
    assert found["methods"] == {"P2QLinearMethod triton-order True": 120}


def test_unconverted_checkpoint_is_refused_with_the_layers_name(demo: Demo) -> None:
    found, output = run_llm(demo.quantized, PROMPTS[:1], quantization="p2q")
    assert found is None
    assert "model.layers.0.self_attn.q_proj" in output
    assert "a scale is not a power of two" in output


def edited(demo: Demo, target: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(demo.converted, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def test_one_bad_scale_is_refused_with_the_shard_of_the_fused_layer(demo: Demo, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.3.mlp.up_proj.weight_scale"][7] *= 1.5

    found, output = run_llm(edited(demo, tmp_path / "broken", spoil), PROMPTS[:1])
    assert found is None
    assert "model.layers.3.mlp.up_proj" in output
    assert "at row 7" in output


def test_missing_tensors_are_refused_and_never_served_uninitialized(demo: Demo, tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.5.self_attn.k_proj.weight"]

    found, output = run_llm(edited(demo, tmp_path / "partial", drop), PROMPTS[:1])
    assert found is None
    assert "model.layers.5.self_attn.k_proj" in output
    assert "missing" in output


def per_tensor(demo: Demo, target: Path) -> Path:
    """The converted checkpoint with one scale a weight, the row's largest."""

    def one_scale(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".weight_scale")]:
            weight = name.removesuffix("_scale")
            largest = tensors[name].max()
            tensors[weight] = (tensors[weight] * (tensors[name] / largest)).round().to(torch.int8)
            tensors[name] = largest.reshape(1)

    folder = edited(demo, target, one_scale)
    (folder / "p2q_manifest.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_fused_layers_with_one_scale_a_shard_keep_each_shards_scale(demo: Demo, tmp_path: Path) -> None:
    folder = per_tensor(demo, tmp_path / "tensor")
    found, output = run_llm(folder, PROMPTS[:1], max_tokens=8, quantization="p2q")
    assert found is not None, output[-3000:]
    assert found["methods"] == {"P2QLinearMethod p2q True": 120}
    with safe_open(folder / "model.safetensors", framework="pt") as f:
        names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
        scales = [f.get_tensor(f"{name}.weight_scale").item() for name in names]
        rows = [f.get_slice(f"{name}.weight").get_shape()[0] for name in names]
    merged: list[list[float]] = []
    for scale, count in zip(scales, rows, strict=True):
        if merged and merged[-1][0] == scale:
            merged[-1][1] += count
        else:
            merged.append([scale, count])
    assert len(merged) > 1
    assert found["scales"] == merged


def test_engine_with_its_default_settings_compiles_around_the_layers(demo: Demo) -> None:
    found, output = run_llm(demo.converted, PROMPTS[:1], enforce_eager=False)
    assert found is not None, output[-3000:]
    assert found["methods"] == {"P2QLinearMethod p2q True": 120}
    assert found["texts"][0].startswith(" Paris")


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="needs an x86 CPU with AVX2")
def test_kernel_that_is_not_exact_here_is_refused_by_name(demo: Demo) -> None:
    found, output = run_llm(demo.converted, PROMPTS[:1], env={"P2Q_KERNEL": "onednn", "ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert found is None
    assert "kernel onednn is not exact on this machine" in output
