"""The converter under compressed-tensors' own `convert_checkpoint`: the tensors of `p2q convert`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.entrypoints.convert import convert_checkpoint
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file

from p2q.checkpoint import open_checkpoint
from p2q.convert import convert
from p2q.converter import PowerOfTwoConverter
from p2q.errors import CheckpointError, P2QError, ScaleError, SchemeError
from p2q.inspection import inspect
from p2q.scales import RULES, Rule
from p2q.scheme import read_quantization_config

Make = Callable[..., Path]
Config = Callable[..., dict[str, Any]]
Tensors = dict[str, torch.Tensor]
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
FUSED = "model.layers.0.mlp.experts.gate_up_proj"
A, B, C = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
WHOLE = {
    A: [f"{UP}.weight", f"{UP}.weight_scale", f"{UP}.input_scale", FUSED, f"{FUSED}_scale"],
    B: [f"{DOWN}.weight", f"{DOWN}.weight_scale", f"{DOWN}.input_scale", "lm_head.weight"],
    C: ["model.norm.weight", "model.embed_tokens.weight"],
}
APART = {
    A: [f"{UP}.weight", f"{DOWN}.weight_scale", f"{FUSED}_scale", "model.norm.weight"],
    B: [f"{DOWN}.weight", "lm_head.weight", f"{UP}.input_scale"],
    C: [f"{UP}.weight_scale", f"{DOWN}.input_scale", "model.embed_tokens.weight", FUSED],
}


@pytest.fixture
def tensors(w8a8: Tensors) -> Tensors:
    """A layer per channel, one per tensor, experts in one tensor, and static activation scales."""
    random = torch.Generator().manual_seed(31)
    w8a8[f"{DOWN}.weight_scale"] = torch.tensor([0.00713]).to(torch.bfloat16)
    w8a8[f"{UP}.input_scale"] = torch.tensor([0.031])
    w8a8[f"{DOWN}.input_scale"] = torch.tensor([0.25]).to(torch.bfloat16)
    w8a8[FUSED] = torch.randint(-128, 128, (3, 5, 8), generator=random).to(torch.int8)
    w8a8[f"{FUSED}_scale"] = (torch.rand(3, 5, 1, generator=random) * 0.01 + 0.001).to(torch.float16)
    return w8a8


@pytest.fixture
def config(make_config: Config) -> dict[str, Any]:
    """Static activations in the linear layers, dynamic ones in the experts."""
    found = make_config()
    group = found["config_groups"]["group_0"]
    static = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
    found["config_groups"] = {
        "group_0": {**group, "targets": ["re:.*mlp.(up|down)_proj$"], "input_activations": static},
        "group_1": {**group, "targets": ["re:.*experts.*"]},
    }
    return found


def load(checkpoint: Path) -> Tensors:
    shards = open_checkpoint(checkpoint).shards
    return {name: tensor for shard in shards for name, tensor in load_file(checkpoint / shard).items()}


def content(tensors: Tensors) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {
        name: (tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


def through_library(source: Path, target: Path, *, max_workers: int = 1, **options: Any) -> None:
    converter = PowerOfTwoConverter(source, **options)
    convert_checkpoint(str(source), str(target), converter=converter, max_workers=max_workers)


# The same tensors


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("input_scales", [False, True], ids=["weights", "inputs"])
@pytest.mark.parametrize("shards", [None, WHOLE, APART], ids=["single", "whole", "apart"])
def test_converter_gives_the_tensors_of_convert(
    make_checkpoint: Make,
    tensors: Tensors,
    config: dict[str, Any],
    tmp_path: Path,
    shards: dict[str, list[str]] | None,
    input_scales: bool,
    rule: Rule,
) -> None:
    source = make_checkpoint(tensors, quantization=config, shards=shards)
    convert(source, tmp_path / "ours", rule=rule, input_scales=input_scales)
    through_library(source, tmp_path / "library", rule=rule, input_scales=input_scales)
    ours, library = content(load(tmp_path / "ours")), content(load(tmp_path / "library"))
    assert ours.keys() == library.keys()
    assert [name for name in ours if ours[name] != library[name]] == []
    assert inspect(tmp_path / "library").contract_holds


def test_converter_with_two_workers_gives_the_same_tensors(
    make_checkpoint: Make, tensors: Tensors, config: dict[str, Any], tmp_path: Path
) -> None:
    source = make_checkpoint(tensors, quantization=config, shards=APART)
    through_library(source, tmp_path / "one", input_scales=True)
    through_library(source, tmp_path / "two", input_scales=True, max_workers=2)
    assert content(load(tmp_path / "one")) == content(load(tmp_path / "two"))


@pytest.mark.parametrize("rule", RULES)
def test_converter_of_a_sharded_llama_gives_the_tensors_of_convert(
    make_llama: Make, tmp_path: Path, rule: Rule
) -> None:
    from p2q.quantize import quantize

    quantize(make_llama(tmp_path / "bf16", shard_size="60KB"), tmp_path / "w8a8")
    assert len(open_checkpoint(tmp_path / "w8a8").shards) > 2
    convert(tmp_path / "w8a8", tmp_path / "ours", rule=rule)
    through_library(tmp_path / "w8a8", tmp_path / "library", rule=rule, max_workers=2)
    assert content(load(tmp_path / "ours")) == content(load(tmp_path / "library"))


def test_converter_of_rows_of_zeros_gives_the_tensors_of_convert(
    make_checkpoint: Make, w8a8: Tensors, tmp_path: Path
) -> None:
    w8a8[f"{UP}.weight"][1:4] = 0
    w8a8[f"{UP}.weight_scale"][1:4] = torch.tensor([[0.0], [1e-40], [1e38]])
    source = make_checkpoint(w8a8)
    convert(source, tmp_path / "ours")
    through_library(source, tmp_path / "library")
    assert content(load(tmp_path / "ours")) == content(load(tmp_path / "library"))


def test_converter_process_leaves_its_tensors_alone(make_checkpoint: Make, w8a8: Tensors) -> None:
    converter = PowerOfTwoConverter(make_checkpoint(w8a8))
    before = content(w8a8)
    converted = converter.process(w8a8)
    assert content(w8a8) == before
    assert converted.keys() == w8a8.keys()
    assert converted["lm_head.weight"] is w8a8["lm_head.weight"]


def test_converter_process_of_some_tensors_converts_those(make_checkpoint: Make, w8a8: Tensors) -> None:
    converter = PowerOfTwoConverter(make_checkpoint(w8a8))
    some = {name: w8a8[name] for name in (f"{UP}.weight", f"{UP}.weight_scale", "model.norm.weight")}
    whole = content(converter.process(w8a8))
    assert content(converter.process(some)) == {name: whole[name] for name in some}
    assert converter.process({}) == {}


@pytest.mark.parametrize(
    ("tensor", "needs"),
    [
        (f"{UP}.weight", {f"{UP}.weight_scale"}),
        (FUSED, {f"{FUSED}_scale"}),
        (f"{UP}.weight_scale", set()),
        (f"{UP}.input_scale", set()),
        ("lm_head.weight", set()),
        ("no.such.weight", set()),
    ],
)
def test_converter_dependencies_of_a_tensor_are_its_scale(
    make_checkpoint: Make, tensors: Tensors, config: dict[str, Any], tensor: str, needs: set[str]
) -> None:
    converter = PowerOfTwoConverter(make_checkpoint(tensors, quantization=config))
    assert converter.get_dependencies(tensor) == needs


# The configuration


@pytest.mark.parametrize("given", ["short", "groups", "full"])
def test_converter_config_says_the_same_scheme(
    make_checkpoint: Make,
    make_config: Config,
    tensors: Tensors,
    config: dict[str, Any],
    tmp_path: Path,
    given: str,
) -> None:
    if given == "short":
        config = make_config()
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("input_scale")}
    if given == "full":  # as libraries write it: with every field
        config = {**QuantizationConfig.model_validate(config).model_dump(mode="json"), "version": "0.19.0"}
        config |= {"sparsity_config": {}, "transform_config": {}}
    source = make_checkpoint(tensors, quantization=config, config={"note": "kept"})
    through_library(source, tmp_path / "library")
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "library"))
    one, other = (read_quantization_config(found, "config.json") for found in (before, after))
    assert other.model_dump() == one.model_dump()
    for found in (before, after):
        del found["quantization_config"]
    assert after == before


# Refusing


@pytest.mark.parametrize("max_workers", [1, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.01, 0.0])
def test_converter_bad_scale_is_refused_before_anything_is_converted(
    make_checkpoint: Make, tensors: Tensors, config: dict[str, Any], tmp_path: Path, bad: float, max_workers: int
) -> None:
    tensors[f"{UP}.weight"][2] = 3
    tensors[f"{UP}.weight_scale"][2] = bad
    source = make_checkpoint(tensors, quantization=config, shards=APART)
    with pytest.raises(ScaleError) as refused:
        through_library(source, tmp_path / "library", max_workers=max_workers)
    assert f"{source}, {UP}.weight_scale: bad scale;" in str(refused.value)
    assert "at row 2" in str(refused.value)
    assert list((tmp_path / "library").glob("*.safetensors")) == []


@pytest.mark.parametrize("scale", [2.0**-140, 2.0**100])
def test_converter_scale_out_of_range_is_refused(
    make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, scale: float
) -> None:
    w8a8[f"{UP}.weight"][2] = 3
    w8a8[f"{UP}.weight_scale"][2] = scale
    source = make_checkpoint(w8a8)
    messages = []
    for run in (convert, through_library):
        with pytest.raises(ScaleError, match="leaves the range") as refused:
            run(source, tmp_path / "target")
        messages.append(str(refused.value).partition(f"{UP}.weight_scale")[2])
    assert messages[0] == messages[1]


def test_converter_of_static_scales_refuses_one_out_of_range(
    make_checkpoint: Make, tensors: Tensors, config: dict[str, Any], tmp_path: Path
) -> None:
    tensors[f"{UP}.input_scale"] = torch.tensor([2.0**-70])
    source = make_checkpoint(tensors, quantization=config)
    with pytest.raises(ScaleError, match="bad activation scale"):
        through_library(source, tmp_path / "library", input_scales=True)


def no_scale(tensors: Tensors, _config: dict[str, Any]) -> None:
    del tensors[f"{UP}.weight_scale"]


def asymmetric(_tensors: Tensors, config: dict[str, Any]) -> None:
    config["config_groups"]["group_0"]["weights"]["symmetric"] = False


def ignored(_tensors: Tensors, config: dict[str, Any]) -> None:
    config["ignore"] = [UP]


def untied(tensors: Tensors, _config: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def too_long(tensors: Tensors, _config: dict[str, Any]) -> None:
    tensors[f"{UP}.weight"] = torch.ones(1, 132_105, dtype=torch.int8)
    tensors[f"{UP}.weight_scale"] = torch.tensor([[0.3]])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (no_scale, ScaleError),
        (asymmetric, SchemeError),
        (ignored, CheckpointError),
        (untied, CheckpointError),
        (too_long, SchemeError),
    ],
)
def test_converter_refuses_what_convert_refuses(
    make_checkpoint: Make,
    make_config: Config,
    w8a8: Tensors,
    tmp_path: Path,
    change: Callable[[Tensors, dict[str, Any]], None],
    error: type[P2QError],
) -> None:
    config = make_config()
    change(w8a8, config)
    source = make_checkpoint(w8a8, quantization=config, config={"tie_word_embeddings": change is untied})
    with pytest.raises(error) as by_convert:
        convert(source, tmp_path / "target")
    with pytest.raises(error) as by_converter:
        PowerOfTwoConverter(source)
    assert str(by_converter.value) == str(by_convert.value)


def test_converter_shard_of_nothing_but_scales_is_refused_at_once(make_checkpoint: Make, w8a8: Tensors) -> None:
    scales = [name for name in w8a8 if name.endswith("_scale")]
    shards = {"a.safetensors": [name for name in w8a8 if name not in scales], "b.safetensors": scales}
    with pytest.raises(CheckpointError, match=r"b\.safetensors: compressed-tensors cannot convert a shard of nothing"):
        PowerOfTwoConverter(make_checkpoint(w8a8, shards=shards))


def test_converter_source_with_a_manifest_is_refused_at_once(tiny_p2q: Path) -> None:
    with pytest.raises(CheckpointError, match=r"p2q_manifest\.json: the source has a manifest"):
        PowerOfTwoConverter(tiny_p2q)


def test_converter_activation_scale_that_is_no_number_is_refused_at_once(
    make_checkpoint: Make, make_config: Callable[..., Any], w8a8: Tensors
) -> None:
    config = make_config()
    config["config_groups"]["group_0"]["input_activations"] |= {"dynamic": False, "strategy": "tensor"}
    w8a8 |= {f"{name}.input_scale": torch.ones(1) for name in (UP, DOWN)}
    w8a8[f"{UP}.input_scale"][0] = float("nan")
    with pytest.raises(ScaleError, match=r"up_proj\.input_scale: bad activation scale; .*got float32 nan"):
        PowerOfTwoConverter(make_checkpoint(w8a8, quantization=config))
