"""Damaged checkpoints of every kind: they open, or are refused in one line that says where; nothing else happens."""

import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from p2q.checkpoint import INDEX_NAME, open_checkpoint
from p2q.errors import CheckpointError, ScaleError, SchemeError
from p2q.scheme import quantized_layers

Json = Any
Where = tuple[str | int, ...]
Mutation = tuple[int | Where, str, Json]
UP = "model.layers.0.mlp.up_proj"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
bounded = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

_NUMBERS = st.one_of(st.integers(), st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 10**40]), st.floats())
_TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["I8", "F32", "BF16", "F4", "int", "float", "channel", "token", "tensor", "group", "compressed-tensors", "W8A8"]
    ),
    st.sampled_from(["re:.*", "re:(", "re:a{99999999999}", "re:" + "(" * 3000 + ")" * 3000, "Linear", UP, "lm_head"]),
    st.sampled_from(["", ".", "..", "../x", "/etc/passwd", "x" * 300, "a\0b", "\ud800", "a\nb", A, B, "config.json"]),
)
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXTS, inner, max_size=3)),
    max_leaves=5,
)
_MUTATIONS = st.lists(
    st.tuples(
        st.integers(0, 10**6), st.sampled_from(["replace", "drop", "rename", "as list", "wrap", "copy"]), _VALUES
    ),
    min_size=1,
    max_size=3,
)


def places(value: Json, where: Where = ()) -> list[Where]:
    """Where every value below this one lies."""
    inside = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    return [*([where] if where else []), *(place for key, item in inside for place in places(item, (*where, key)))]


def mutated(document: Json, mutations: list[Mutation]) -> Json:
    """A copy in which values were dropped, renamed, or replaced by others: at a place, or at the n-th of all."""
    document = copy.deepcopy(document)
    for choice, kind, value in mutations:
        found = places(document)
        if not found:
            return value
        where = found[choice % len(found)] if isinstance(choice, int) else choice
        if where not in found:
            continue
        *above, last = where
        parent = at_place(document, tuple(above))
        old = parent[last]
        if kind == "drop":
            del parent[last]
        elif kind == "rename" and isinstance(parent, dict):
            parent[str(value)] = parent.pop(last)
        elif kind == "as list" and isinstance(old, dict):
            parent[last] = list(old.values())
        elif kind == "wrap":
            parent[last] = {old: value} if isinstance(old, str) else [old]
        elif kind == "copy" and isinstance(choice, int):
            parent[last] = copy.deepcopy(at_place(document, found[(choice // 7) % len(found)]))
        else:
            parent[last] = value
    return document


def at_place(document: Json, where: Where) -> Json:
    for key in where:
        document = document[key]
    return document


def opens_or_is_refused(folder: Path) -> None:
    try:
        layers = quantized_layers(open_checkpoint(folder))
    except (CheckpointError, SchemeError, ScaleError) as error:
        told = str(error)
        assert len(told.splitlines()) == 1
        assert told.startswith(str(folder))
    else:
        assert layers


@pytest.fixture
def folder(make_checkpoint: Callable[..., Path], w8a8: dict[str, Any]) -> Path:
    """A sound checkpoint of two shards and an index."""
    names = list(w8a8)
    source = make_checkpoint(w8a8, shards={A: names[::2], B: names[1::2]})
    assert len(quantized_layers(open_checkpoint(source))) == 2
    return source


def split(shard: bytes) -> tuple[Json, bytes]:
    """A shard's header and its data."""
    length = struct.unpack("<Q", shard[:8])[0]
    return json.loads(shard[8 : 8 + length]), shard[8 + length :]


def joined(header: bytes, data: bytes) -> bytes:
    """A shard of them, with the right length prefix."""
    return struct.pack("<Q", len(header)) + header + data


@bounded
@given(content=st.binary(max_size=300), prefix=st.booleans())
def test_shard_of_random_bytes_opens_or_is_refused(folder: Path, content: bytes, prefix: bool) -> None:
    (folder / A).write_bytes(joined(content, b"") if prefix else content)
    opens_or_is_refused(folder)


@bounded
@given(
    edits=st.lists(
        st.tuples(st.floats(0, 1), st.sampled_from(["set", "insert", "delete"]), st.binary(min_size=1, max_size=9)),
        min_size=1,
        max_size=4,
    ),
    prefix=st.booleans(),
)
def test_shard_with_edited_bytes_opens_or_is_refused(
    folder: Path, edits: list[tuple[float, str, bytes]], prefix: bool
) -> None:
    whole = (folder / B).read_bytes()
    header, data = split(whole)
    edited = bytearray(json.dumps(header).encode() if prefix else whole)
    for at, kind, content in edits:
        start = int(at * len(edited))
        edited[start : start + (0 if kind == "insert" else len(content))] = b"" if kind == "delete" else content
    (folder / B).write_bytes(joined(bytes(edited), data) if prefix else bytes(edited))
    try:
        opens_or_is_refused(folder)
    finally:
        (folder / B).write_bytes(whole)


@bounded
@given(mutations=_MUTATIONS)
@example(mutations=[((f"{UP}.weight",), "as list", None)])
@example(mutations=[((f"{UP}.weight", "dtype"), "wrap", None)])
@example(mutations=[(("__metadata__",), "replace", None)])
def test_shard_with_another_header_opens_or_is_refused(folder: Path, mutations: list[Mutation]) -> None:
    whole = (folder / B).read_bytes()
    header, data = split(whole)
    (folder / B).write_bytes(joined(json.dumps(mutated(header, mutations)).encode(), data))
    try:
        opens_or_is_refused(folder)
    finally:
        (folder / B).write_bytes(whole)


@bounded
@pytest.mark.parametrize("name", ["config.json", INDEX_NAME])
@given(mutations=_MUTATIONS)
@example(mutations=[(("weight_map", f"{UP}.weight"), "replace", "x" * 300)])
@example(mutations=[(("quantization_config", "ignore", 0), "replace", "re:a{99999999999}")])
@example(mutations=[(("quantization_config", "ignore", 0), "replace", "re:" + "(" * 5000)])
def test_json_with_other_values_opens_or_is_refused(folder: Path, name: str, mutations: list[Mutation]) -> None:
    whole = (folder / name).read_text()
    (folder / name).write_text(json.dumps(mutated(json.loads(whole), mutations)))
    try:
        opens_or_is_refused(folder)
    finally:
        (folder / name).write_text(whole)


@bounded
@given(edits=st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=4)), min_size=1, max_size=3))
@pytest.mark.parametrize("name", ["config.json", INDEX_NAME])
def test_json_with_edited_bytes_opens_or_is_refused(folder: Path, name: str, edits: list[tuple[float, bytes]]) -> None:
    whole = (folder / name).read_bytes()
    edited = bytearray(whole)
    for at, content in edits:
        start = int(at * len(edited))
        edited[start : start + 1] = content
    (folder / name).write_bytes(edited)
    try:
        opens_or_is_refused(folder)
    finally:
        (folder / name).write_bytes(whole)
