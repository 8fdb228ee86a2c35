import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2q.errors import CheckpointError
from p2q.manifest import MANIFEST_NAME, Manifest, changed_files, digest_of_files, read_manifest


def manifest(**changes: Any) -> dict[str, Any]:
    record = {"shape": [2, 3], "exponents": {"-7": 2}, "clipped": 1, "relative_error": 0.25}
    return {
        "format": 1,
        "contract": 1,
        "made_by": "p2q 0",
        "rule": "mse",
        "source_digest": "0" * 64,
        "tensors": {"a.weight": record},
        "files": {"b": "1", "a": "2"},
        **changes,
    }


def test_manifest_reads_back_and_its_text_does_not_depend_on_order(tmp_path: Path) -> None:
    one = Manifest.model_validate(manifest())
    other = Manifest.model_validate(manifest(files={"a": "2", "b": "1"}))
    assert one.dump() == other.dump()
    (tmp_path / MANIFEST_NAME).write_text(one.dump(), encoding="utf-8")
    assert read_manifest(tmp_path) == one


def test_manifest_holds_nothing_that_changes_from_run_to_run() -> None:
    about = {"format", "contract", "made_by", "rule", "source_digest", "weights_digest", "statistics_digest"}
    assert set(Manifest.model_fields) == about | {"tensors", "input_scales", "files"}


def test_manifest_absent_is_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Invalid JSON"),
        ("[]", "should be an object"),
        ("{}", "contract Field required"),
        (json.dumps(manifest(extra=1)), "extra Extra inputs are not permitted"),
        (json.dumps(manifest(tensors={"a": {"shape": [1]}})), r"tensors\.a\.exponents Field required"),
        (json.dumps(manifest(format=2)), "another version; expected format 1, got 2"),
        (b"\xff", "Invalid JSON"),
    ],
)
def test_manifest_that_is_none_is_refused(tmp_path: Path, text: str | bytes, reason: str) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=rf"{MANIFEST_NAME}: .*{reason}"):
        read_manifest(tmp_path)


def test_digest_of_files_depends_on_names_and_contents_but_not_on_order() -> None:
    assert digest_of_files({"a": "1", "b": "2"}) == digest_of_files({"b": "2", "a": "1"})
    assert len({digest_of_files(files) for files in ({"a": "1"}, {"a": "2"}, {"b": "1"}, {})}) == 4


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def add(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("added")


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("model.safetensors", flip_last_byte, "changed"),
        ("config.json", flip_last_byte, "changed"),
        ("extra/notes.txt", flip_last_byte, "changed"),
        ("model.safetensors", Path.unlink, "missing"),
        ("generation_config.json", Path.unlink, "missing"),
        ("model-2.safetensors", add, "not in the manifest"),
        ("added_tokens.json", add, "not in the manifest"),
        ("chat_templates/tool.jinja", add, "not in the manifest"),
        ("README.md", add, None),
        (".gitattributes", add, None),
        (".cache/lock", add, None),
        (MANIFEST_NAME, lambda _path: None, None),
    ],
)
def test_changed_files_names_the_file_and_what_is_wrong(
    tiny_p2q: Path, tmp_path: Path, name: str, change: Callable[[Path], None], problem: str | None
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_p2q, copy)
    change(copy / name)
    found = read_manifest(copy)
    assert found is not None
    assert changed_files(copy, found) == ({name: problem} if problem else {})
