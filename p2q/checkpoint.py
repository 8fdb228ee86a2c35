"""Reading checkpoint directories lazily, and writing safetensors files at known offsets.

A checkpoint is a directory with `config.json` and safetensors files: `model.safetensors`, or shards named by
`model.safetensors.index.json`. Symbolic links (as model caches have them) are followed.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from p2q.errors import CheckpointError
from p2q.manifest import MANIFEST_NAME, digest_of_files, sha256_of

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".npz"}
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt"}
_BLOCK_BYTES = 1 << 22
_BEHIND_BYTES = 1 << 26
_SYNC_FILE_RANGE_WRITE = 2
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: its shard, safetensors dtype name, shape, and byte range in the shard's data part."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass
class Shard:
    """A safetensors file: its header's bytes, as they stand in the file (length prefix included), and its metadata."""

    path: Path
    header: bytes
    metadata: dict[str, str]


@dataclass
class Checkpoint:
    """A checkpoint directory opened for reading.

    `others`: files to carry over. `skipped`: files left out, which are hidden ones and weights that no index names.
    """

    path: Path
    config: dict[str, Any]
    shards: dict[str, Shard]
    tensors: dict[str, TensorInfo]
    others: list[str]
    skipped: list[str]

    def read(self, name: str) -> torch.Tensor:
        """A tensor by name. Read, not mapped: pages of a mapped file would count as this process's memory.

        Raises:
            CheckpointError: it cannot be read, or its dtype is none that weights and scales have.
        """
        info = self.tensors[name]
        if info.dtype not in _DTYPES:
            raise CheckpointError(
                "unknown dtype", file=self.file_of(name), tensor=name, expected=" or ".join(_DTYPES), got=info.dtype
            )
        with ShardReader(self.shards[info.shard]) as reader:
            data = reader.read(info.start, info.end - info.start)
        if not data.numel():  # which cannot be viewed as wider elements
            return self.empty(name)
        return data.view(_DTYPES[info.dtype]).reshape(info.shape)

    def empty(self, name: str) -> torch.Tensor:
        """A tensor of the dtype and shape of one of the checkpoint's, which is not read."""
        info = self.tensors[name]
        return torch.empty(info.shape, dtype=_DTYPES[info.dtype])

    def file_of(self, tensor: str) -> Path:
        """The shard that holds a tensor."""
        return self.shards[self.tensors[tensor].shard].path

    def files(self) -> list[str]:
        """Every file that belongs to the checkpoint, sorted."""
        return sorted([*self.shards, *self.others])


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint directory and check that every tensor the index names is where it says.

    Raises:
        CheckpointError: not a directory, no or unreadable config.json, no safetensors weights, a missing or truncated
            shard, an index that disagrees with the shards.
    """
    if not path.is_dir():
        got = "a file" if os.path.lexists(path) else "nothing there"
        raise CheckpointError("not a checkpoint directory", file=path, expected="a directory", got=got)
    config_path = path / "config.json"
    if not config_path.is_file():
        raise CheckpointError("not a checkpoint: there is no config.json", file=path)
    config = read_json(config_path)
    names, weight_map = _shard_names(path)
    shards: dict[str, Shard] = {}
    tensors: dict[str, TensorInfo] = {}
    for name in names:
        shards[name], found = _read_header(path / name, name)
        for tensor, info in found.items():
            if tensor in tensors:
                raise CheckpointError(f"the tensor is also in {tensors[tensor].shard}", file=path / name, tensor=tensor)
            tensors[tensor] = info
    _check_weight_map(path, weight_map, tensors)
    others, skipped = _other_files(path, set(names))
    return Checkpoint(path, config, shards, tensors, others, skipped)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"not readable JSON ({error})", file=path) from error
    if not isinstance(value, dict):
        raise CheckpointError("wrong JSON", file=path, expected="an object", got=type(value).__name__)
    return value


def _shard_names(path: Path) -> tuple[list[str], dict[str, str] | None]:
    index_path = path / INDEX_NAME
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(v, str) for v in weight_map.values())
        ):
            raise CheckpointError("the index has no weight map", file=index_path, expected="{tensor: shard}")
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise CheckpointError(
                    "the index names a file that is no shard of this folder",
                    file=index_path,
                    expected="names that end in .safetensors, without a path",
                    got=name,
                )
            if not _is_file(path / name):
                tensors = sorted(tensor for tensor, shard in weight_map.items() if shard == name)
                raise CheckpointError(
                    "a shard that the index names is missing",
                    file=path / name,
                    tensor=", ".join(tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""),
                    expected=f"a file in {path}",
                    got="none",
                )
        return names, weight_map
    found = sorted(p.name for p in path.glob("*.safetensors") if not p.name.startswith("."))
    if SINGLE_NAME in found:
        return [SINGLE_NAME], None
    if len(found) == 1:
        return found, None
    if found:
        raise CheckpointError(
            f"{len(found)} safetensors files and nothing to say how they belong together",
            file=path,
            expected=INDEX_NAME,
        )
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in _PICKLE_SUFFIXES)
    raise CheckpointError(
        "there are no safetensors weights",
        file=path,
        got=f"{pickles[0]}, which is a pickle and unsafe: reading it may run any code" if pickles else None,
        hint="Save the model with safetensors first",
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _read_header(path: Path, name: str) -> tuple[Shard, dict[str, TensorInfo]]:
    try:
        # The library checks that the header is sound and that its offsets cover the file.
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as f:
            prefix = f.read(8)
            text = f.read(int.from_bytes(prefix, "little"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"not a complete safetensors file ({error})", file=path) from error
    entries = json.loads(text, object_pairs_hook=lambda pairs: _without_duplicates(pairs, path))
    metadata = entries.pop("__metadata__", None) or {}
    tensors = {}
    for tensor, entry in entries.items():
        # The library also takes the fields as an array, and a dtype as an object.
        if not isinstance(entry, dict) or not isinstance(entry["dtype"], str):
            raise CheckpointError(
                "bad header",
                file=path,
                tensor=tensor,
                expected="an object with dtype, shape and data_offsets",
                got=str(entry)[:80],
            )
        tensors[tensor] = TensorInfo(name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
    return Shard(path, prefix + text, metadata), tensors


def _without_duplicates(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError("bad header: the name is there twice", file=path, tensor=twice)
    return found


def _check_weight_map(path: Path, weight_map: dict[str, str] | None, tensors: dict[str, TensorInfo]) -> None:
    if weight_map is None:
        return
    for tensor, shard in sorted(weight_map.items()):
        got = tensors[tensor].shard if tensor in tensors else "no shard that has it"
        if got != shard:
            raise CheckpointError(
                "the index and the shards disagree",
                file=path / INDEX_NAME,
                tensor=tensor,
                expected=f"it in {shard}",
                got=got,
            )
    for tensor, info in sorted(tensors.items()):
        if tensor not in weight_map:
            raise CheckpointError(
                "the index does not name the tensor", file=path / INDEX_NAME, tensor=tensor, got=f"it in {info.shard}"
            )


def check_tied(checkpoint: Checkpoint) -> None:
    """Refuse an output head that is said to be tied and is stored with other values than the embeddings.

    Engines disagree about which of the two they use.

    Raises:
        CheckpointError: naming both.
    """
    heads = [name for name in checkpoint.tensors if name.endswith("lm_head.weight")]
    embeddings = [name for name in checkpoint.tensors if name.endswith("embed_tokens.weight")]
    if not checkpoint.config.get("tie_word_embeddings") or len(heads) != 1 or len(embeddings) != 1:
        return
    if digest_of_tensors(checkpoint, heads) != digest_of_tensors(checkpoint, embeddings):
        raise CheckpointError(
            "config.json ties the output head to the embeddings, but both are stored and differ",
            file=checkpoint.file_of(heads[0]),
            tensor=heads[0],
            expected=f"the bytes of {embeddings[0]}",
            got="others",
            hint="Remove the head or set tie_word_embeddings to false",
        )


def _other_files(path: Path, shards: set[str]) -> tuple[list[str], list[str]]:
    """Relative names of the files to carry over, and of those left out: hidden ones and weights that no index names."""
    others, skipped = [], []
    for file in _walk(path, frozenset()):
        name = file.relative_to(path).as_posix()
        if name in shards or name == MANIFEST_NAME:
            continue
        if file.name.startswith("."):
            skipped.append(f"{name}/" if file.is_dir() else name)
        elif file.suffix.lower() in _WEIGHT_SUFFIXES or (name.endswith(".index.json") and name != INDEX_NAME):
            skipped.append(name)
        elif not file.is_file():
            raise CheckpointError(
                "not a file that can be copied", file=file, expected="a regular file", got=_kind(file)
            )
        else:
            others.append(_checked(name, file))
    return sorted(others), sorted(skipped)


def _walk(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    """The files below a folder, links followed; a hidden folder is given as such."""
    real = folder.resolve()
    if real in above:
        raise CheckpointError("the link leads back to a folder that holds it", file=folder)
    for path in folder.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            yield from _walk(path, above | {real})
        else:
            yield path


def _checked(name: str, file: Path) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError("the file's name cannot stand in a manifest", file=file, expected="UTF-8") from error
    return name


def _kind(path: Path) -> str:
    return "a broken link" if path.is_symlink() and not path.exists() else "a pipe, socket or device"


class ShardReader:
    """A safetensors file, read at any offset of its data part. A context manager; `size` is that part's bytes."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._file = os.open(shard.path, os.O_RDONLY)
        self.size = os.fstat(self._file).st_size - len(shard.header)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def read(self, offset: int, size: int) -> torch.Tensor:
        """Bytes at an offset of the data part: (size,) int8. Raises CheckpointError where the file ends before."""
        data = np.empty(size, np.int8)
        position = 0
        while position < size:
            got = os.preadv(self._file, [data[position:].data], len(self.shard.header) + offset + position)
            if not got:
                raise CheckpointError("the file ends early", file=self.shard.path)
            position += got
        return torch.from_numpy(data)

    def blocks(self, start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The bytes from start to end in blocks with their offsets."""
        for offset in range(start, end, _BLOCK_BYTES):
            yield offset, self.read(offset, min(_BLOCK_BYTES, end - offset))


class ShardWriter:
    """A safetensors file of known header, written at any offset in any order. A context manager."""

    def __init__(self, path: Path, header: bytes, data_bytes: int) -> None:
        self._data, self._behind = len(header), 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            # Reserves the blocks, so that a full disk shows at once and not after an hour.
            os.posix_fallocate(self._file, 0, self._data + data_bytes)
            _write_all(self._file, header, 0)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes at an offset of the data part."""
        _write_all(self._file, data, self._data + offset)
        self._behind += len(data)
        if self._behind >= _BEHIND_BYTES:
            _start_writeback(self._file)
            self._behind = 0

    def copy(self, offset: int, shard: Shard, info: TensorInfo) -> None:
        """Copy a tensor's bytes from its shard to an offset of the data part."""
        with ShardReader(shard) as reader:
            for start, block in reader.blocks(info.start, info.end):
                self.write(offset + start - info.start, bytes_of(block))


def _start_writeback(file: int) -> None:
    """Begin to bring what was written to the disk, instead of all of it in the fsync at the end. Only a hint."""
    ctypes.CDLL(None).sync_file_range(file, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


def _write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


class Layout(NamedTuple):
    """A safetensors file to be: header with its length prefix, offsets in the data part, size of that part in bytes."""

    header: bytes
    offsets: dict[str, int]
    size: int


def lay_out(entries: dict[str, tuple[str, tuple[int, ...], int]], metadata: dict[str, str]) -> Layout:
    """Lay out tensors as the library does: wide elements first, so that each lies aligned, then by name.

    Args:
        entries: {tensor: (safetensors dtype name, shape, size in bytes)}.
        metadata: the `__metadata__` strings.
    """

    def order(name: str) -> tuple[int, str]:
        _, shape, size = entries[name]
        return -(size // max(1, math.prod(shape))), name

    header: dict[str, Any] = {"__metadata__": metadata}
    offsets, position = {}, 0
    for name in sorted(entries, key=order):
        dtype, shape, size = entries[name]
        offsets[name] = position
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return Layout(len(text).to_bytes(8, "little") + text, offsets, position)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, little-endian, row by row."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def digest_of_tensors(checkpoint: Checkpoint, names: Iterable[str]) -> str:
    """SHA-256 of the bytes of tensors, one after the other."""
    digest = hashlib.sha256()
    for name in names:
        info = checkpoint.tensors[name]
        with ShardReader(checkpoint.shards[info.shard]) as reader:
            for _, block in reader.blocks(info.start, info.end):
                digest.update(bytes_of(block))
    return digest.hexdigest()


def header_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 of what a checkpoint says of itself: the headers of its shards, and config.json."""
    headers = {name: hashlib.sha256(shard.header).hexdigest() for name, shard in checkpoint.shards.items()}
    return digest_of_files({**headers, "config.json": sha256_of(checkpoint.path / "config.json")})


def copy_others(checkpoint: Checkpoint, target: Path) -> None:
    """Copy the files that are not weights (tokenizer, templates, configuration, code), links followed."""
    for name in checkpoint.others:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.path / name, target / name)
