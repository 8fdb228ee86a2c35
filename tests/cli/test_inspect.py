import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2q.manifest import MANIFEST_NAME

Make = Callable[..., Path]
P2Q = Callable[..., Any]


@pytest.fixture
def copy(tiny_p2q: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_p2q, tmp_path / "copy")
    return tmp_path / "copy"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_inspect_converted_checkpoint_passes(p2q: P2Q, tiny_p2q: Path) -> None:
    found = p2q("inspect", tiny_p2q)
    assert (found.code, found.err) == (0, "")
    assert "contract holds for all 14 layers" in unwrapped(found.out)
    assert "5 files, every SHA-256 verified" in unwrapped(found.out)
    assert "scale exponents k (scale = 2^k)" in found.out


def test_inspect_long_path_is_shown_whole(p2q: P2Q, tiny_p2q: Path, tmp_path: Path) -> None:
    path = tmp_path / ("long-" * 30)
    shutil.copytree(tiny_p2q, path)
    assert str(path) in p2q("inspect", path).out.replace("\n", "").replace(" ", "")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "extra/notes.txt", "chat_template.jinja"])
def test_inspect_one_flipped_byte_fails_and_names_the_file(p2q: P2Q, copy: Path, name: str) -> None:
    flip(copy / name, -2)  # in a JSON file the last brace is at -1 or -2: a blank or a letter is another document
    found = p2q("inspect", copy)
    if name == "config.json":
        assert found.code == 2
        assert f"{copy / name}: not readable JSON" in found.err
        return
    assert (found.code, found.err) == (1, "")
    assert f"differ from the manifest: {name} (changed)" in unwrapped(found.out)
    machine = p2q("inspect", copy, "--json")
    assert machine.code == 1
    assert machine.json()["changed"] == {name: "changed"}


def test_inspect_every_byte_counts(p2q: P2Q, copy: Path) -> None:
    for position in (9, 1000, 5000, 20_000, 60_000):
        shutil.copyfile(copy / "model.safetensors", copy.parent / "whole")
        flip(copy / "model.safetensors", position)
        assert p2q("inspect", copy).code in (1, 2)  # 2 where the header is no header any more
        shutil.copyfile(copy.parent / "whole", copy / "model.safetensors")
    assert p2q("inspect", copy).code == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [(Path.unlink, "missing"), (lambda path: path.with_name("added.json").write_text("{}"), "not in the manifest")],
    ids=["missing", "added"],
)
def test_inspect_missing_or_added_file_fails(
    p2q: P2Q, copy: Path, change: Callable[[Path], object], problem: str
) -> None:
    change(copy / "generation_config.json")
    found = p2q("inspect", copy)
    assert found.code == 1
    assert f"({problem})" in unwrapped(found.out)


def test_inspect_manifest_over_scales_that_break_the_contract_fails(p2q: P2Q, copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale"][5] = 0.3
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    found = p2q("inspect", copy)
    assert found.code == 1
    text = "does not hold for 1 of 14 layers; first model.layers.0.mlp.up_proj: 1 of 96 scales are not powers of two"
    assert text in unwrapped(found.out)


def test_inspect_checkpoint_that_was_not_converted_is_shown_and_passes(p2q: P2Q, tiny_w8a8: Path) -> None:
    found = p2q("inspect", tiny_w8a8)
    assert (found.code, found.err) == (0, "")
    assert "does not hold for 14 of 14 layers" in unwrapped(found.out)
    assert "manifest none" in unwrapped(found.out)
    assert "scale exponents, floor(log2 scale)" in found.out


def test_inspect_layers_are_listed(p2q: P2Q, tiny_p2q: Path) -> None:
    short, long = p2q("inspect", tiny_p2q).out, p2q("inspect", tiny_p2q, "--layers").out
    assert "96 x 64" in long
    assert long.startswith(short)


def test_inspect_json_is_one_object(p2q: P2Q, tiny_p2q: Path) -> None:
    found = p2q("inspect", tiny_p2q, "--json")
    assert (found.code, found.err) == (0, "")
    summary = found.json()
    assert summary["contract_holds"] is True
    assert summary["changed"] == {}
    assert summary["manifest"] == json.loads((tiny_p2q / MANIFEST_NAME).read_text())
    assert len(summary["layers"]) == 14


def test_inspect_manifest_that_is_none_is_bad_input(p2q: P2Q, copy: Path) -> None:
    (copy / MANIFEST_NAME).write_text('{"format": 1}')
    found = p2q("inspect", copy)
    assert (found.code, found.out) == (2, "")
    assert found.err == f"error: {copy / MANIFEST_NAME}: not a p2q manifest: contract Field required\n"


def test_inspect_path_that_is_no_checkpoint_is_bad_input(p2q: P2Q, tmp_path: Path) -> None:
    found = p2q("inspect", tmp_path / "nothing", "--json")
    assert (found.code, found.out) == (2, "")
    assert found.err == (
        f"error: {tmp_path / 'nothing'}: not a checkpoint directory; expected a directory, got nothing there\n"
    )


def test_inspect_scale_that_is_nan_is_shown(p2q: P2Q, make_checkpoint: Make, w8a8: dict[str, torch.Tensor]) -> None:
    w8a8["model.layers.0.mlp.up_proj.weight_scale"][3] = torch.nan
    found = p2q("inspect", make_checkpoint(w8a8), "--json")
    assert found.code == 0
    assert "got nan at row 3" in found.json()["layers"][1]["problem"]
