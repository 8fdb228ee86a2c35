"""Converting what llm-compressor writes, and refusing by name what of it cannot be converted."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2q.checkpoint import open_checkpoint
from p2q.convert import convert
from p2q.errors import ScaleError, SchemeError
from p2q.inspection import inspect
from p2q.manifest import MANIFEST_NAME, read_manifest
from p2q.requantize import TorchRequantizer, requantize
from p2q.scales import RULES, Rule, is_power_of_two

Make = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
Saved = Any  # conftest.Saved
EXPERTS, ROWS, COLUMNS = 3, 10, 8
FUSED = "model.layers.0.mlp.experts.gate_up_proj"


def load(checkpoint: Path) -> Tensors:
    shards = open_checkpoint(checkpoint).shards
    return {name: tensor for shard in shards for name, tensor in load_file(checkpoint / shard).items()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also where a value is NaN."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def header(shard: Path) -> bytes:
    data = shard.read_bytes()
    return data[: 8 + struct.unpack("<Q", data[:8])[0]]


def smallest_not_below(value: float) -> int:
    """k of the smallest power of two that is not below a value."""
    k = math.frexp(value)[1] - 1
    return k if Fraction(2) ** k >= Fraction(value) else k + 1


# Layouts that convert


def assert_exact(before: Tensors, after: Tensors, layers: list[str], rule: Rule) -> None:
    """Weights as the reference computes them, and scales that are powers of two in the dtype and shape they had."""
    for layer in layers:
        weight, scale = before[f"{layer}.weight"], before[f"{layer}.weight_scale"]
        levels, figures = requantize(weight, scale.reshape(-1).to(torch.float64), rule, TorchRequantizer())
        assert torch.equal(after[f"{layer}.weight"], levels)
        stored = after[f"{layer}.weight_scale"]
        assert (stored.dtype, stored.shape) == (scale.dtype, scale.shape)
        assert is_power_of_two(stored).all()
        assert stored.reshape(-1).tolist() == [2.0**k for k in figures.exponents.tolist()]


def test_convert_layout_gives_the_exact_weights_and_no_other_byte_changes(convertible: Saved, tmp_path: Path) -> None:
    source, target, layers = convertible.path, tmp_path / "target", convertible.layout.quantized()
    done = convert(source, target)
    before, after = load(source), load(target)
    assert done.manifest is not None
    assert sorted(done.manifest.tensors) == sorted(f"{layer}.weight" for layer in layers)
    assert_exact(before, after, layers, "mse")
    changed = {f"{layer}.{part}" for layer in layers for part in ("weight", "weight_scale")}
    assert before.keys() == after.keys()
    assert [name for name in before if name not in changed and not same(before[name], after[name])] == []
    files = {path.name for path in source.iterdir()}
    assert {path.name for path in target.iterdir()} == files | {MANIFEST_NAME}
    for name in files:
        if name.endswith(".safetensors"):
            assert header(target / name) == header(source / name)
        else:
            assert (target / name).read_bytes() == (source / name).read_bytes()
    found = inspect(target)
    assert found.contract_holds
    assert found.changed == {}
    assert sorted(layer.name for layer in found.layers) == sorted(layers)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["rtn", "static-sym-wtensor", "qwen3moe-sharded"])
def test_convert_layout_by_every_rule_gives_the_exact_weights(
    save_layout: Callable[[str], Saved], tmp_path: Path, name: str, rule: Rule
) -> None:
    saved = save_layout(name)
    convert(saved.path, tmp_path / "target", rule=rule)
    assert_exact(load(saved.path), load(tmp_path / "target"), saved.layout.quantized(), rule)


def test_inspect_layout_says_that_the_contract_does_not_hold_yet(convertible: Saved) -> None:
    found = inspect(convertible.path)
    assert not found.contract_holds
    assert found.manifest is None


def test_layout_holds_codes_of_both_ends(convertible: Saved) -> None:
    tensors = load(convertible.path)
    codes = torch.cat([tensors[f"{layer}.weight"].reshape(-1) for layer in convertible.layout.quantized()])
    assert (int(codes.min()), int(codes.max())) == (-128, 127)


@pytest.mark.parametrize("name", ["rtn-sharded", "qwen3moe-sharded"])
def test_layout_in_shards_parts_weights_from_their_scales(save_layout: Callable[[str], Saved], name: str) -> None:
    saved = save_layout(name)
    tensors = open_checkpoint(saved.path).tensors
    layers = saved.layout.quantized()
    apart = [layer for layer in layers if tensors[f"{layer}.weight"].shard != tensors[f"{layer}.weight_scale"].shard]
    assert 0 < len(apart) < len(layers)


@pytest.mark.parametrize(("name", "router"), [("qwen3moe-rtn", "mlp.gate"), ("mixtral-rtn", "block_sparse_moe.gate")])
def test_convert_router_is_left_alone(
    save_layout: Callable[[str], Saved], tmp_path: Path, name: str, router: str
) -> None:
    saved = save_layout(name)
    done = convert(saved.path, tmp_path / "target")
    assert done.manifest is not None
    for layer in range(2):
        weight = f"model.layers.{layer}.{router}.weight"
        before, after = (load(path)[weight] for path in (saved.path, tmp_path / "target"))
        assert before.dtype == torch.bfloat16
        assert same(before, after)
        assert weight not in done.manifest.tensors


# Static activations


def inputs_of(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.endswith(".input_scale")}


def test_convert_static_scales_stay_as_they_are_by_default(with_static: Saved, tmp_path: Path) -> None:
    done = convert(with_static.path, tmp_path / "target")
    before, after = (inputs_of(load(path)) for path in (with_static.path, tmp_path / "target"))
    assert done.manifest is not None
    assert done.manifest.input_scales == {}
    assert before
    assert all(same(before[name], after[name]) for name in before)


def test_convert_static_scales_on_demand_become_the_next_powers_of_two(with_static: Saved, tmp_path: Path) -> None:
    convert(with_static.path, tmp_path / "default")
    done = convert(with_static.path, tmp_path / "target", input_scales=True)
    before, after = load(with_static.path), load(tmp_path / "target")
    expected = {name: smallest_not_below(scale.item()) for name, scale in inputs_of(before).items()}
    assert done.manifest is not None
    assert done.manifest.input_scales == expected
    assert read_manifest(tmp_path / "target") == done.manifest
    for name, k in expected.items():
        assert same(after[name], torch.tensor([2.0**k], dtype=before[name].dtype))
    others = load(tmp_path / "default")
    assert all(same(others[name], after[name]) for name in others if name not in expected)
    assert inspect(tmp_path / "target").contract_holds


def test_convert_two_groups_rewrite_the_static_group_only(save_layout: Callable[[str], Saved], tmp_path: Path) -> None:
    done = convert(save_layout("two-groups").path, tmp_path / "target", input_scales=True)
    assert done.manifest is not None
    assert len(done.manifest.input_scales) == 7
    assert all(".self_attn." in name for name in done.manifest.input_scales)
    assert any(".mlp." in name for name in done.manifest.tensors)


def test_convert_static_scales_a_second_time_changes_no_byte(with_static: Saved, tmp_path: Path, tree: Any) -> None:
    convert(with_static.path, tmp_path / "once", input_scales=True)
    assert not convert(tmp_path / "once", tmp_path / "twice", input_scales=True, overwrite=True).changed
    assert tree(tmp_path / "once") == tree(tmp_path / "twice")


def test_convert_static_scales_of_a_converted_source_are_still_converted(with_static: Saved, tmp_path: Path) -> None:
    convert(with_static.path, tmp_path / "weights")
    convert(with_static.path, tmp_path / "both", input_scales=True)
    assert convert(tmp_path / "weights", tmp_path / "later", input_scales=True).changed
    one, other = load(tmp_path / "both"), load(tmp_path / "later")
    assert all(same(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("value", [1.0, 0.5, 0.75, 2.0**-14, 3 * 2.0**-14, 1.0078125, 1.9921875])
def test_convert_static_scale_near_a_power_of_two_rounds_up_only_where_it_must(
    save_layout: Callable[[str], Saved], tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    source = save_layout("static-sym-wchannel").path
    name = "model.layers.1.mlp.up_proj.input_scale"
    save_file({**load(source), name: torch.tensor([value], dtype=dtype)}, source / "model.safetensors")
    done = convert(source, tmp_path / "target", input_scales=True)
    k = smallest_not_below(value)
    assert done.manifest is not None
    assert done.manifest.input_scales[name] == k
    assert same(load(tmp_path / "target")[name], torch.tensor([2.0**k], dtype=dtype))


# Layouts that are refused


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("dynamic-asym", "W8A8 (weights symmetric int8 per channel; activations asymmetric dynamic int8 per token;"),
        ("static-asym", "W8A8 (weights symmetric int8 per channel; activations asymmetric int8 per tensor;"),
        ("weights-asym", "W8A8 (weights asymmetric int8 per channel;"),
        ("weights-group", "W8A8 (weights symmetric int8 per group;"),
        ("w8a8-plus-w8a16", "W8A16 (weights symmetric int8 per channel; activations not quantized;"),
        ("w8a8-plus-w4a16", "W4A16 (weights symmetric int4 per group; activations not quantized;"),
        ("rtn-embed", "W8A16 (weights symmetric int8 per channel; activations not quantized;"),
        ("rtn-uncompressed", "format dense"),
        ("spinquant-rtn", "activations that are transformed first (transform_config)"),
        ("kv-only", "a quantization_config without config_groups"),
    ],
)
@pytest.mark.parametrize("dry_run", [True, False], ids=["dry", "real"])
def test_convert_layout_of_another_scheme_is_refused_by_name(
    save_layout: Callable[[str], Saved], tmp_path: Path, tree: Any, name: str, got: str, dry_run: bool
) -> None:
    source = save_layout(name).path
    before = tree(tmp_path)
    with pytest.raises(SchemeError) as refused:
        convert(source, tmp_path / "target", dry_run=dry_run, input_scales=True)
    assert got in str(refused.value)
    assert str(source) in str(refused.value)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["dynamic-asym", "static-asym"])
def test_convert_asymmetric_activations_are_refused_with_the_weight(
    save_layout: Callable[[str], Saved], tmp_path: Path, name: str
) -> None:
    with pytest.raises(SchemeError) as refused:
        convert(save_layout(name).path, tmp_path / "target")
    assert "model.safetensors, model.layers.0.mlp.down_proj.weight: asymmetric activations;" in str(refused.value)


# All experts in one tensor


@pytest.fixture
def fused() -> tuple[torch.Tensor, torch.Tensor]:
    """An int8 weight of several experts, and a scale for each of its rows."""
    random = torch.Generator().manual_seed(23)
    weight = torch.randint(-128, 128, (EXPERTS, ROWS, COLUMNS), generator=random).to(torch.int8)
    weight[1, 2] = 0
    weight[0, 0, 0] = -128
    return weight, torch.rand(EXPERTS, ROWS, 1, generator=random) * 0.02 + 0.001


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(EXPERTS, ROWS, 1), (EXPERTS, ROWS), (EXPERTS, 1, 1), (EXPERTS,)], ids=str)
@pytest.mark.parametrize("suffix", ["_scale", "_weight_scale"])
def test_convert_fused_experts_equal_each_expert_alone(
    make_checkpoint: Make,
    fused: tuple[torch.Tensor, torch.Tensor],
    tmp_path: Path,
    suffix: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rule: Rule,
) -> None:
    weight, scales = fused
    stored = scales[:, : math.prod(shape) // EXPERTS].reshape(shape).to(dtype).contiguous()
    together = make_checkpoint({FUSED: weight, FUSED + suffix: stored}, "together")
    apart = {}
    for expert in range(EXPERTS):
        name = f"model.layers.0.mlp.experts.{expert}.gate_up_proj"
        apart[f"{name}.weight"] = weight[expert].clone()
        apart[f"{name}.weight_scale"] = stored[expert].reshape(-1, *([1] * (stored[expert].numel() > 1))).clone()
    convert(together, tmp_path / "a", rule=rule)
    convert(make_checkpoint(apart, "apart"), tmp_path / "b", rule=rule)
    one, other = load(tmp_path / "a"), load(tmp_path / "b")
    names = [f"model.layers.0.mlp.experts.{expert}.gate_up_proj" for expert in range(EXPERTS)]
    assert same(one[FUSED], torch.stack([other[f"{name}.weight"] for name in names]))
    joined = torch.stack([other[f"{name}.weight_scale"] for name in names])
    assert same(one[FUSED + suffix], joined.reshape(shape))
    assert inspect(tmp_path / "a").contract_holds


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(1,), (), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("suffix", ["_scale", "_weight_scale"])
def test_convert_fused_experts_of_one_scale_equal_one_matrix(
    make_checkpoint: Make,
    fused: tuple[torch.Tensor, torch.Tensor],
    tmp_path: Path,
    suffix: str,
    shape: tuple[int, ...],
    rule: Rule,
) -> None:
    scale = torch.full(shape, 0.0123).to(torch.bfloat16)
    together = make_checkpoint({FUSED: fused[0], FUSED + suffix: scale}, "together")
    matrix = {"a.weight": fused[0].reshape(-1, COLUMNS).clone(), "a.weight_scale": scale.reshape(1).clone()}
    convert(together, tmp_path / "a", rule=rule)
    convert(make_checkpoint(matrix, "matrix"), tmp_path / "b", rule=rule)
    one, other = load(tmp_path / "a"), load(tmp_path / "b")
    assert same(one[FUSED], other["a.weight"].reshape(fused[0].shape))
    assert same(one[FUSED + suffix], other["a.weight_scale"].reshape(shape))


@pytest.mark.parametrize("shape", [(EXPERTS, 1, ROWS), (ROWS, EXPERTS), (ROWS,), (EXPERTS, COLUMNS, 1)], ids=str)
@pytest.mark.parametrize("suffix", ["_scale", "_weight_scale"])
def test_convert_fused_experts_with_a_scale_of_another_shape_are_refused(
    make_checkpoint: Make,
    fused: tuple[torch.Tensor, torch.Tensor],
    tmp_path: Path,
    suffix: str,
    shape: tuple[int, ...],
) -> None:
    source = make_checkpoint({FUSED: fused[0], FUSED + suffix: torch.full(shape, 0.01)})
    with pytest.raises(ScaleError) as refused:
        convert(source, tmp_path / "target")
    assert f"model.safetensors, {FUSED}{suffix}: wrong scale;" in str(refused.value)
    assert str(list(shape)) in str(refused.value)
    assert not (tmp_path / "target").exists()
