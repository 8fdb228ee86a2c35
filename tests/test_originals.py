"""Requantizing from the original weights, against exact rational arithmetic."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2q import shards
from p2q.checkpoint import open_checkpoint
from p2q.convert import convert
from p2q.errors import CheckpointError, P2QError, ScaleError
from p2q.inspection import inspect
from p2q.manifest import Manifest, read_manifest
from p2q.scales import RULES, Rule, is_power_of_two

Make = Callable[..., Path]
Tree = Callable[[Path], dict[str, str]]
Tensors = dict[str, torch.Tensor]
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
FUSED = "model.layers.0.mlp.experts.gate_up_proj"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def load(checkpoint: Path) -> Tensors:
    files = open_checkpoint(checkpoint).shards
    return {name: tensor for file in files for name, tensor in load_file(checkpoint / file).items()}


# The exact reference


def fractions(values: torch.Tensor) -> list[Fraction]:
    return [Fraction(value) for value in values.to(torch.float64).reshape(-1).tolist()]


def rounded(values: list[Fraction], k: int) -> list[int]:
    """rne(w / 2^k), before the clamp."""
    return [round(value / Fraction(2) ** k) for value in values]  # Python rounds a fraction's halves to even


def clamped(levels: list[int]) -> list[int]:
    return [min(max(level, -128), 127) for level in levels]


def error(values: list[Fraction], k: int) -> Fraction:
    pairs = zip(values, clamped(rounded(values, k)), strict=True)
    return sum(((value - level * Fraction(2) ** k) ** 2 for value, level in pairs), Fraction())


def exponent(rule: Rule, scale: Fraction, values: list[Fraction]) -> int:
    """k of the scale that some original values share."""
    floor = math.frexp(float(scale))[1] - 1
    ceil = floor + (scale != Fraction(2) ** floor)
    if rule == "ceil":
        return ceil
    if rule == "nearest":
        return ceil if (scale / Fraction(2) ** floor) ** 2 > 2 else floor
    return floor if error(values, floor) < error(values, ceil) else ceil


def assert_exact(original: torch.Tensor, scale: torch.Tensor, rule: Rule, made: Tensors, found: Manifest) -> None:
    """The layer UP of a converted checkpoint, and its record in the manifest."""
    scales = [value or Fraction(1) for value in fractions(scale)]
    rows = original.reshape(len(scales), -1)
    exponents, levels, clipped, squared = [], [], 0, Fraction()
    for row, value in zip(rows, scales, strict=True):
        values = fractions(row)
        k = exponent(rule, value, values)
        unclamped = rounded(values, k)
        exponents.append(k)
        levels += clamped(unclamped)
        clipped += sum(a != b for a, b in zip(unclamped, clamped(unclamped), strict=True))
        squared += error(values, k)
    assert made[f"{UP}.weight"].dtype == torch.int8
    assert made[f"{UP}.weight"].reshape(-1).tolist() == levels
    stored = made[f"{UP}.weight_scale"]
    assert (stored.dtype, stored.shape) == (scale.dtype, scale.shape)
    assert fractions(stored) == [Fraction(2) ** k for k in exponents]
    record = found.tensors[f"{UP}.weight"]
    assert record.exponents == Counter(exponents)
    assert record.clipped == clipped
    norm = sum((value**2 for value in fractions(original)), Fraction())
    assert record.relative_error == pytest.approx(math.sqrt(squared / norm) if norm else 0.0, rel=1e-4)


# Checkpoints


def quantized(weight: torch.Tensor, rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 weight, scale of (rows,)), by absmax over 127.5: the largest negative values become -128."""
    grouped = weight.to(torch.float32).reshape(rows, -1)
    scale = (grouped.abs().amax(dim=1) / 127.5).clamp_min(1e-30).to(dtype)
    levels = (grouped / scale.to(torch.float32).reshape(-1, 1)).round().clamp(-128, 127)
    return levels.to(torch.int8).reshape(weight.shape), scale


