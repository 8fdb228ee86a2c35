"""Reading checkpoint directories lazily, and writing safetensors files at known offsets.

A checkpoint is a directory with `config.json` and safetensors files: `model.safetensors`, or shards named by
`model.safetensors.index.json`. Symbolic links (as model caches have them) are followed.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from p2q.errors import CheckpointError
from p2q.manifest import MANIFEST_NAME

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".npz"}
_COPY_BYTES = 1 << 22

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
    """A safetensors file: its header's bytes, as they stand in the file (length prefix included)."""

    path: Path
    header: bytes


@dataclass
class Checkpoint:
    """A checkpoint directory opened for reading. `others`: files to carry over; `skipped`: weight files left out."""

    path: Path
    config: dict[str, Any]
    shards: dict[str, Shard]
    tensors: dict[str, TensorInfo]
    others: list[str]
    skipped: list[str]
    _handles: dict[str, Any] = field(default_factory=dict, repr=False)

    def read(self, name: str) -> torch.Tensor:
        """A tensor by name, mapped from its file."""
        info = self.tensors[name]
        if info.shard not in self._handles:
            self._handles[info.shard] = safe_open(self.shards[info.shard].path, framework="pt")
        tensor: torch.Tensor = self._handles[info.shard].get_tensor(name)
        return tensor

    def files(self) -> list[str]:
        """Every file that belongs to the checkpoint, sorted."""
        return sorted([*self.shards, *self.others])


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint directory and check that every tensor the index names is where it says.

    Raises:
        CheckpointError: not a directory, no or unreadable config.json, no safetensors weights, a missing or truncated
            shard, an index that disagrees with the shards.
    """
    if not path.exists():
        raise CheckpointError("no such file or directory", file=path)
    if not path.is_dir():
        raise CheckpointError("not a checkpoint directory", file=path, expected="a directory", got="a file")
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
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"not readable JSON ({error})", file=path) from error
    if not isinstance(value, dict):
        raise CheckpointError("wrong JSON", file=path, expected="an object", got=type(value).__name__)
    return value


def _shard_names(path: Path) -> tuple[list[str], dict[str, str] | None]:
    index_path = path / INDEX_NAME
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError("the index has no weight map", file=index_path)
        return sorted(set(weight_map.values())), weight_map
    found = sorted(p.name for p in path.glob("*.safetensors"))
    if SINGLE_NAME in found:
        return [SINGLE_NAME], None
    if len(found) == 1:
        return found, None
    if found:
        raise CheckpointError(f"{len(found)} safetensors files and no {INDEX_NAME} to say how they belong together", file=path)
    raise CheckpointError("there are no safetensors weights", file=path, hint="Save the model with safetensors first")


def _read_header(path: Path, name: str) -> tuple[Shard, dict[str, TensorInfo]]:
    if os.sep in name or not path.is_file():
        raise CheckpointError("the index names a shard that is not there", file=path)
    try:
        # The library checks that the header is sound and that its offsets cover the file.
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as f:
            prefix = f.read(8)
            text = f.read(int.from_bytes(prefix, "little"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"not a complete safetensors file ({error})", file=path) from error
    entries = json.loads(text)
    entries.pop("__metadata__", None)
    return Shard(path, prefix + text), {
        tensor: TensorInfo(name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"]) for tensor, entry in entries.items()
    }


def _check_weight_map(path: Path, weight_map: dict[str, str] | None, tensors: dict[str, TensorInfo]) -> None:
    if weight_map is None:
        return
    for tensor, shard in sorted(weight_map.items()):
        got = tensors[tensor].shard if tensor in tensors else "no shard"
        if got != shard:
            raise CheckpointError("the index and the shards disagree", file=path / shard, tensor=tensor, expected=shard, got=got)
    for tensor, info in sorted(tensors.items()):
        if tensor not in weight_map:
            raise CheckpointError("the tensor is not in the index", file=path / info.shard, tensor=tensor)


def _other_files(path: Path, shards: set[str]) -> tuple[list[str], list[str]]:
    """Files to carry over (relative names, hidden ones left out) and weight files that no index names."""
    others, skipped = [], []
    for folder, folders, files in os.walk(path, followlinks=True):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in files:
            relative = (Path(folder) / name).relative_to(path).as_posix()
            if name.startswith(".") or relative in shards or relative == MANIFEST_NAME:
                continue
            (skipped if Path(name).suffix in _WEIGHT_SUFFIXES or name.endswith(".index.json") and name != INDEX_NAME else others).append(relative)
    return sorted(others), sorted(skipped)


class ShardWriter:
    """A safetensors file of known header, written at any offset in any order."""

    def __init__(self, path: Path, header: bytes, data_bytes: int) -> None:
        self._data = len(header)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        # Reserves the blocks, so that a full disk shows at once and not after an hour.
        if data_bytes:
            os.posix_fallocate(self._file, 0, self._data + data_bytes)
        _write_all(self._file, header, 0)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes at an offset of the data part."""
        _write_all(self._file, data, self._data + offset)

    def copy(self, source: Path, source_data: int, start: int, end: int) -> None:
        """Copy the bytes [start, end) of another shard's data part, which begins at `source_data` in its file."""
        with source.open("rb") as f:
            f.seek(source_data + start)
            while start < end:
                block = f.read(min(_COPY_BYTES, end - start))
                if not block:
                    raise CheckpointError("the file ends early", file=source)
                self.write(start, block)
                start += len(block)

    def close(self) -> None:
        """Flush to the disk and close."""
        os.fsync(self._file)
        os.close(self._file)


def _write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def make_header(entries: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]) -> tuple[bytes, dict[str, int], int]:
    """A safetensors header for tensors laid out in the given order.

    Args:
        entries: {tensor: (safetensors dtype name, shape)}.
        metadata: the `__metadata__` strings.

    Returns:
        the header's bytes with its length prefix, {tensor: offset in the data part}, and the data part's size in bytes.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    offsets, position = {}, 0
    for name, (dtype, shape) in entries.items():
        size = DTYPES[dtype].itemsize
        for n in shape:
            size *= n
        offsets[name] = position
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets, position


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, little-endian, row by row."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def copy_others(checkpoint: Checkpoint, target: Path) -> None:
    """Copy the files that are not weights (tokenizer, templates, configuration, code), links followed."""
    for name in checkpoint.others:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.path / name, target / name)
