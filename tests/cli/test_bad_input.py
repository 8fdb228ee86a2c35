"""Bad input through the real entry point: exit code 2, one line that says what and where, and nothing written."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Make = Callable[..., Path]
Tree = Callable[[Path], dict[str, str]]
P2Q = Callable[..., Any]
Tensors = dict[str, torch.Tensor]
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
INDEX = "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
W8A8 = (
    "compressed-tensors int-quantized W8A8: symmetric int8 weights per channel or per tensor, "
    "symmetric int8 activations, dynamic per token or static per tensor"
)


# The source directory. {} in the expected line is the source.

Spoil = Callable[[Path], object]


def write(name: str, text: str) -> Spoil:
    return lambda source: (source / name).write_text(text)


def remove(name: str) -> Spoil:
    return lambda source: (source / name).unlink()


def truncate(name: str, size: int) -> Spoil:
    return lambda source: os.truncate(source / name, size)


def reindex(change: Callable[[dict[str, str]], object]) -> Spoil:
    def spoil(source: Path) -> None:
        index = json.loads((source / INDEX).read_text())
        change(index["weight_map"])
        (source / INDEX).write_text(json.dumps(index))

    return spoil


def second_copy(source: Path) -> None:
    from safetensors.torch import load_file, save_file

    extra = {"lm_head.weight": torch.ones(16, 8)}
    save_file({**load_file(source / A), **extra}, source / A)


SOURCES: dict[str, tuple[Spoil, str]] = {
    "no config": (remove("config.json"), "{}: not a checkpoint: there is no config.json"),
    "broken config": (write("config.json", "{"), "{}/config.json: not readable JSON ("),
    "config a list": (write("config.json", "[]"), "{}/config.json: wrong JSON; expected an object, got list"),
    "broken index": (write(INDEX, "{"), f"{{}}/{INDEX}: not readable JSON"),
    "empty index": (write(INDEX, "{}"), f"{{}}/{INDEX}: the index has no weight map; expected {{tensor: shard}}"),
    "no index": (
        remove(INDEX),
        f"{{}}: 2 safetensors files and nothing to say how they belong together; expected {INDEX}",
    ),
    "truncated shard": (truncate(B, 600), f"{{}}/{B}: not a complete safetensors file ("),
    "empty shard": (truncate(B, 0), f"{{}}/{B}: not a complete safetensors file ("),
    "garbage shard": (write(B, "\x7f" * 300), f"{{}}/{B}: not a complete safetensors file ("),
    "missing shard": (
        remove(B),
        f"{{}}/{B}, lm_head.weight, {DOWN}.weight_scale, {UP}.weight_scale: a shard that the index names is missing; "
        "expected a file in {}, got none",
    ),
    "index names a tensor that the shard lacks": (
        reindex(lambda names: names.update({"model.ghost": A})),
        f"{{}}/{INDEX}, model.ghost: the index and the shards disagree; expected it in {A}, got no shard that has it",
    ),
    "index names the wrong shard": (
        reindex(lambda names: names.update({f"{UP}.weight": B})),
        f"{{}}/{INDEX}, {UP}.weight: the index and the shards disagree; expected it in {B}, got {A}",
    ),
    "index lacks a tensor of a shard": (
        reindex(lambda names: names.pop("model.norm.weight")),
        f"{{}}/{INDEX}, model.norm.weight: the index does not name the tensor; got it in {A}",
    ),
    "tensor in two shards": (second_copy, f"{{}}/{B}, lm_head.weight: the tensor is also in {A}"),
    "link that leads nowhere": (
        lambda source: (source / "vocab.txt").symlink_to("gone"),
        "{}/vocab.txt: not a file that can be copied; expected a regular file, got a broken link",
    ),
    "folder link that leads back": (
        lambda source: (source / "loop").symlink_to("."),
        "{}/loop: the link leads back to a folder that holds it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", ["convert", "quantize"])
@pytest.mark.parametrize("case", SOURCES)
def test_source_that_is_no_checkpoint_is_refused(
    refused: Callable[..., str], make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, case: str, command: str
) -> None:
    names = list(w8a8)
    shards = {A: [name for name in names if "scale" not in name and "head" not in name]}
    shards[B] = [name for name in names if name not in shards[A]]
    source = make_checkpoint(w8a8, "my source ünï", shards=shards)
    spoil, line = SOURCES[case]
    spoil(source)
    told = refused(command, source, tmp_path / "a" / "target")
    assert told.startswith(line.replace("{}", str(source)))


@pytest.mark.parametrize("command", ["convert", "quantize", "inspect"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nothing", "not a checkpoint directory; expected a directory, got nothing there"),
        ("file", "not a checkpoint directory; expected a directory, got a file"),
        ("loop", "not a checkpoint directory; expected a directory, got a file"),
        ("empty", "not a checkpoint: there is no config.json"),
        (
            "no weights",
            "there are no safetensors weights; got pytorch_model.bin, which is a pickle and unsafe: "
            "reading it may run any code. Save the model with safetensors first",
        ),
        ("x" * 300, "File name too long"),
    ],
)
def test_source_that_is_something_else_is_refused(
    refused: Callable[..., str], tmp_path: Path, name: str, reason: str, command: str
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty").mkdir()
    (tmp_path / "no weights").mkdir()
    (tmp_path / "no weights" / "config.json").write_text("{}")
    (tmp_path / "no weights" / "pytorch_model.bin").write_text("x")
    arguments = [] if command == "inspect" else [tmp_path / "target"]
    assert refused(command, tmp_path / name, *arguments) == f"{tmp_path / name}: {reason}"


# The quantization. More schemes are in tests/test_scheme.py.


def scheme(config: dict[str, Any], part: str, **changes: Any) -> dict[str, Any]:
    group = config["config_groups"]["group_0"]
    return {**config, "config_groups": {"group_0": {**group, part: {**group[part], **changes} if changes else None}}}


SCHEMES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "none": (lambda _: False, "not quantized; expected W8A8, got bfloat16 weights. `p2q quantize` makes"),
    "empty": (lambda _: {}, "not W8A8 int8; expected W8A8, got a quantization_config without quant_method"),
    "gptq": (lambda _: {"quant_method": "gptq", "bits": 4}, "not W8A8 int8; expected W8A8, got gptq with 4 bits"),
    "awq": (lambda _: {"quant_method": "awq", "bits": 4}, "not W8A8 int8; expected W8A8, got awq with 4 bits"),
    "float-quantized": (
        lambda c: {
            **scheme(scheme(c, "weights", type="float"), "input_activations", type="float"), "format": "float-quantized"
        },
        "not W8A8 int8; expected W8A8, got group_0: W8A8 (weights symmetric float8 per channel; "
        "activations symmetric dynamic float8 per token; format float-quantized)",
    ),
    "pack-quantized": (
        lambda c: {**scheme(scheme(c, "weights", num_bits=4), "input_activations"), "format": "pack-quantized"},
        "not W8A8 int8; expected W8A8, got group_0: W4A16 (weights symmetric int4 per channel; "
        "activations not quantized; format pack-quantized)",
    ),
    "groups of columns": (
        lambda c: scheme(c, "weights", strategy="group", group_size=4),
        "not W8A8 int8; expected W8A8, got group_0: W8A8 (weights symmetric int8 per group; "
        "activations symmetric dynamic int8 per token; format int-quantized)",
    ),
    "two-line problem": (
        lambda c: {**c, "quantization_status": "a\nb"},
        "bad quantization_config; expected W8A8, got quantization_status: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SCHEMES)
def test_scheme_that_is_not_w8a8_is_refused_by_name(
    refused: Callable[..., str], make_checkpoint: Make, make_config: Callable[..., Any], tmp_path: Path, case: str
) -> None:
    change, line = SCHEMES[case]
    source = make_checkpoint(quantization=change(make_config()))
    told = refused("convert", source, tmp_path / "target")
    assert told.startswith(f"{source / 'config.json'}: {line.replace('W8A8,', W8A8 + ',')}")


# Tensors. {} is the file.


def tensor(name: str, value: object) -> Callable[[Tensors], None]:
    def spoil(tensors: Tensors) -> None:
        tensors[name] = value if isinstance(value, torch.Tensor) else tensors[name]
        if not isinstance(value, torch.Tensor):
            tensors[name][4] = value

    return spoil


BAD = f"{{}}, {UP}.weight_scale: bad scale; expected a finite positive scale, got"
WRONG = f"{{}}, {UP}.weight_scale: wrong scale; expected float32, float16 or bfloat16 of shape [6, 1], [6] or [1], got"
RANGE = (
    f"{{}}, {UP}.weight_scale: the scale's power of two leaves the range in which every order of multiplication is "
    "proved to give the same bits; expected an exponent in"
)
SCALE = f"{UP}.weight_scale"
TENSORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (
        lambda t: t.pop(SCALE), f"{{}}, {UP}.weight: missing scale; expected a tensor {SCALE}, got none"
    ),
    "without weight": (
        lambda t: t.pop(f"{UP}.weight"),
        f"{{}}, {SCALE}: a weight scale without an int8 weight; expected {UP}.weight in I8, got none",
    ),
    "NaN": (tensor(SCALE, float("nan")), f"{BAD} nan at row 4"),
    "inf": (tensor(SCALE, float("inf")), f"{BAD} inf at row 4"),
    "-inf": (tensor(SCALE, -float("inf")), f"{BAD} -inf at row 4"),
    "negative": (tensor(SCALE, -0.5), f"{BAD} -0.5 at row 4"),
    "zero": (
        tensor(SCALE, 0.0),
        f"{{}}, {SCALE}: bad scale; expected a positive scale, got 0 at row 4, whose weights are not all zero",
    ),
    "zero for the whole tensor": (
        tensor(SCALE, torch.zeros(1)),
        f"{{}}, {SCALE}: bad scale; expected a positive scale, got 0 at row 0, whose weights are not all zero",
    ),
    "one row too few": (tensor(SCALE, torch.ones(5, 1)), f"{WRONG} float32 of shape [5, 1]"),
    "a row instead of a column": (tensor(SCALE, torch.ones(1, 6)), f"{WRONG} float32 of shape [1, 6]"),
    "groups": (tensor(SCALE, torch.ones(6, 2)), f"{WRONG} float32 of shape [6, 2]"),
    "three dimensions": (tensor(SCALE, torch.ones(6, 1, 1)), f"{WRONG} float32 of shape [6, 1, 1]"),
    "no scale in the tensor": (tensor(SCALE, torch.ones(0)), f"{WRONG} float32 of shape [0]"),
    "integers": (tensor(SCALE, torch.ones(6, 1, dtype=torch.int32)), f"{WRONG} int32 of shape [6, 1]"),
    "float64": (tensor(SCALE, torch.ones(6, 1, dtype=torch.float64)), f"{WRONG} float64 of shape [6, 1]"),
    "float8": (tensor(SCALE, torch.ones(6, 1).to(torch.float8_e4m3fn)), f"{WRONG} float8_e4m3fn of shape [6, 1]"),
    "too small": (tensor(SCALE, 3e-25), f"{RANGE} [-62, 46] for K = 8 and float32 scales, got 2^-81 at row 4"),
    "too large": (tensor(SCALE, 3e25), f"{RANGE} [-62, 46] for K = 8 and float32 scales, got 2^"),
    "subnormal": (tensor(SCALE, 1e-45), f"{RANGE} [-62, 46] for K = 8 and float32 scales, got 2^-149 at row 4"),
    "K too long": (
        lambda t: t.update({"x.weight": torch.ones(1, 132_105, dtype=torch.int8), "x.weight_scale": torch.ones(1, 1)}),
        "{}, x.weight: int32 cannot hold every sum of a row; expected K of at most 132104, got K = 132105",
    ),
    "asymmetric": (
        lambda t: t.update({f"{UP}.weight_zero_point": torch.ones(6, 1, dtype=torch.int8)}),
        f"{{}}, {UP}.weight_zero_point: asymmetric weights; expected zeros, for symmetric weights, got others",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--rule", "ceil", "--overwrite"]], ids=" ".join)
def test_tensor_that_does_not_fit_is_refused_by_name(
    refused: Callable[..., str], make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, case: str, options: list[str]
) -> None:
    spoil, line = TENSORS[case]
    spoil(w8a8)
    source = make_checkpoint(w8a8)
    told = refused("convert", source, tmp_path / "a" / "b" / "target", *options)
    assert told.startswith(line.replace("{}", str(source / "model.safetensors")))


@pytest.mark.parametrize("pattern", [UP, "re:.*up_proj$"], ids=["plain", "re:"])
def test_int8_layer_that_is_ignored_is_refused(
    refused: Callable[..., str], make_checkpoint: Make, make_config: Callable[..., Any], tmp_path: Path, pattern: str
) -> None:
    source = make_checkpoint(quantization=make_config(ignore=["lm_head", pattern]))
    told = refused("convert", source, tmp_path / "target")
    assert told.startswith(
        f"{source / 'model.safetensors'}, {UP}.weight: int8 weights in a layer that the quantization"
    )
    assert told.endswith(f'configuration ignores; expected a floating dtype, got I8, and "{pattern}" in ignore')


def test_tied_head_with_other_values_is_refused(
    refused: Callable[..., str], make_checkpoint: Make, tmp_path: Path
) -> None:
    source = make_checkpoint(config={"tie_word_embeddings": True})
    assert refused("convert", source, tmp_path / "target").startswith(
        f"{source / 'model.safetensors'}, lm_head.weight: config.json ties the output head to the embeddings"
    )


# The target. More of them are in tests/test_target.py.


@pytest.mark.parametrize("options", [[], ["--overwrite"], ["--dry-run"]], ids=" ".join)
@pytest.mark.parametrize(
    ("relative", "reason"),
    [
        ("source", "the target is the source"),
        ("source/inside", "the target lies inside the source"),
        (".", "the source lies inside the target"),
        ("file", "the target is not a directory; expected a directory or nothing, got a file"),
        ("link", "the target is not a directory; expected a directory or nothing, got a symbolic link"),
        ("other", "the target exists and is not a checkpoint; it is not replaced"),
    ],
)
def test_target_that_cannot_be_is_refused(
    refused: Callable[..., str], make_checkpoint: Make, tmp_path: Path, relative: str, reason: str, options: list[str]
) -> None:
    source = make_checkpoint()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    assert refused("convert", source, tmp_path / relative, *options) == f"{tmp_path / relative}: {reason}"


def test_target_below_a_file_is_refused(refused: Callable[..., str], make_checkpoint: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    told = refused("convert", make_checkpoint(), tmp_path / "file" / "target")
    assert told == f"{tmp_path / 'file'}: the target's parent is not a directory; expected a directory, got a file"


@pytest.mark.parametrize("command", ["convert", "quantize"])
def test_target_that_exists_is_refused(
    refused: Callable[..., str], tiny_llama: Path, tiny_w8a8: Path, tiny_p2q: Path, command: str
) -> None:
    source = {"convert": tiny_w8a8, "quantize": tiny_llama}[command]
    assert refused(command, source, tiny_p2q) == f"{tiny_p2q}: the target exists. Give --overwrite to replace it"