def values(*shape: int, seed: int = 3, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of different sizes, so that their scales lie anywhere between powers of two."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=random) * 0.05
    return (weight * (1 + torch.rand(*shape[:-1], 1, generator=random))).to(dtype)


@pytest.fixture
def pair(make_checkpoint: Make, w8a8: Tensors) -> Callable[..., tuple[Path, Path]]:
    """Save an original weight of UP, and a checkpoint with it in int8: (int8, originals)."""

    def make(
        original: torch.Tensor, *, scales: int | None = None, scale_dtype: torch.dtype = torch.float32
    ) -> tuple[Path, Path]:
        count = len(original) if scales is None else scales
        weight, scale = quantized(original, count, scale_dtype)
        stored = scale.reshape(-1, 1) if count > 1 else scale
        down = values(8, 6, seed=4)
        levels, down_scale = quantized(down, 8)
        layers = {f"{UP}.weight": weight, f"{UP}.weight_scale": stored}
        layers |= {f"{DOWN}.weight": levels, f"{DOWN}.weight_scale": down_scale.reshape(8, 1)}
        originals = {f"{UP}.weight": original, f"{DOWN}.weight": down}
        source = make_checkpoint({**w8a8, **layers}, "int8")
        return source, make_checkpoint(originals, "originals", quantization=False)

    return make


# Right results


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=["scale32", "scale16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", [24, 1], ids=["channel", "tensor"])
def test_convert_from_weights_equals_exact_arithmetic(
    pair: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    scales: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    rule: Rule,
) -> None:
    original = values(24, 40, dtype=dtype)
    source, originals = pair(original, scales=scales, scale_dtype=scale_dtype)
    done = convert(source, tmp_path / "target", rule=rule, from_weights=originals).manifest
    assert done is not None
    assert_exact(original, load(source)[f"{UP}.weight_scale"], rule, load(tmp_path / "target"), done)
    assert inspect(tmp_path / "target").contract_holds


def test_convert_from_weights_by_mse_takes_both_exponents(
    pair: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    made = {}
    source, originals = pair(values(24, 40))
    for rule in RULES:
        convert(source, tmp_path / rule, rule=rule, from_weights=originals)
        made[rule] = load(tmp_path / rule)[f"{UP}.weight_scale"]
    assert not torch.equal(made["mse"], made["ceil"])
    assert not torch.equal(made["mse"], made["ceil"] / 2)


# Rows of whole multiples of a unit 2^-6, by hand; the scale lies between 2^-7 and 2^-6.
@pytest.mark.parametrize(
    ("row", "chosen"),
    [
        ([0.0, 0.0, 0.0, 0.0], -6),  # no error under either
        ([1.0, -3.0, 40.0, -64.0], -6),  # no error under either: -128 is the last value that the smaller one holds
        ([0.25, -0.25, 0.25, 0.0], -6),  # the same error under both
        ([0.5, 1.5, -2.5, 8.0], -7),  # no error under the smaller one
        ([1.5, 0.0, 0.0, -64.5], -7),  # the smaller one clips by a half unit of its own, less than the other's error
        ([1.0, 0.0, 0.0, 66.0], -6),  # the smaller one clips
    ],
)
def test_convert_from_weights_by_mse_takes_the_smaller_error_and_the_larger_exponent_of_equals(
    make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, row: list[float], chosen: int
) -> None:
    original = torch.tensor([row]) * 2.0**-6
    scale = torch.tensor([[1.4 * 2.0**-7]])
    layers = {f"{UP}.weight_scale": scale, f"{UP}.weight": (original / scale).round().clamp(-128, 127).to(torch.int8)}
    source = make_checkpoint({name: w8a8[name] for name in ("lm_head.weight", "model.norm.weight")} | layers, "int8")
    originals = make_checkpoint({f"{UP}.weight": original}, "originals", quantization=False)
    done = convert(source, tmp_path / "target", from_weights=originals).manifest
    assert done is not None
    made = load(tmp_path / "target")
    assert_exact(original, scale, "mse", made, done)
    assert made[f"{UP}.weight_scale"].item() == 2.0**chosen


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(3, 8, 1), (3, 1, 1), (3,), (1,)], ids=str)
def test_convert_fused_experts_from_weights_equal_exact_arithmetic(
    make_checkpoint: Make, tmp_path: Path, shape: tuple[int, ...], rule: Rule
) -> None:
    original = values(3, 8, 16)
    weight, scale = quantized(original, math.prod(shape))
    source = make_checkpoint({FUSED: weight, f"{FUSED}_scale": scale.reshape(shape)}, "int8")
    originals = make_checkpoint({FUSED: original}, "originals", quantization=False)
    done = convert(source, tmp_path / "target", rule=rule, from_weights=originals).manifest
    assert done is not None
    made = {name.replace(FUSED, f"{UP}.weight"): tensor for name, tensor in load(tmp_path / "target").items()}
    found = done.model_copy(update={"tensors": {f"{UP}.weight": done.tensors[FUSED]}})
    assert_exact(original, scale.reshape(shape), rule, made, found)


