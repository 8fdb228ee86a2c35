"""A disk that is full, through the real entry point: exit code 2, one line, and nothing written."""

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Make = Callable[..., Path]
P2Q = Callable[..., Any]
WORK = ".target.p2q-work"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no permission to mount a small file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("command", ["convert", "quantize"])
def test_disk_that_is_really_full_is_refused(
    refused: Callable[..., str], tiny_disk: Path, tiny_llama: Path, tiny_w8a8: Path, command: str
) -> None:
    source = {"convert": tiny_w8a8, "quantize": tiny_llama}[command]
    assert refused(command, source, tiny_disk / "a" / "target") == (
        f"{tiny_disk / 'a' / 'target'}: the disk is full; the target is as it was. Free some space and run it again"
    )


@pytest.mark.parametrize("exists", [False, True], ids=["no target", "old target"])
@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_disk_that_fills_up_at_any_write_is_refused(
    p2q: P2Q,
    tree: Callable[[Path], dict[str, str]],
    make_checkpoint: Make,
    tmp_path: Path,
    call: str,
    exists: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = make_checkpoint(), tmp_path / "target"
    real, count = getattr(os, call), 0

    def fill(limit: int) -> None:
        nonlocal count
        count = 0

        def write(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count == limit:
                raise OSError(28, "No space left on device")
            return real(*arguments)

        monkeypatch.setattr(os, call, write)

    fill(0)
    assert p2q("convert", source, tmp_path / "finished").code == 0
    calls = count
    assert calls >= (1 if call == "posix_fallocate" else 5)
    if exists:
        p2q("convert", source, target, "--rule", "ceil")
    before = tree(tmp_path)
    for limit in range(1, calls + 1):
        fill(limit)
        found = p2q("convert", source, target, "--overwrite")
        if call == "fsync" and found.code == 0:  # what failed was that of the parent, after the target got its name
            break
        assert found.code == 2
        full = f"{target}: the disk is full; the target is as it was. Free some space and run it again"
        assert found.err == f"error: {full}\n"
        after = tree(tmp_path)
        kept = {name: after.pop(name) for name in list(after) if name.startswith(WORK)}
        assert after == before
        # A shard that had reached the disk stays for the next call, and nothing else does.
        assert not kept or (kept[f"{WORK}/tree/model.safetensors"] and kept[f"{WORK}/records/model.safetensors.json"])
        assert not any(name.endswith((".partial", ".new")) for name in kept)
        if limit % 2:  # every other time the next call starts anew, and goes on otherwise
            shutil.rmtree(tmp_path / WORK, ignore_errors=True)
    fill(0)
    assert p2q("convert", source, target, "--overwrite").code == 0
    assert tree(target) == tree(tmp_path / "finished")
    assert not (tmp_path / WORK).exists()


def test_file_size_limit_is_refused(refused: Callable[..., str], tiny_w8a8: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        told = refused("convert", tiny_w8a8, tmp_path / "target")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert told == f"{tmp_path / 'target'}: cannot be written (File too large); it is as it was"
