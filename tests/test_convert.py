import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from p2q.checkpoint import open_checkpoint
from p2q.convert import convert
from p2q.errors import ScaleError, SchemeError
from p2q.manifest import read_manifest
from p2q.scales import RULES, Rule

Make = Callable[..., Path]
Tree = Callable[[Path], dict[str, str]]
Threads = Callable[[int], AbstractContextManager[None]]
Tensors = dict[str, torch.Tensor]
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
A, B, C = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))


def requantized(row: list[int], scale: float, exponent: int) -> tuple[list[int], int, Fraction]:
    """A row under the scale 2^exponent in rational arithmetic: (values, how many were clipped, squared error)."""
    factor = Fraction(scale) / Fraction(2) ** exponent
    unclamped = [round(value * factor) for value in row]  # Python rounds a fraction's halves to even
    levels = [min(max(value, -128), 127) for value in unclamped]
    error = sum(
        (Fraction(v) * Fraction(scale) - q * Fraction(2) ** exponent) ** 2 for v, q in zip(row, levels, strict=True)
    )
    return levels, sum(a != b for a, b in zip(unclamped, levels, strict=True)), Fraction(error)


def exponent_by_rule(rule: Rule, rows: list[list[int]], scale: float) -> int:
    """k for the rows that share a scale, straight from the rule's definition."""
    floor = math.frexp(scale)[1] - 1
    exact = Fraction(scale) == Fraction(2) ** floor
    ceil = floor if exact else floor + 1
    if rule == "ceil":
        return ceil
    if rule == "nearest":
        return ceil if (Fraction(scale) / Fraction(2) ** floor) ** 2 > 2 else floor
    errors = [sum((requantized(row, scale, k)[2] for row in rows), Fraction()) for k in (floor, ceil)]
    return floor if errors[0] < errors[1] else ceil


def expected(weight: torch.Tensor, scale: torch.Tensor, rule: Rule) -> tuple[list[list[int]], list[int], int, float]:
    """The whole weight: (values, exponents, clipped, relative error)."""
    rows = weight.tolist()
    scales = [value if value else 1.0 for value in scale.flatten().tolist()]
    if len(scales) == 1:
        exponents = [exponent_by_rule(rule, rows, scales[0])]
        spread = exponents * len(rows)
        scales = scales * len(rows)
    else:
        exponents = spread = [exponent_by_rule(rule, [row], value) for row, value in zip(rows, scales, strict=True)]
    done = [requantized(row, s, k) for row, s, k in zip(rows, scales, spread, strict=True)]
    norm = sum((Fraction(s) ** 2 * sum(v * v for v in row) for row, s in zip(rows, scales, strict=True)), Fraction())
    error = sum((squared for _, _, squared in done), Fraction())
    relative = math.sqrt(error / norm) if norm else 0.0
    return [levels for levels, _, _ in done], exponents, sum(clipped for _, clipped, _ in done), relative


def load(checkpoint: Path) -> Tensors:
    shards = open_checkpoint(checkpoint).shards
    return {name: tensor for shard in shards for name, tensor in load_file(checkpoint / shard).items()}


def assert_converted(source: Path, target: Path, rule: Rule) -> int:
    """Every value, scale and figure of the manifest against the exact computation. Returns the number of layers."""
    before, after = load(source), load(target)
    manifest = read_manifest(target)
    assert manifest is not None
    layers = [name for name, tensor in before.items() if tensor.dtype == torch.int8]
    for name in layers:
        levels, exponents, clipped, relative = expected(before[name], before[f"{name}_scale"], rule)
        scale = after[f"{name}_scale"]
        assert after[name].tolist() == levels
        assert scale.dtype == before[f"{name}_scale"].dtype
        assert scale.shape == before[f"{name}_scale"].shape
        assert [Fraction(value) for value in scale.flatten().tolist()] == [Fraction(2) ** k for k in exponents]
        record = manifest.tensors[name]
        assert record.shape == tuple(before[name].shape)
        assert record.exponents == Counter(exponents)
        assert record.clipped == clipped
        assert record.relative_error == pytest.approx(relative, rel=1e-12)
    assert set(manifest.tensors) == set(layers)
    return len(layers)