@pytest.mark.parametrize("rule", RULES)
def test_convert_from_weights_of_a_row_of_zeros_gives_zeros(make_checkpoint: Make, tmp_path: Path, rule: Rule) -> None:
    original = values(6, 8)
    original[2:4] = 0
    weight, scale = quantized(original, 6)
    scale[2:4] = torch.tensor([0.0, 0.3])
    source = make_checkpoint({f"{UP}.weight": weight, f"{UP}.weight_scale": scale.reshape(6, 1)}, "int8")
    originals = make_checkpoint({f"{UP}.weight": original}, "originals", quantization=False)
    convert(source, tmp_path / "target", rule=rule, from_weights=originals)
    convert(source, tmp_path / "int8 only", rule=rule)
    one, other = load(tmp_path / "target"), load(tmp_path / "int8 only")
    assert not one[f"{UP}.weight"][2:4].any()
    assert torch.equal(one[f"{UP}.weight_scale"][2:4], other[f"{UP}.weight_scale"][2:4])


@pytest.mark.parametrize("block", [1, 6, 7, 64, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", [10, 1], ids=["channel", "tensor"])
def test_convert_from_weights_in_any_blocks_gives_the_same_tensors(
    pair: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scales: int,
    dtype: torch.dtype,
    block: int,
) -> None:
    source, originals = pair(values(10, 14, dtype=dtype), scales=scales)
    one = convert(source, tmp_path / "usual", from_weights=originals).manifest
    monkeypatch.setattr(shards, "BLOCK_BYTES", block)
    other = convert(source, tmp_path / "blocks", from_weights=originals, workers=2).manifest
    assert one is not None
    assert other is not None
    assert one.files == other.files
    assert one.weights_digest == other.weights_digest
    for name, record in one.tensors.items():
        found = other.tensors[name]
        assert (found.exponents, found.clipped) == (record.exponents, record.clipped)
        assert found.relative_error == pytest.approx(record.relative_error, rel=1e-12)


def test_convert_from_weights_in_shards_and_parted_gives_the_same_tensors(
    make_checkpoint: Make, make_llama: Make, tmp_path: Path
) -> None:
    from p2q.quantize import quantize

    single = make_llama(tmp_path / "single")
    parted = make_llama(tmp_path / "parted", shard_size="50KB")
    quantize(single, tmp_path / "int8")
    tensors = load(tmp_path / "int8")
    names = sorted(tensors)
    files = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    apart = make_checkpoint(tensors, "apart", shards=files)
    convert(tmp_path / "int8", tmp_path / "a", from_weights=single)
    convert(apart, tmp_path / "b", from_weights=parted, workers=2)
    one, other = load(tmp_path / "a"), load(tmp_path / "b")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("rule", RULES)
def test_convert_tiny_llama_from_weights_is_nearer_to_them(
    tiny_llama: Path, tiny_w8a8: Path, tmp_path: Path, rule: Rule
) -> None:
    convert(tiny_w8a8, tmp_path / "once", rule=rule, from_weights=tiny_llama)
    convert(tiny_w8a8, tmp_path / "twice", rule=rule)
    exact, once, twice = (load(path) for path in (tiny_llama, tmp_path / "once", tmp_path / "twice"))

    def relative_error(made: Tensors, name: str) -> float:
        weight = exact[name].to(torch.float64)
        dequantized = made[name].to(torch.float64) * made[f"{name}_scale"].to(torch.float64)
        return float((dequantized - weight).norm() / weight.norm())

    layers = [name for name, tensor in once.items() if tensor.dtype == torch.int8]
    assert len(layers) == 14
    manifest = read_manifest(tmp_path / "once")
    assert manifest is not None
    for name in layers:
        error = relative_error(once, name)
        assert error < relative_error(twice, name)
        assert manifest.tensors[name].relative_error == pytest.approx(error, rel=1e-4)


def test_convert_from_weights_changes_quantized_layers_only(tiny_llama: Path, tiny_w8a8: Path, tmp_path: Path) -> None:
    convert(tiny_w8a8, tmp_path / "target", from_weights=tiny_llama)
    before, after = load(tiny_w8a8), load(tmp_path / "target")
    layers = {name for name, tensor in before.items() if tensor.dtype == torch.int8}
    others = before.keys() - layers - {f"{name}_scale" for name in layers}
    assert all(torch.equal(before[name], after[name]) for name in others)
    assert (tmp_path / "target" / "config.json").read_bytes() == (tiny_w8a8 / "config.json").read_bytes()


# A source that is converted already


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_convert_power_of_two_source_from_weights_keeps_exponents_and_rounds_once(
    tiny_llama: Path, tiny_p2q: Path, tmp_path: Path, overwrite: bool
) -> None:
    target = tmp_path / "target"
    if overwrite:
        shutil.copytree(tiny_p2q, target)
    done = convert(tiny_p2q, target, from_weights=tiny_llama, overwrite=overwrite)
    assert done.changed
    assert done.manifest is not None
    assert done.manifest.weights_digest is not None
    exact, before, after = load(tiny_llama), load(tiny_p2q), load(target)
    for name in done.manifest.tensors:
        scale = before[f"{name}_scale"]
        assert is_power_of_two(scale).all()
        assert torch.equal(after[f"{name}_scale"], scale)
        levels = (exact[name].to(torch.float64) / scale.to(torch.float64)).round().clamp(-128, 127)
        assert torch.equal(after[name], levels.to(torch.int8))
    assert inspect(target).changed == {}


def test_convert_from_weights_a_second_time_changes_no_tensor(
    tiny_llama: Path, tiny_w8a8: Path, tmp_path: Path
) -> None:
    convert(tiny_w8a8, tmp_path / "once", from_weights=tiny_llama)
    convert(tmp_path / "once", tmp_path / "twice", from_weights=tiny_llama)
    one, other = load(tmp_path / "once"), load(tmp_path / "twice")
    assert all(torch.equal(one[name], other[name]) for name in one)


# The manifest


def test_convert_from_weights_manifest_holds_their_digest(tiny_llama: Path, tiny_w8a8: Path, tmp_path: Path) -> None:
    with_weights = convert(tiny_w8a8, tmp_path / "a", from_weights=tiny_llama).manifest
    without = convert(tiny_w8a8, tmp_path / "b").manifest
    assert with_weights is not None
    assert without is not None
    assert without.weights_digest is None
    assert len(with_weights.weights_digest or "") == 64
    assert with_weights.source_digest == without.source_digest
    assert read_manifest(tmp_path / "a") == with_weights


def test_convert_from_changed_weights_gives_another_digest(
    pair: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    source, originals = pair(values(24, 40))
    first = convert(source, tmp_path / "a", from_weights=originals).manifest
    tensors = load(originals)
    tensors[f"{UP}.weight"][5, 7] *= 1.02
    save_file(tensors, originals / "model.safetensors", {"format": "pt"})
    second = convert(source, tmp_path / "b", from_weights=originals).manifest
    assert first is not None
    assert second is not None
    assert first.weights_digest != second.weights_digest
    assert first.source_digest == second.source_digest


def test_convert_from_weights_that_change_under_a_stopped_run_starts_afresh(
    pair: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    source, originals = pair(values(24, 40))

    def stop(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "target", from_weights=originals, progress=stop)
    tensors = load(originals)
    tensors[f"{UP}.weight"][5, 7] *= 1.02
    save_file(tensors, originals / "model.safetensors", {"format": "pt"})
    resumed = convert(source, tmp_path / "target", from_weights=originals).manifest
    assert resumed == convert(source, tmp_path / "fresh", from_weights=originals).manifest


# Refusing

Change = Callable[[Tensors], None]


def missing(tensors: Tensors) -> None:
    del tensors[f"{UP}.weight"]


def other_shape(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].t().contiguous()


def integers(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] = torch.ones(24, 40, dtype=torch.int8)


def doubles(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].to(torch.float64)


def not_a_number(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"][23, 39] = float("nan")


def infinite(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"][0, 0] = float("-inf")


def other_weights(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] = values(24, 40, seed=99)


def smoothed(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] *= 3


def smoothed_columns(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] *= torch.linspace(0.5, 2, 40).to(torch.bfloat16)


def negative(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] *= -1


@pytest.mark.parametrize("scales", [24, 1], ids=["channel", "tensor"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (missing, CheckpointError, "the original weight is missing"),
        (other_shape, CheckpointError, "of shape [24, 40], got BF16 of shape [40, 24]"),
        (integers, CheckpointError, "got I8 of shape [24, 40]"),
        (doubles, CheckpointError, "got F64 of shape [24, 40]"),
        (not_a_number, ScaleError, "bad weight; expected finite numbers"),
        (infinite, ScaleError, "bad weight; expected finite numbers"),
        (other_weights, CheckpointError, "not the weights that were quantized"),
        (smoothed, CheckpointError, "not the weights that were quantized"),
        (smoothed_columns, CheckpointError, "not the weights that were quantized"),
        (negative, CheckpointError, "not the weights that were quantized"),
    ],
)
def test_convert_from_weights_that_are_not_the_originals_is_refused(
    pair: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    scales: int,
    change: Change,
    error: type[P2QError],
    message: str,
) -> None:
    source, originals = pair(values(24, 40), scales=scales)
    tensors = load(originals)
    change(tensors)
    save_file(tensors, originals / "model.safetensors", {"format": "pt"})
    for dry_run in (True, False):
        with pytest.raises(error) as refused:
            convert(source, tmp_path / "target", from_weights=originals, dry_run=dry_run)
        file = originals if change is missing else originals / "model.safetensors"
        assert str(refused.value).startswith(f"{file}, {UP}.weight: ")
        assert message in str(refused.value)
    assert not (tmp_path / "target").exists()


def test_convert_from_weights_of_another_tiny_llama_is_refused(
    tiny_w8a8: Path, make_llama: Make, tmp_path: Path
) -> None:
    other = make_llama(tmp_path / "other", initializer_range=0.3)
    with pytest.raises(CheckpointError, match="not the weights that were quantized"):
        convert(tiny_w8a8, tmp_path / "target", from_weights=other)


def test_convert_from_the_int8_checkpoint_itself_is_refused(tiny_w8a8: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not the original of the quantized weight"):
        convert(tiny_w8a8, tmp_path / "target", from_weights=tiny_w8a8)


def test_convert_from_weights_that_are_no_checkpoint_is_refused(tiny_w8a8: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint directory"):
        convert(tiny_w8a8, tmp_path / "target", from_weights=tmp_path / "nothing")


@pytest.mark.parametrize("scale", [1e-40, 2.0**-100, 1e30])
def test_originals_row_of_zeros_gets_a_usable_scale_whatever_it_had(
    make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, scale: float
) -> None:
    w8a8[f"{UP}.weight"][1] = 0
    original = {
        f"{name}.weight": (w8a8[f"{name}.weight"] * w8a8[f"{name}.weight_scale"]).to(torch.float32)
        for name in (UP, DOWN)
    }
    w8a8[f"{UP}.weight_scale"][1] = scale
    source = make_checkpoint(w8a8)
    originals = make_checkpoint(original, "originals", quantization=False)
    convert(source, tmp_path / "target", from_weights=originals)
    after = load_file(tmp_path / "target" / "model.safetensors")
    assert after[f"{UP}.weight"][1].tolist() == [0] * 8
    assert after[f"{UP}.weight_scale"][1].item() == 1.0
