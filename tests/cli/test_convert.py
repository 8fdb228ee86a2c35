import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from p2q.manifest import MANIFEST_NAME, read_manifest

Make = Callable[..., Path]
Tree = Callable[[Path], dict[str, str]]
P2Q = Callable[..., Any]
COMMAND = Path(sys.executable).with_name("p2q")


def test_convert_says_what_it_did(p2q: P2Q, tiny_w8a8: Path, tmp_path: Path) -> None:
    target = tmp_path / "target [bold] ünï"
    found = p2q("convert", tiny_w8a8, target)
    manifest = read_manifest(target)
    assert manifest is not None
    assert (found.code, found.err) == (0, "")
    first, second, third = found.out.splitlines()
    clipped = sum(record.clipped for record in manifest.tensors.values())
    values = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    assert first == f"converted: 14 layers, rule mse, {clipped:,} of {values:,} values clipped"
    worst = max(manifest.tensors, key=lambda name: manifest.tensors[name].relative_error)
    assert second == f"largest relative weight error: {manifest.tensors[worst].relative_error:.4f} in {worst}"
    assert third == f"{target}  SHA-256 {manifest.checkpoint_digest}"


@pytest.mark.parametrize("rule", ["mse", "nearest", "ceil"])
def test_convert_json_is_one_object(p2q: P2Q, tiny_w8a8: Path, tmp_path: Path, rule: str) -> None:
    (tmp_path / "source").mkdir()
    for path in tiny_w8a8.iterdir():
        (tmp_path / "source" / path.name).symlink_to(path)
    (tmp_path / "source" / "pytorch_model.bin").write_text("stray")
    found = p2q("convert", tmp_path / "source", tmp_path / "target", "--rule", rule, "--json")
    manifest = read_manifest(tmp_path / "target")
    assert manifest is not None
    assert (found.code, found.err) == (0, "")
    assert json.loads(found.out) == {
        "target": str(tmp_path / "target"),
        "rule": rule,
        "changed": True,
        "shards": 1,
        "kept": 0,
        "layers": 14,
        "values": 61_440,
        "clipped": sum(record.clipped for record in manifest.tensors.values()),
        "checkpoint_digest": manifest.checkpoint_digest,
        "skipped": ["pytorch_model.bin"],
    }


def test_convert_files_left_out_are_said_on_standard_error(p2q: P2Q, make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    (source / ".hidden").write_text("x")
    (source / "consolidated.safetensors").write_text("x")
    found = p2q("convert", source, tmp_path / "target")
    assert found.code == 0
    reason = "hidden files, and weight files that the checkpoint does not name"
    assert found.err == f"left out: .hidden, consolidated.safetensors ({reason})\n"
    assert "left out" not in found.out


def test_convert_dry_run_says_so_and_writes_nothing(p2q: P2Q, make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    found = p2q("convert", source, tmp_path / "target", "--dry-run")
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith("would convert: 2 layers, rule mse, ")
    machine = p2q("convert", source, tmp_path / "target", "--dry-run", "--json").json()
    assert (machine["target"], machine["checkpoint_digest"]) == (None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_convert_twice_is_refused_and_with_overwrite_copied(
    p2q: P2Q, tiny_p2q: Path, tmp_path: Path, tree: Tree
) -> None:
    refused = p2q("convert", tiny_p2q, tmp_path / "target")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == (
        f"error: {tiny_p2q}: every scale is already a power of two; there is nothing to convert. "
        "Give --overwrite to copy it unchanged\n"
    )
    copied = p2q("convert", tiny_p2q, tmp_path / "target", "--overwrite")
    assert copied.code == 0
    assert copied.out.startswith("copied (every scale was a power of two already): 14 layers")
    assert tree(tmp_path / "target") == tree(tiny_p2q)


def test_convert_progress_goes_to_standard_error_only(
    p2q: P2Q, make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2q.cli.console.errors", Console(stderr=True, force_terminal=True))
    found = p2q("convert", make_checkpoint(), tmp_path / "target")
    assert "converting" in found.err
    assert "936/936 bytes" in found.err
    assert "/s" in found.err
    assert [line.split(":")[0] for line in found.out.splitlines()][:2] == ["converted", "largest relative weight error"]
    assert "\x1b" not in found.out
    machine = p2q("convert", tmp_path / "source", tmp_path / "other", "--json")
    assert machine.err == ""
    assert machine.json()["layers"] == 2


def test_convert_as_it_is_typed(tiny_w8a8: Path, tiny_p2q: Path, tmp_path: Path, tree: Tree) -> None:
    shutil.copytree(tiny_w8a8, tmp_path / "ein Modell ünï")
    environment = {**os.environ, "LC_ALL": "C", "OMP_NUM_THREADS": "2"}
    command = [COMMAND, "convert", "ein Modell ünï", "ziel\udcff", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["layers"] == 14
    assert tree(tmp_path / "ziel\udcff") == tree(tiny_p2q)
    failed = subprocess.run([COMMAND, "convert", "weg\udcff", "x"], cwd=tmp_path, env=environment, capture_output=True)
    assert (failed.returncode, failed.stdout) == (2, b"")
    line = b"error: weg\\udcff: not a checkpoint directory; expected a directory, got nothing there\n"
    assert failed.stderr == line


def test_convert_output_of_a_path_that_is_no_text_is_escaped(p2q: P2Q, make_checkpoint: Make, tmp_path: Path) -> None:
    found = p2q("convert", make_checkpoint(), tmp_path / "ziel\udcff")
    assert found.code == 0
    assert "ziel\\udcff  SHA-256" in found.out


def test_convert_tensor_names_that_look_like_markup_are_printed_as_they_are(
    p2q: P2Q, make_checkpoint: Make, w8a8: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    tensors = {name.replace("model.layers.0", "[red]:smile:[/bold]"): tensor for name, tensor in w8a8.items()}
    found = p2q("convert", make_checkpoint(tensors), tmp_path / "target")
    assert found.code == 0
    assert "in [red]:smile:[/bold].mlp." in found.out
    assert p2q("inspect", tmp_path / "target", "--layers").code == 0


def test_convert_manifest_in_the_target_is_named_in_the_design(tiny_p2q: Path) -> None:
    assert (tiny_p2q / "p2q_manifest.json").is_file()
    assert MANIFEST_NAME == "p2q_manifest.json"
