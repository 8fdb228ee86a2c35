import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from p2q.checkpoint import INDEX_NAME, bytes_of, open_checkpoint
from p2q.convert import convert
from p2q.errors import CheckpointError, P2QError, ScaleError, SchemeError
from p2q.inspection import inspect
from p2q.linears import linear_layers
from p2q.manifest import MANIFEST_NAME, changed_files, digest_of_files, read_manifest, sha256_of
from p2q.quantize import Scales, quantize, quantize_weight

Make = Callable[..., Path]
Tree = Callable[[Path], dict[str, str]]
Threads = Callable[[int], AbstractContextManager[None]]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def load(checkpoint: Path) -> dict[str, torch.Tensor]:
    shards = open_checkpoint(checkpoint).shards
    return {name: tensor for shard in shards for name, tensor in load_file(checkpoint / shard).items()}


def change(checkpoint: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of a checkpoint with one file."""
    kept = {name: tensor for name, tensor in {**load(checkpoint), **tensors}.items() if tensor is not None}
    save_file(kept, checkpoint / "model.safetensors", {"format": "pt"})


def weight(*rows: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype)


# Values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantize_absmax_is_the_formula_in_float32(dtype: torch.dtype) -> None:
    values = torch.randn(660, 1601, generator=torch.Generator().manual_seed(1)).to(dtype)  # more than one chunk
    levels, scale, figures = quantize_weight(values, "absmax", file="f", tensor="t")
    rows = values.float().numpy()
    scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    assert scale.dtype == torch.float32
    assert np.array_equal(scale.numpy(), scales)
    assert np.array_equal(levels.numpy(), np.rint(rows / scales).astype(np.int8))
    assert figures.clipped == 0
    assert int(levels.abs().max()) == 127


def exact_power_of_two(row: list[float]) -> tuple[int, list[int], int]:
    """Of the powers of two around absmax / 127 the better one, in rational arithmetic: (k, values, clipped)."""

    def attempt(exponent: int) -> tuple[Fraction, int, list[int], int]:
        levels = [round(Fraction(value) / Fraction(2) ** exponent) for value in row]
        clamped = [min(max(level, -128), 127) for level in levels]
        error = sum((Fraction(v) - q * Fraction(2) ** exponent) ** 2 for v, q in zip(row, clamped, strict=True))
        return Fraction(error), -exponent, clamped, sum(a != b for a, b in zip(levels, clamped, strict=True))

    floor = math.frexp(np.float32(max(map(abs, row))) / np.float32(127))[1] - 1
    _, negative, levels, clipped = min(attempt(floor), attempt(floor + 1))  # ties to the larger exponent
    return -negative, levels, clipped


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quantize_power_of_two_is_the_exact_choice(dtype: torch.dtype) -> None:
    values = torch.randn(60, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
    levels, scale, figures = quantize_weight(values, "power-of-two", file="f", tensor="t")
    expected = [exact_power_of_two(row) for row in values.tolist()]
    assert figures.exponents.tolist() == [k for k, _, _ in expected]
    assert scale.flatten().tolist() == [2.0**k for k, _, _ in expected]
    assert levels.tolist() == [row for _, row, _ in expected]
    assert figures.clipped == sum(clipped for _, _, clipped in expected) > 0


@pytest.mark.parametrize("scales", ["absmax", "power-of-two"])
def test_quantize_error_figures_are_those_of_the_weights(scales: Scales) -> None:
    values = torch.randn(30, 40, generator=torch.Generator().manual_seed(4), dtype=torch.float64).float()
    levels, scale, figures = quantize_weight(values, scales, file="f", tensor="t")
    exact, restored = values.double().numpy(), levels.double().numpy() * scale.double().numpy()
    # They are summed in units of the scale / 2^20, so that no order of summation matters.
    assert figures.squared_error == pytest.approx(((restored - exact) ** 2).sum(), rel=1e-5)
    assert figures.squared_norm == pytest.approx((exact**2).sum(), rel=1e-5)


@pytest.mark.parametrize("scales", ["absmax", "power-of-two"])
def test_quantize_row_of_zeros_stays_zero_under_scale_one(scales: Scales) -> None:
    levels, scale, _ = quantize_weight(weight([0, -0.0], [1, 2]), scales, file="f", tensor="t")
    assert levels[0].tolist() == [0, 0]
    assert scale[0].item() == 1.0


def test_quantize_row_whose_scale_underflows_becomes_zeros_under_a_usable_scale() -> None:
    levels, scale, _ = quantize_weight(weight([1e-44, -1e-43], [1, 2]), "absmax", file="f", tensor="t")
    assert levels[0].tolist() == [0, 0]
    assert scale[0].item() == 2.0**-126


@pytest.mark.parametrize("largest", [1e-25, 3e38], ids=["tiny", "huge"])
def test_quantize_row_out_of_the_proven_range_is_refused_for_powers_of_two_only(largest: float) -> None:
    values = weight([1.0, 2.0], [largest, 0.0])
    quantize_weight(values, "absmax", file="f", tensor="t")
    with pytest.raises(ScaleError, match=r"f, t: .*expected an exponent in .*, got 2\^-?\d+ at row 1"):
        quantize_weight(values, "power-of-two", file="f", tensor="t")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("row", [0, 3, 1999])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantize_weight_that_is_no_number_is_refused_with_its_row(bad: float, row: int, dtype: torch.dtype) -> None:
    values = torch.ones(2000, 3, dtype=dtype)
    values[row, 1] = bad
    with pytest.raises(ScaleError, match=f"f, t: bad weight; expected finite numbers, got {bad} at row {row}$"):
        quantize_weight(values, "absmax", file="f", tensor="t")


# Checkpoints


def test_quantize_layers_are_every_linear_but_the_head(tiny_llama: Path) -> None:
    layers, stay = linear_layers(open_checkpoint(tiny_llama))
    parts = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    assert [layer.name for layer in layers] == sorted(
        f"model.layers.{layer}.{part}" for layer in range(2) for part in parts
    )
    assert stay == ["lm_head"]


def test_quantize_layers_are_those_that_compressed_tensors_will_match(tiny_llama: Path, tiny_w8a8: Path) -> None:
    from compressed_tensors.utils.match import match_named_modules
    from transformers import AutoModelForCausalLM

    from p2q.scheme import quantized_layers

    config = json.loads((tiny_w8a8 / "config.json").read_text())["quantization_config"]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    matched = {name for name, _ in match_named_modules(model, ["Linear"], config["ignore"])}
    assert matched == {layer.name for layer in quantized_layers(open_checkpoint(tiny_w8a8))}
    assert config["ignore"] == ["lm_head"]


def test_quantize_tiny_llama_has_the_values_of_each_weight(tiny_llama: Path, tiny_w8a8: Path) -> None:
    before, after = load(tiny_llama), load(tiny_w8a8)
    for name in before:
        if f"{name}_scale" in after:
            levels, scale, _ = quantize_weight(before[name], "absmax", file="f", tensor=name)
            assert torch.equal(after[name], levels)
            assert torch.equal(after[f"{name}_scale"], scale)
        else:
            assert bytes_of(after[name]) == bytes_of(before[name])
            assert after[name].dtype == before[name].dtype
    assert len(after) == len(before) + 14


def test_quantize_config_keeps_every_other_setting(tiny_llama: Path, tiny_w8a8: Path) -> None:
    before, after = (json.loads((path / "config.json").read_text()) for path in (tiny_llama, tiny_w8a8))
    added = after.pop("quantization_config")
    assert after == before
    assert (added["quant_method"], added["format"]) == ("compressed-tensors", "int-quantized")


def test_quantize_other_files_are_copied(tiny_llama: Path, tiny_w8a8: Path, tree: Tree) -> None:
    before, after = tree(tiny_llama), tree(tiny_w8a8)
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {"config.json", "model.safetensors"}


def test_quantize_shards_keep_names_and_the_index_is_right(make_llama: Make, tmp_path: Path, tiny_w8a8: Path) -> None:
    source = make_llama(tmp_path / "source", shard_size="60KB")
    target = tmp_path / "target"
    quantize(source, target)
    before, after = open_checkpoint(source), open_checkpoint(target)  # which compares the index with the shards
    assert len(before.shards) > 2
    assert before.shards.keys() == after.shards.keys()
    assert all(after.tensors[name].shard == info.shard for name, info in before.tensors.items())
    whole = load(tiny_w8a8)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in load(target).items())
    index = json.loads((target / INDEX_NAME).read_text())
    size = sum(shard.path.stat().st_size - len(shard.header) for shard in after.shards.values())
    assert index["metadata"]["total_size"] == size


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_quantize_other_source_dtypes_and_biases(make_llama: Make, tmp_path: Path, dtype: torch.dtype) -> None:
    source = make_llama(tmp_path / "source", dtype=dtype, attention_bias=True, mlp_bias=True)
    quantize(source, tmp_path / "target")
    before, after = load(source), load(tmp_path / "target")
    biases = [name for name in before if name.endswith(".bias")]
    assert len(biases) == 14
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == dtype for name in biases)
    assert torch.equal(after[Q_PROJ], quantize_weight(before[Q_PROJ], "absmax", file="", tensor="")[0])


def test_quantize_tensors_of_any_other_kind_are_carried_through(make_llama: Make, tmp_path: Path) -> None:
    source = make_llama(tmp_path / "source")
    odd = {
        "f8": torch.ones(3).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "long." * 1000 + "name": torch.arange(3),
    }
    change(source, **odd)
    quantize(source, tmp_path / "target")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "target")
    for name in odd:
        data = []
        for checkpoint in (before, after):
            shard, info = checkpoint.shards["model.safetensors"], checkpoint.tensors[name]
            start = len(shard.header)
            data.append((info.dtype, info.shape, shard.path.read_bytes()[start + info.start : start + info.end]))
        assert data[0] == data[1]


def test_quantize_metadata_is_kept(make_llama: Make, tmp_path: Path) -> None:
    source = make_llama(tmp_path / "source")
    save_file(load(source), source / "model.safetensors", {"licence": "ünï"})
    quantize(source, tmp_path / "target")
    opened = open_checkpoint(tmp_path / "target")
    assert opened.shards["model.safetensors"].metadata == {"format": "pt", "licence": "ünï"}


@pytest.mark.parametrize("scales", ["absmax", "power-of-two"])
def test_quantize_same_source_gives_the_same_bytes_with_any_number_of_threads(
    make_llama: Make, tmp_path: Path, tree: Tree, threads: Threads, scales: Scales
) -> None:
    source = make_llama(tmp_path / "source", hidden_size=512, intermediate_size=1100, num_hidden_layers=1)
    for number in (1, 4):
        with threads(number):
            quantize(source, tmp_path / str(number), scales=scales)
    assert tree(tmp_path / "1") == tree(tmp_path / "4")


def test_quantize_power_of_two_satisfies_the_contract_and_has_a_manifest(tiny_llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    quantize(tiny_llama, target, scales="power-of-two")
    found = inspect(target)
    assert found.contract_holds
    assert found.changed == {}
    manifest = read_manifest(target)
    assert manifest is not None
    assert manifest.rule == "quantize"
    sources = {name: sha256_of(tiny_llama / name) for name in open_checkpoint(tiny_llama).files()}
    assert manifest.source_digest == digest_of_files(sources)
    assert changed_files(target, manifest) == {}
    with pytest.raises(ScaleError, match="already a power of two"):
        convert(target, tmp_path / "converted")


def test_quantize_absmax_has_no_manifest(tiny_w8a8: Path) -> None:
    assert not (tiny_w8a8 / MANIFEST_NAME).exists()


def test_quantize_result_loads_in_transformers_with_close_logits(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    quantize(tiny_llama, tmp_path / "target", scales="power-of-two")
    prompt = torch.arange(40).reshape(2, 20)
    before, after = (
        AutoModelForCausalLM.from_pretrained(path)(prompt).logits.float() for path in (tiny_llama, tmp_path / "target")
    )
    assert torch.isfinite(after).all()
    assert (after - before).norm() < 0.05 * before.norm()


def test_quantize_progress_is_told_of_every_layer(tiny_llama: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    done = quantize(tiny_llama, tmp_path / "target", progress=lambda *layer: told.append(layer))
    assert told == [(name, number, 14) for number, name in enumerate(done.layers, 1)]


# Refusals


def edit_config(checkpoint: Path, **settings: object) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_quantize_null_quantization_config_is_none(make_llama: Make, tmp_path: Path) -> None:
    source = make_llama(tmp_path / "source")
    edit_config(source, quantization_config=None)
    assert len(quantize(source, tmp_path / "target").layers) == 14


REFUSED: dict[str, tuple[Callable[[Path], None], type[P2QError], str]] = {
    "gptq": (
        lambda path: edit_config(path, quantization_config={"quant_method": "gptq", "bits": 4}),
        SchemeError,
        r"config\.json: already quantized; expected bf16, fp16 or fp32 weights, got gptq with 4 bits",
    ),
    "empty configuration": (lambda path: edit_config(path, quantization_config={}), SchemeError, "already quantized"),
    "configuration a list": (lambda path: edit_config(path, quantization_config=[1]), SchemeError, "already quantized"),
    "old configuration": (lambda path: edit_config(path, compression_config={}), SchemeError, "already quantized"),
    "scale beside a weight": (
        lambda path: change(path, **{f"{Q_PROJ}_scale": torch.ones(64, 1)}),
        SchemeError,
        rf"{Q_PROJ}: already quantized; expected no scale, got {Q_PROJ}_scale",
    ),
    "unknown model": (
        lambda path: edit_config(path, model_type="no_such_model"),
        CheckpointError,
        r"config\.json: transformers cannot build this model: .*no_such_model",
    ),
    "no model type": (lambda path: edit_config(path, model_type=None), CheckpointError, "transformers cannot build"),
    "broken sizes": (lambda path: edit_config(path, hidden_size="x"), CheckpointError, "transformers cannot build"),
    "no language model": (lambda path: edit_config(path, model_type="vit"), CheckpointError, "cannot build this model"),
    "weight missing": (
        lambda path: change(path, **{Q_PROJ: None}), CheckpointError, f"{Q_PROJ}: a linear layer's weight is missing"
    ),
    "weight of another shape": (
        lambda path: change(path, **{Q_PROJ: torch.ones(32, 64)}),
        CheckpointError,
        rf"{Q_PROJ}: the weight does not fit config\.json; expected shape \[64, 64\], got \[32, 64\]",
    ),
    "weight of int8": (
        lambda path: change(path, **{Q_PROJ: torch.ones(64, 64, dtype=torch.int8)}),
        SchemeError,
        f"{Q_PROJ}: not a floating-point weight; expected BF16 or F16 or F32, got I8",
    ),
    "weight of float64": (
        lambda path: change(path, **{Q_PROJ: torch.ones(64, 64, dtype=torch.float64)}), SchemeError, "got F64"
    ),
    "weight unknown to the model": (
        lambda path: change(path, **{"model.layers.0.adapter.weight": torch.ones(4, 4)}),
        SchemeError,
        r"adapter\.weight: .*expected the weight of a linear layer or an embedding, got one that the model's code",
    ),
    "weight NaN": (
        lambda path: change(path, **{Q_PROJ: torch.full((64, 64), math.nan)}), ScaleError, f"{Q_PROJ}: .*nan at row 0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_quantize_source_that_does_not_fit_is_refused(make_llama: Make, tmp_path: Path, case: str) -> None:
    spoil, error, reason = REFUSED[case]
    source = make_llama(tmp_path / "source")
    spoil(source)
    with pytest.raises(error, match=reason):
        quantize(source, tmp_path / "a" / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_quantize_quantized_source_is_refused(tiny_w8a8: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match=r"already quantized; .*got compressed-tensors"):
        quantize(tiny_w8a8, tmp_path / "target")


def test_quantize_tied_head_with_other_values_is_refused(make_llama: Make, tmp_path: Path) -> None:
    source = make_llama(tmp_path / "source")
    edit_config(source, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: config\.json ties the output head"):
        quantize(source, tmp_path / "target")


def test_quantize_code_that_came_with_the_model_is_not_run(make_llama: Make, tmp_path: Path) -> None:
    source = make_llama(tmp_path / "source")
    (source / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    edit_config(source, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"})
    with pytest.raises(CheckpointError, match="transformers cannot build this model"):
        quantize(source, tmp_path / "target")
    assert not (tmp_path / "ran").exists()


def test_quantize_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)).save_pretrained(
        tmp_path / "source"
    )
    with pytest.raises(CheckpointError, match="the model has no linear layers to quantize"):
        quantize(tmp_path / "source", tmp_path / "target")


def test_quantize_layer_past_the_bound_of_int32_is_refused_for_powers_of_two(make_llama: Make, tmp_path: Path) -> None:
    source = make_llama(
        tmp_path / "source", hidden_size=8, intermediate_size=132_105, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(SchemeError, match=r"mlp\.down_proj\.weight: .*got K = 132105"):
        quantize(source, tmp_path / "target", scales="power-of-two")
