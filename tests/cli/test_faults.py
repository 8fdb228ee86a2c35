"""Faults of a checkpoint that the other tests of bad input do not have, through the real entry point."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from p2q import checkpoint
from p2q.requantize import TorchRequantizer, requantize
from p2q.scales import power_of_two

Make = Callable[..., Path]
Config = Callable[..., dict[str, Any]]
Tree = Callable[[Path], dict[str, str]]
P2Q = Callable[..., Any]
Refused = Callable[..., str]
Tensors = dict[str, torch.Tensor]
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
INDEX = "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def two_shards(make_checkpoint: Make, w8a8: Tensors, where: str = "source") -> Path:
    return make_checkpoint(w8a8, where, shards={A: list(w8a8)[::2], B: list(w8a8)[1::2]})


# Shards


@pytest.mark.parametrize("region", ["length prefix", "header", "data"])
@pytest.mark.parametrize("shard", [A, B])
def test_shard_truncated_anywhere_is_refused(
    refused: Refused, make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, region: str, shard: str
) -> None:
    source = two_shards(make_checkpoint, w8a8)
    whole = (source / shard).read_bytes()
    data = 8 + struct.unpack("<Q", whole[:8])[0]
    lengths = {
        "length prefix": range(9),
        "header": [9, data // 2, data - 1],
        "data": [data, data + 1, (data + len(whole)) // 2, len(whole) - 1],
    }
    for length in lengths[region]:
        (source / shard).write_bytes(whole[:length])
        told = refused("convert", source, tmp_path / "target")
        assert told.startswith(f"{source / shard}: not a complete safetensors file (")


@pytest.mark.parametrize("damage", ["trailing bytes", 0, 1, 10**6, 100_000_001, 1 << 32, 1 << 63, (1 << 64) - 1])
def test_shard_with_trailing_bytes_or_a_wrong_header_length_is_refused(
    refused: Refused, make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, damage: str | int
) -> None:
    source = two_shards(make_checkpoint, w8a8)
    whole = (source / B).read_bytes()
    damaged = struct.pack("<Q", damage) + whole[8:] if isinstance(damage, int) else whole + bytes(8)
    (source / B).write_bytes(damaged)
    assert refused("convert", source, tmp_path / "target").startswith(
        f"{source / B}: not a complete safetensors file ("
    )


Entries = dict[str, Any]
WEIGHT, SCALE = f"{UP}.weight", f"{UP}.weight_scale"


def shifted(entries: Entries, start: int, end: int) -> str:
    found = entries[WEIGHT]["data_offsets"]
    return changed(entries, data_offsets=[found[0] + start, found[1] + end])


def changed(entries: Entries, **fields: Any) -> str:
    return json.dumps({**entries, WEIGHT: {**entries[WEIGHT], **fields}})


HEADERS: dict[str, Callable[[Entries], str | bytes]] = {
    "not UTF-8": lambda e: json.dumps(e).encode().replace(b"up_proj", b"up_\xff\xfeoj"),
    "byte order mark": lambda e: b"\xef\xbb\xbf" + json.dumps(e).encode(),
    "not JSON": lambda e: "x" * 100,
    "JSON and more": lambda e: json.dumps(e) + "{}",
    "list": lambda e: json.dumps([e]),
    "entry a list": lambda e: json.dumps({**e, WEIGHT: list(e[WEIGHT].values())}),
    "overlap": lambda e: shifted(e, -4, -4),
    "overlap at the start": lambda e: shifted(e, -4, 0),
    "hole": lambda e: json.dumps({name: entry for name, entry in e.items() if name != WEIGHT}),
    "offsets reversed": lambda e: changed(e, data_offsets=e[WEIGHT]["data_offsets"][::-1]),
    "offsets past the file": lambda e: shifted(e, 0, 1 << 40),
    "offsets negative": lambda e: changed(e, data_offsets=[-48, 0]),
    "offsets past 64 bits": lambda e: changed(e, data_offsets=[0, 1 << 64]),
    "too few elements": lambda e: changed(e, shape=[5, 8]),
    "too many elements": lambda e: changed(e, shape=[6, 9]),
    "elements that overflow": lambda e: changed(e, shape=[1 << 33, 1 << 33]),
    "wider dtype": lambda e: changed(e, dtype="I16"),
    "unknown dtype": lambda e: changed(e, dtype="I9"),
    "dtype an object": lambda e: json.dumps({**e, SCALE: {**e[SCALE], "dtype": {"F32": None}}}),
    "no dtype": lambda e: json.dumps({**e, WEIGHT: {"shape": [6, 8], "data_offsets": [0, 48]}}),
    "same tensor twice": lambda e: json.dumps(e)[:-1] + f', "{WEIGHT}": {json.dumps(e[WEIGHT])}}}',
    "same tensor twice, elsewhere": lambda e: f'{{"{WEIGHT}": {json.dumps(e[DOWN + ".weight"])}, {json.dumps(e)[1:]}',
    "same field twice": lambda e: json.dumps(e).replace('"shape"', '"dtype": "I8", "shape"', 1),
}  # fmt: skip


@pytest.mark.parametrize("command", ["convert", "inspect"])
@pytest.mark.parametrize("case", HEADERS)
def test_shard_with_a_bad_header_is_refused(
    refused: Refused, make_checkpoint: Make, tmp_path: Path, case: str, command: str
) -> None:
    shard = make_checkpoint() / "model.safetensors"
    whole = shard.read_bytes()
    data = 8 + struct.unpack("<Q", whole[:8])[0]
    text = HEADERS[case](json.loads(whole[8:data]))
    text = text.encode() if isinstance(text, str) else text
    shard.write_bytes(struct.pack("<Q", len(text)) + text + whole[data:])
    arguments = [tmp_path / "target"] if command == "convert" else []
    assert refused(command, shard.parent, *arguments).startswith(f"{shard}")


# The index


@pytest.mark.parametrize("name", ["../other/{}", "{tmp}/other/{}", "sub/{}", "./{}", "sub/../{}", "", ".", "..", "sub"])
def test_index_naming_anything_but_a_file_beside_it_is_refused(
    refused: Refused, make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, other = two_shards(make_checkpoint, w8a8), two_shards(make_checkpoint, w8a8, "other")
    shutil.copytree(other, source / "sub")
    shard = name.replace("{tmp}", str(tmp_path)).replace("{}", B)
    index = json.loads((source / INDEX).read_text())
    index["weight_map"] = {tensor: shard if at == B else at for tensor, at in index["weight_map"].items()}
    (source / INDEX).write_text(json.dumps(index))
    opened: list[Path] = []

    def note(path: Path, **more: Any) -> Any:
        opened.append(path)
        return safe_open(path, **more)

    monkeypatch.setattr(checkpoint, "safe_open", note)
    told = refused("convert", source, tmp_path / "target")
    assert told.startswith(f"{source / INDEX}: the index names a file that is no shard of this folder")
    assert not [path for path in opened if path != source / A]


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", INDEX, "x" * 300, "model.bin"], ids=lambda name: name[:20]
)
def test_index_naming_a_file_that_cannot_hold_tensors_is_refused(
    refused: Refused, make_checkpoint: Make, tmp_path: Path, name: str
) -> None:
    source = make_checkpoint()
    (source / INDEX).write_text(json.dumps({"weight_map": {WEIGHT: name}}))
    told = refused("convert", source, tmp_path / "target")
    assert told.startswith(f"{source / INDEX}: the index names a file that is no shard of this folder")


@pytest.mark.parametrize("name", ["p2q_manifest.json", f"{A}.partial"])
def test_index_naming_a_shard_as_a_file_that_p2q_makes_is_refused(
    refused: Refused, make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, name: str
) -> None:
    source = make_checkpoint(w8a8, shards={A: list(w8a8)[::2], name: list(w8a8)[1::2]})
    told = refused("convert", source, tmp_path / "target")
    assert told.startswith(f"{source / INDEX}: the index names a file that is no shard of this folder")


def test_index_with_a_stray_real_shard_beside_it_converts_without_it(
    p2q: P2Q, make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, tree: Tree
) -> None:
    source, stray = two_shards(make_checkpoint, w8a8), "model-00003-of-00002.safetensors"
    assert p2q("convert", source, tmp_path / "alone").code == 0
    shutil.copy(source / B, source / stray)
    assert p2q("convert", source, tmp_path / "target", "--json").json()["skipped"] == [stray]
    assert tree(tmp_path / "target") == tree(tmp_path / "alone")


@pytest.mark.parametrize("index", [False, True], ids=["no index", "index"])
@pytest.mark.parametrize("command", ["convert", "quantize", "inspect"])
def test_pickles_alone_are_refused_as_unsafe(
    refused: Refused, make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, command: str, index: bool
) -> None:
    source = make_checkpoint(w8a8)
    (source / "model.safetensors").unlink()
    torch.save(w8a8, source / "pytorch_model.bin")
    if index:
        names = {"weight_map": dict.fromkeys(w8a8, "pytorch_model.bin")}
        (source / "pytorch_model.bin.index.json").write_text(json.dumps(names))
    told = refused(command, source, *([] if command == "inspect" else [tmp_path / "target"]))
    assert told.startswith(str(source))
    assert "pickle" in told
    assert "unsafe" in told


# The configuration


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff\xfe{}", b'{"model_type": "\xe9"}', b"null", b"3", b'"text"', b"[" * 10**5, b'{"a":' * 10**5, b"\0"],
    ids=lambda text: repr(text)[:16],
)
def test_config_that_is_no_object_is_refused(
    refused: Refused, make_checkpoint: Make, tmp_path: Path, text: bytes
) -> None:
    source = make_checkpoint()
    (source / "config.json").write_bytes(text)
    assert refused("convert", source, tmp_path / "target").startswith(f"{source / 'config.json'}: ")


@pytest.mark.parametrize("pattern", ["re:(", "re:a{99999999999}", "re:" + "(" * 5000 + ")" * 5000], ids=lambda p: p[:6])
@pytest.mark.parametrize("where", ["ignore", "targets"])
def test_config_with_a_pattern_that_does_not_compile_is_refused(
    refused: Refused, make_checkpoint: Make, make_config: Config, tmp_path: Path, pattern: str, where: str
) -> None:
    config = make_config()
    (config if where == "ignore" else config["config_groups"]["group_0"])[where] = [pattern]
    source = make_checkpoint(quantization=config)
    assert refused("convert", source, tmp_path / "target").startswith(f"{source / 'config.json'}: bad quantization")


# Tensors


@pytest.mark.parametrize(
    ("dtype", "shape", "reason"),
    [
        (torch.int16, (6, 8), f"{SCALE}: a weight scale without an int8 weight; expected {WEIGHT} in I8, got I16"),
        (torch.uint8, (6, 8), f"{SCALE}: a weight scale without an int8 weight; expected {WEIGHT} in I8, got U8"),
        (torch.int8, (48,), f"{WEIGHT}: not a linear layer; expected"),
        (torch.int8, (), f"{WEIGHT}: not a linear layer; expected"),
        (torch.int8, (7, 8), f"{SCALE}: wrong scale; expected"),
        (torch.int8, (2, 6, 8), f"{SCALE}: wrong scale; expected"),
    ],
)
def test_weight_that_does_not_fit_is_refused_by_name(
    refused: Refused, make_checkpoint: Make, w8a8: Tensors, tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...],
    reason: str,
) -> None:  # fmt: skip
    source = make_checkpoint({**w8a8, WEIGHT: torch.ones(shape, dtype=dtype)})
    assert refused("convert", source, tmp_path / "target").startswith(f"{source / 'model.safetensors'}, {reason}")


BAD = f"{UP}.input_scale: bad activation scale; expected"
STATIC = {"dynamic": False, "strategy": "tensor"}
INPUTS: dict[str, tuple[dict[str, Any], torch.Tensor | None, str]] = {
    **{
        str(value): (STATIC, torch.tensor([value]), BAD)
        for value in (float("nan"), float("inf"), -float("inf"), 0.0, -0.5, 2.0**-65, 2.0**65)
    },
    "shape [2]": (STATIC, torch.ones(2), BAD),
    "int32": (STATIC, torch.ones(1, dtype=torch.int32), BAD),
    "complex": (STATIC, torch.ones(1, dtype=torch.complex64), f"{UP}.input_scale: unknown dtype; expected"),
    "missing": (STATIC, None, f"{WEIGHT}: static activations without their scale; expected a tensor {UP}.input_scale"),
    "dynamic": ({}, torch.ones(1), f"{UP}.input_scale: an activation scale in a layer whose activations are dynamic"),
    "asymmetric": ({"symmetric": False}, None, f"{DOWN}.weight: asymmetric activations; expected"),
    "asymmetric static": ({**STATIC, "symmetric": False}, torch.ones(1), f"{DOWN}.weight: asymmetric activations;"),
}


@pytest.mark.parametrize("options", [[], ["--input-scales"], ["--dry-run"]], ids=" ".join)
@pytest.mark.parametrize("case", INPUTS)
def test_activations_that_do_not_fit_are_refused_by_layer(
    refused: Refused, make_checkpoint: Make, make_config: Config, w8a8: Tensors, tmp_path: Path, case: str,
    options: list[str],
) -> None:  # fmt: skip
    changes, scale, reason = INPUTS[case]
    if changes:
        w8a8[f"{DOWN}.input_scale"] = torch.tensor(0.25)
    if scale is not None:
        w8a8[f"{UP}.input_scale"] = scale
    config = make_config()
    config["config_groups"]["group_0"]["input_activations"].update(changes)
    source = make_checkpoint(w8a8, quantization=config)
    told = refused("convert", source, tmp_path / "target", *options)
    assert told.startswith(f"{source / 'model.safetensors'}, {reason}")


def test_ten_thousand_tensors_in_four_shards_get_the_reference_values(
    p2q: P2Q, make_checkpoint: Make, tmp_path: Path
) -> None:
    random, layers, shards = torch.Generator().manual_seed(7), 5000, [f"{i}.safetensors" for i in range(4)]
    weights = torch.randint(-128, 128, (layers, 2, 4), generator=random, dtype=torch.int8)
    scales = torch.rand(layers, 2, 1, generator=random) * 0.01 + 0.001
    tensors = {f"l{i:04}.weight": weights[i].clone() for i in range(layers)}
    tensors |= {f"l{i:04}.weight_scale": scales[i].clone() for i in range(layers)}
    names = list(tensors)
    half = layers + layers // 2  # the scales of the second half lie in another shard than their weights
    pieces = {
        shard: [*names[:layers][i::4], *names[layers:half][i::4], *names[half:][(i + 1) % 4 :: 4]]
        for i, shard in enumerate(shards)
    }
    source = make_checkpoint(tensors, shards=pieces)
    assert p2q("convert", source, tmp_path / "target", "--json", "--workers", 1).json()["layers"] == layers
    made = {name: tensor for shard in shards for name, tensor in load_file(tmp_path / "target" / shard).items()}
    expected, figures = requantize(weights, scales.flatten().double(), "mse", TorchRequantizer())
    assert made.keys() == tensors.keys()
    assert torch.equal(torch.stack([made[name] for name in names[:layers]]), expected)
    new = torch.stack([made[name] for name in names[layers:]])
    assert torch.equal(new, power_of_two(figures.exponents, scales))
