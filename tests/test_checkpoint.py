import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from p2q import checkpoint as module
from p2q.checkpoint import INDEX_NAME, ShardWriter, bytes_of, check_tied, lay_out, open_checkpoint, read_json
from p2q.errors import CheckpointError

Make = Callable[..., Path]
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def split(names: list[str]) -> dict[str, list[str]]:
    """Every other tensor in another shard, so that a weight and its scale lie apart."""
    return {A: names[::2], B: names[1::2]}


def write_raw(path: Path, entries: dict[str, object], data: bytes) -> None:
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


# Opening


def test_open_single_file_finds_every_tensor_and_its_bytes(
    make_checkpoint: Make, w8a8: dict[str, torch.Tensor]
) -> None:
    opened = open_checkpoint(make_checkpoint(w8a8))
    data = (opened.path / "model.safetensors").read_bytes()
    header = opened.shards["model.safetensors"].header
    assert set(opened.tensors) == set(w8a8)
    for name, info in opened.tensors.items():
        assert data[len(header) + info.start : len(header) + info.end] == bytes(bytes_of(w8a8[name]))
        assert torch.equal(opened.read(name), w8a8[name])


def test_open_shards_finds_tensors_where_the_index_says(make_checkpoint: Make, w8a8: dict[str, torch.Tensor]) -> None:
    shards = split(list(w8a8))
    opened = open_checkpoint(make_checkpoint(w8a8, shards=shards))
    assert {name: info.shard for name, info in opened.tensors.items()} == {
        n: s for s, names in shards.items() for n in names
    }
    assert opened.files() == sorted([A, B, INDEX_NAME, "config.json", "tokenizer.json"])


def test_open_single_file_of_another_name_is_accepted(make_checkpoint: Make) -> None:
    assert list(open_checkpoint(make_checkpoint(name="weights.safetensors")).shards) == ["weights.safetensors"]


def test_open_keeps_metadata(make_checkpoint: Make) -> None:
    opened = open_checkpoint(make_checkpoint(metadata={"format": "pt", "licence": "ünïcode"}))
    assert opened.shards["model.safetensors"].metadata == {"format": "pt", "licence": "ünïcode"}


def test_open_leaves_out_hidden_files_and_stray_weights_and_says_so(make_checkpoint: Make) -> None:
    source = make_checkpoint()
    (source / "original").mkdir()
    (source / ".cache" / "huggingface").mkdir(parents=True)
    stray = [
        ".gitattributes",
        "model-00009-of-00009.safetensors",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "original/consolidated.00.pth",
        "UPPER.GGUF",
        ".cache/huggingface/lock",
    ]
    for name in stray:
        (source / name).write_text("x")
    (source / "original" / "params.json").write_text("{}")
    (source / "p2q_manifest.json").write_text("stale")
    opened = open_checkpoint(source)
    assert opened.skipped == sorted([*stray[:-1], ".cache/"])
    assert opened.others == ["config.json", "original/params.json", "tokenizer.json"]


def test_open_follows_links_of_a_model_cache(make_checkpoint: Make, tmp_path: Path) -> None:
    blobs = make_checkpoint(where="blobs")
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(os.path.relpath(blob, snapshot))
    opened = open_checkpoint(snapshot)
    assert opened.files() == ["config.json", "model.safetensors", "tokenizer.json"]
    assert set(opened.tensors) == set(open_checkpoint(blobs).tensors)


def test_open_folder_link_is_followed(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("a")
    (source / "linked").symlink_to(tmp_path / "elsewhere")
    assert "linked/a.txt" in open_checkpoint(source).others


@pytest.mark.parametrize("where", [".", ".."], ids=["itself", "a folder above it"])
def test_open_folder_link_that_leads_back_is_refused(make_checkpoint: Make, where: str) -> None:
    source = make_checkpoint()
    (source / "sub").mkdir()
    (source / "sub" / "loop").symlink_to(where)
    with pytest.raises(CheckpointError, match=r"sub/loop: the link leads back"):
        open_checkpoint(source)


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda path: path.symlink_to("gone"), "a broken link"),
        (lambda path: path.symlink_to("tokenizer.model"), "a broken link"),
        (os.mkfifo, "a pipe, socket or device"),
    ],
    ids=["broken link", "link to itself", "pipe"],
)
def test_open_file_that_cannot_be_copied_is_refused(
    make_checkpoint: Make, make: Callable[[Path], None], got: str
) -> None:
    source = make_checkpoint()
    make(source / "tokenizer.model")
    with pytest.raises(CheckpointError, match=rf"tokenizer\.model: not a file .* expected a regular file, got {got}"):
        open_checkpoint(source)