# Right results


@pytest.mark.parametrize("rule", RULES)
def test_convert_tiny_llama_gives_the_exact_values(tiny_w8a8: Path, tmp_path: Path, rule: Rule) -> None:
    convert(tiny_w8a8, tmp_path / "target", rule=rule)
    assert assert_converted(tiny_w8a8, tmp_path / "target", rule) == 14


def test_convert_rules_differ_on_the_tiny_llama(tiny_w8a8: Path, tmp_path: Path) -> None:
    manifests = {rule: convert(tiny_w8a8, tmp_path / rule, rule=rule).manifest for rule in RULES}
    clipped = {rule: sum(record.clipped for record in found.tensors.values()) for rule, found in manifests.items()}
    assert clipped["ceil"] == 0 < clipped["mse"] < clipped["nearest"]
    assert {rule: found.rule for rule, found in manifests.items()} == {rule: rule for rule in RULES}
    assert all(
        manifests["mse"].tensors[name].relative_error <= manifests[rule].tensors[name].relative_error
        for rule in RULES
        for name in manifests["mse"].tensors
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(6, 1), (6,), (1, 1), (1,), ()], ids=str)
def test_convert_scale_keeps_shape_and_dtype(
    make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, rule: Rule, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    count = math.prod(shape)
    w8a8[f"{UP}.weight_scale"] = (torch.arange(1, count + 1) * 0.00371).reshape(shape).to(dtype)
    source = make_checkpoint(w8a8)
    convert(source, tmp_path / "target", rule=rule)
    assert assert_converted(source, tmp_path / "target", rule) == 2


@pytest.mark.parametrize("rule", RULES)
def test_convert_odd_rows_give_the_exact_values(
    make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, rule: Rule
) -> None:
    w8a8[f"{UP}.weight"] = torch.tensor(
        [
            [-128] * 8,  # leaves the range first when the scale is rounded down
            [127, -127, 1, -1, 0, 3, 5, 7],
            [0] * 8,
            [0] * 8,
            [1, 2, 3, 4, 5, 6, 7, 9],  # halves at 3/2
            [-1, -3, -5, -7, 1, 3, 5, 7],
        ],
        dtype=torch.int8,
    )
    scales = [1.4142135, 2**0.5, 0.0, 0.3, 1.5, 2.0**-40]  # around sqrt 2, zero over zeros, a tie at halves, exact
    w8a8[f"{UP}.weight_scale"] = torch.tensor(scales).reshape(6, 1)
    source = make_checkpoint(w8a8)
    convert(source, tmp_path / "target", rule=rule)
    assert_converted(source, tmp_path / "target", rule)
    assert load(tmp_path / "target")[f"{UP}.weight_scale"][2].item() == 1.0


def test_convert_scale_in_another_shard_gives_the_exact_values(
    make_checkpoint: Make, w8a8: Tensors, tmp_path: Path
) -> None:
    scales = [name for name in w8a8 if name.endswith("_scale")]
    shards = {"a.safetensors": scales, "b.safetensors": [name for name in w8a8 if name not in scales]}
    source = make_checkpoint(w8a8, shards=shards)
    convert(source, tmp_path / "target")
    assert assert_converted(source, tmp_path / "target", "mse") == 2


def test_convert_one_row_and_one_column_give_the_exact_values(
    make_checkpoint: Make, w8a8: Tensors, tmp_path: Path
) -> None:
    w8a8["one.weight"], w8a8["one.weight_scale"] = torch.tensor([[100]], dtype=torch.int8), torch.tensor([0.003])
    source = make_checkpoint(w8a8)
    convert(source, tmp_path / "target")
    assert assert_converted(source, tmp_path / "target", "mse") == 3


@pytest.mark.parametrize("scale", [0.0, -0.0, 2.0**-140, 1e-45, 1e38, 2.0**100], ids=str)
def test_convert_row_of_zeros_gets_a_usable_scale_whatever_it_had(
    make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, scale: float
) -> None:
    w8a8[f"{UP}.weight"][2] = 0
    w8a8[f"{UP}.weight_scale"][2] = scale
    convert(make_checkpoint(w8a8), tmp_path / "target")
    after = load(tmp_path / "target")
    assert not after[f"{UP}.weight"][2].any()
    assert after[f"{UP}.weight_scale"][2].item() == 1.0


def test_convert_one_scale_that_is_no_power_of_two_is_enough(tiny_p2q: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    shutil.copytree(tiny_p2q, tmp_path / "source")
    tensors = load(tmp_path / "source")
    tensors["model.layers.1.mlp.down_proj.weight_scale"][-1] *= 1.25
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    assert convert(tmp_path / "source", tmp_path / "target").changed
    assert_converted(tmp_path / "source", tmp_path / "target", "mse")


# Progress


def test_convert_progress_counts_the_bytes_of_every_shard(make_checkpoint: Make, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    convert(make_checkpoint(), tmp_path / "target", progress=lambda *count: told.append(count))
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(set(done))
    assert set(totals) == {done[-1]} == {16 * 8 * 2 + 2 * 48 + 4 * 14 + 8 * 2 + 16 * 8 * 4}


# Refused scales. The texts are in tests/cli/test_bad_input.py.


def test_convert_bad_scale_in_the_last_layer_is_found_before_anything_is_written(
    make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w8a8[f"{UP}.weight_scale"][4] = float("nan")
    monkeypatch.setattr("p2q.convert.unfinished", None)
    with pytest.raises(ScaleError, match=rf"{UP}\.weight_scale: bad scale; expected .*, got nan at row 4"):
        convert(make_checkpoint(w8a8), tmp_path / "target")


def test_convert_layer_past_the_bound_of_int32_is_refused(make_checkpoint: Make, w8a8: Tensors, tmp_path: Path) -> None:
    w8a8["long.weight"], w8a8["long.weight_scale"] = torch.ones(1, 132_105, dtype=torch.int8), torch.full((1, 1), 0.3)
    with pytest.raises(SchemeError, match="got K = 132105"):
        convert(make_checkpoint(w8a8), tmp_path / "target")


# Others load it


def test_convert_result_loads_in_transformers_with_the_exact_weights(
    tiny_llama: Path, tiny_w8a8: Path, tiny_p2q: Path
) -> None:
    from transformers import AutoModelForCausalLM

    models: dict[str, Any] = {
        path.name: AutoModelForCausalLM.from_pretrained(path) for path in (tiny_llama, tiny_w8a8, tiny_p2q)
    }
    prompt = torch.arange(40).reshape(2, 20)
    logits = {name: model(prompt).logits.float() for name, model in models.items()}
    # Its first use decompressed it. A power of two times an int8 value is exact in bfloat16, which it is loaded in.
    tensors = load(tiny_p2q)
    for name, scale in tensors.items():
        if name.endswith("_scale"):
            weight = name.removesuffix("_scale")
            assert torch.equal(models["p2q"].get_parameter(weight).float(), tensors[weight].float() * scale)
    assert all(torch.isfinite(values).all() for values in logits.values())
    assert (logits["p2q"] - logits["w8a8"]).norm() < 0.05 * logits["w8a8"].norm()
    assert (logits["p2q"] - logits["bf16"]).norm() < 0.05 * logits["bf16"].norm()


def test_convert_result_decompresses_in_compressed_tensors_with_the_exact_weights(tiny_p2q: Path) -> None:
    from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor

    from p2q.scheme import read_quantization_config

    config = read_quantization_config(json.loads((tiny_p2q / "config.json").read_text()), "config.json")
    scheme, tensors = config.config_groups["group_0"], load(tiny_p2q)
    layers = [name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.dtype == torch.int8]
    for layer in layers:
        state = {part: tensors[f"{layer}.{part}"] for part in ("weight", "weight_scale")}
        weight = IntQuantizationCompressor.decompress(dict(state), scheme)["weight"]
        assert torch.equal(weight.float(), state["weight"].float() * state["weight_scale"])
    assert len(layers) == 14
