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
from safetensors.torch import save_file

from p2q.checkpoint import INDEX_NAME, open_checkpoint
from p2q.errors import CheckpointError, ScaleError, SchemeError
from p2q.scheme import quantized_layers

Json = Any
Where = tuple[str | int, ...]
Mutation = tuple[int, str, Json]
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
    """A copy in which values were dropped, renamed, or replaced by others."""
    document = copy.deepcopy(document)
    for choice, kind, value in mutations:
        found = places(document)
        if not found:
            return value
        *above, last = found[choice % len(found)]
        parent = document
        for key in above:
            parent = parent[key]
        old = parent[last]
        if kind == "drop":
            del parent[last]
        elif kind == "rename" and isinstance(parent, dict):
            parent[str(value)] = parent.pop(last)
        elif kind == "as list" and isinstance(old, dict):
            parent[last] = list(old.values())
        elif kind == "wrap":
            parent[last] = {str(value): old} if choice % 2 else [old]
        elif kind == "copy":
            parent[last] = copy.deepcopy(old if not found else _at(document, found[(choice // 7) % len(found)]))
        else:
            parent[last] = value
    return document


def _at(document: Json, where: Where) -> Json:
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


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a checkpoint of two shards."""
    return {}


@pytest.fixture
def folder(tmp_path: Path, make_checkpoint: Callable[..., Path], w8a8: dict[str, Any]) -> Path:
    names = list(w8a8)
    source = make_checkpoint(w8a8, shards={A: names[::2], B: names[1::2]})
    opens_or_is_refused(source)
    assert len(quantized_layers(open_checkpoint(source))) == 2
    return source