def test_open_file_name_that_is_no_text_is_refused(make_checkpoint: Make) -> None:
    source = make_checkpoint()
    Path(os.fsdecode(os.fsencode(source) + b"/caf\xe9.txt")).write_text("x")
    with pytest.raises(CheckpointError, match="expected UTF-8"):
        open_checkpoint(source)


def test_read_tensors_of_any_dtype_and_shape_are_listed(make_checkpoint: Make) -> None:
    source = make_checkpoint()
    name = "x" * 10_000
    write_raw(
        source / "model.safetensors",
        {
            "f8": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [0, 3]},
            "f4": {"dtype": "F4", "shape": [2], "data_offsets": [3, 4]},
            "scalar": {"dtype": "F32", "shape": [], "data_offsets": [4, 8]},
            "empty": {"dtype": "F32", "shape": [0, 4], "data_offsets": [8, 8]},
            name: {"dtype": "BOOL", "shape": [1], "data_offsets": [8, 9]},
        },
        bytes(9),
    )
    opened = open_checkpoint(source)
    assert {tensor: info.dtype for tensor, info in opened.tensors.items()} == {
        "f8": "F8_E4M3", "f4": "F4", "scalar": "F32", "empty": "F32", name: "BOOL",
    }  # fmt: skip


# Refusals. What the command line makes of them is in tests/cli/test_bad_input.py.


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, "[1]", "null", '"text"', b"\xff\xfe{}"], ids=lambda text: repr(text)[:12]
)
def test_read_json_anything_but_an_object_is_refused(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=r"config\.json: (not readable|wrong) JSON"):
        read_json(path)


def test_read_json_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    "weight_map",
    [None, {}, [], "x", {"a": 1}, {"a": None}],
    ids=["absent", "empty", "list", "text", "number for a shard", "null for a shard"],
)
def test_open_index_without_a_weight_map_is_refused(make_checkpoint: Make, weight_map: object) -> None:
    source = make_checkpoint()
    (source / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map} if weight_map is not None else {}))
    with pytest.raises(CheckpointError, match="the index has no weight map"):
        open_checkpoint(source)


@pytest.mark.parametrize(
    "shard", ["", ".", "..", "/etc/passwd", "../other.safetensors", "sub/a.safetensors", "a\0b", "\ud800"]
)
def test_open_shard_name_that_is_no_file_here_is_refused(make_checkpoint: Make, shard: str) -> None:
    source = make_checkpoint()
    (source / "sub").mkdir()
    for name in ("../other.safetensors", "sub/a.safetensors"):
        (source / name).write_bytes((source / "model.safetensors").read_bytes())
    (source / INDEX_NAME).write_text(json.dumps({"weight_map": {"t1": shard, "t2": shard, "t3": shard, "t4": shard}}))
    with pytest.raises(CheckpointError, match="the index names a file that is no shard of this folder"):
        open_checkpoint(source)


@pytest.mark.parametrize("shard", ["a.safetensors", "sub.safetensors", "a\0b.safetensors", "\ud800.safetensors"])
def test_open_shard_that_is_missing_is_refused(make_checkpoint: Make, shard: str) -> None:
    source = make_checkpoint()
    (source / "sub.safetensors").mkdir()
    (source / INDEX_NAME).write_text(json.dumps({"weight_map": {"t1": shard, "t2": shard, "t3": shard, "t4": shard}}))
    with pytest.raises(CheckpointError, match="t1, t2, t3 and 1 more: a shard that the index names is missing"):
        open_checkpoint(source)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:5],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"\xff" * 100,
        lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        lambda data: data[:8] + b"[" + data[9:],
    ],
    ids=["empty", "5 bytes", "one byte short", "one byte more", "garbage", "git-lfs pointer", "broken header"],
)
def test_open_damaged_safetensors_file_is_refused(make_checkpoint: Make, damage: Callable[[bytes], bytes]) -> None:
    file = make_checkpoint() / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a complete safetensors file"):
        open_checkpoint(file.parent)


def test_open_tensor_of_a_dtype_that_the_library_does_not_know_is_refused(make_checkpoint: Make) -> None:
    source = make_checkpoint()
    write_raw(source / "model.safetensors", {"a": {"dtype": "F7", "shape": [1], "data_offsets": [0, 1]}}, b"\0")
    with pytest.raises(CheckpointError, match="unknown variant `F7`"):
        open_checkpoint(source)


# Tied heads


@pytest.mark.parametrize("same", [True, False], ids=["same", "different"])
@pytest.mark.parametrize("tied", [True, False, None], ids=["tied", "not tied", "flag absent"])
def test_tied_head_with_other_values_is_refused(
    make_checkpoint: Make, w8a8: dict[str, torch.Tensor], same: bool, tied: bool | None
) -> None:
    w8a8["lm_head.weight"] = w8a8["model.embed_tokens.weight"].clone()
    if not same:
        w8a8["lm_head.weight"][3, 1] = -w8a8["lm_head.weight"][3, 1]
    opened = open_checkpoint(make_checkpoint(w8a8, config={} if tied is None else {"tie_word_embeddings": tied}))
    if tied and not same:
        with pytest.raises(
            CheckpointError, match=r"lm_head\.weight: .*differ; expected the bytes of model\.embed_tokens"
        ):
            check_tied(opened)
    else:
        check_tied(opened)


# Writing


def test_layout_reads_back_and_is_aligned(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(15, dtype=torch.int8).reshape(3, 5),
        "scale": torch.rand(3, 1),
        "half": torch.rand(3).half(),
        "wide": torch.arange(2),
        "flag": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    dtypes = {
        "odd": "I8",
        "scale": "F32",
        "half": "F16",
        "wide": "I64",
        "flag": "BOOL",
        "scalar": "F32",
        "empty": "F32",
    }
    layout = lay_out({n: (dtypes[n], tuple(t.shape), sizes[n]) for n, t in tensors.items()}, {"format": "pt"})
    with ShardWriter(tmp_path / "a.safetensors", layout.header, layout.size) as writer:
        for name, tensor in reversed(tensors.items()):
            writer.write(layout.offsets[name], bytes_of(tensor))
    read = load_file(tmp_path / "a.safetensors")
    assert set(read) == set(tensors)
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert len(layout.header) % 8 == 0
    assert all(layout.offsets[name] % tensor.element_size() == 0 for name, tensor in tensors.items() if tensor.numel())
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.tensor([True]),
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(2).bfloat16(),
    ],
    ids=["scalar", "empty", "bool", "not contiguous", "bfloat16"],
)
def test_bytes_of_are_those_of_the_rows(tensor: torch.Tensor) -> None:
    assert bytes(bytes_of(tensor)) == bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


@pytest.mark.parametrize("block", [1, 7, 16, 1 << 20])
def test_writer_copies_a_tensor_and_no_byte_more(
    make_checkpoint: Make, w8a8: dict[str, torch.Tensor], tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", block)
    opened = open_checkpoint(make_checkpoint(w8a8))
    with ShardWriter(tmp_path / "copy", b"header", 300) as writer:
        writer.copy(5, opened.shards["model.safetensors"], opened.tensors["model.norm.weight"])
    values = bytes(bytes_of(w8a8["model.norm.weight"]))
    assert (tmp_path / "copy").read_bytes() == b"header" + bytes(5) + values + bytes(295 - len(values))


def test_writer_copy_of_a_file_that_shrank_is_refused(make_checkpoint: Make, tmp_path: Path) -> None:
    opened = open_checkpoint(make_checkpoint())
    shard, info = opened.shards["model.safetensors"], max(opened.tensors.values(), key=lambda info: info.end)
    os.truncate(shard.path, shard.path.stat().st_size - 1)
    with (
        ShardWriter(tmp_path / "copy", shard.header, info.end) as writer,
        pytest.raises(CheckpointError, match="the file ends early"),
    ):
        writer.copy(info.start, shard, info)


def test_writer_closes_its_file_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    with pytest.raises(KeyError), ShardWriter(tmp_path / "a", b"", 8):
        raise KeyError
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        ShardWriter(tmp_path / "b", b"", 8)
    assert open_files() == before


def test_writer_does_not_replace_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("here")
    with pytest.raises(FileExistsError):
        ShardWriter(tmp_path / "a", b"", 8)
