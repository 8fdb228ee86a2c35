import ctypes
import errno
import fcntl
import os
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2q import target as module
from p2q.errors import CheckpointError, TargetError
from p2q.signals import STOP
from p2q.target import check_target, new_directory

Tree = Callable[[Path], dict[str, str]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A target that looks like a checkpoint."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text("old")
    (folder / "model.safetensors").write_text("old")
    (folder / "stale.txt").write_text("old")
    return folder


def write(target: Path, source: Path, *, overwrite: bool = False, then: Callable[[], object] = lambda: None) -> None:
    with new_directory(target, source=source, overwrite=overwrite) as work:
        (work / "sub").mkdir()
        (work / "sub" / "a.txt").write_text("new")
        then()


def raising(error: BaseException) -> Callable[[], object]:
    def call() -> None:
        raise error

    return call


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# What is made


def test_target_absent_is_made_with_its_parents(tmp_path: Path, source: Path, tree: Tree) -> None:
    write(tmp_path / "a" / "b" / "target", source)
    assert set(tree(tmp_path / "a")) == {"b", "b/target", "b/target/sub", "b/target/sub/a.txt"}


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_target_has_the_mode_of_an_ordinary_folder(tmp_path: Path, source: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write(tmp_path / "target", source)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o777 & ~mask


def test_target_empty_folder_is_used(tmp_path: Path, source: Path) -> None:
    (tmp_path / "target").mkdir()
    write(tmp_path / "target", source)
    assert names(tmp_path / "target") == ["sub"]


@pytest.mark.parametrize("exchange", [True, False], ids=["in one step", "where the file system cannot"])
def test_target_is_replaced_whole(
    tmp_path: Path, source: Path, old: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(module, "_RENAME_EXCHANGE", 1 << 30)  # an unknown flag: EINVAL, as NFS answers
    write(old, source, overwrite=True)
    assert names(old) == ["sub"]
    assert names(tmp_path) == ["source", "target"]


def test_target_is_never_missing_while_it_is_replaced(
    tmp_path: Path, source: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Spy:
        def __init__(self, libc: ctypes.CDLL) -> None:
            self.libc = libc

        def renameat2(self, *arguments: object) -> int:
            seen.append(old.exists())
            result = self.libc.renameat2(*arguments)
            seen.append(old.exists())
            return int(result)

    libc = ctypes.CDLL(None, use_errno=True)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Spy(libc))
    write(old, source, overwrite=True)
    assert seen == [True, True]


def test_target_second_rename_fails_old_one_is_put_back(
    tmp_path: Path, source: Path, old: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RENAME_EXCHANGE", 1 << 30)
    before, rename = tree(old), os.rename

    def fail(one: Path, other: Path) -> None:
        if other == old and ".p2q-" in one.name and not old.exists():
            raise OSError(errno.EIO, "broken")
        rename(one, other)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(TargetError, match="broken"):
        write(old, source, overwrite=True)
    assert tree(old) == before
    assert names(tmp_path) == ["source", "target"]


@pytest.mark.parametrize("name", ["[a]*?", "ünï côde ", "x" * 255, "é" * 127, ".hidden", "-dash", "new\nline"])
def test_target_of_any_name_is_made(tmp_path: Path, source: Path, name: str) -> None:
    write(tmp_path / name, source)
    write_again = tmp_path / name / "config.json"
    write_again.write_text("{}")
    (tmp_path / name / "a.safetensors").write_text("")
    write(tmp_path / name, source, overwrite=True)
    assert names(tmp_path) == sorted([name, "source"])
    assert names(tmp_path / name) == ["sub"]


@pytest.mark.parametrize("relative", ["target", "./target", "sub/../target", "sub/.."])
def test_target_relative_path_is_made_where_it_says(
    tmp_path: Path, source: Path, relative: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    (folder / "sub").mkdir(parents=True)
    monkeypatch.chdir(folder)
    if relative == "sub/..":  # the working directory itself, which holds a folder
        with pytest.raises(TargetError, match="not a checkpoint"):
            write(Path(relative), source)
    else:
        write(Path(relative), source)
        assert names(folder) == ["sub", "target"]


def test_target_outside_the_main_thread_is_made(tmp_path: Path, source: Path) -> None:
    thread = threading.Thread(target=write, args=(tmp_path / "target", source))
    thread.start()
    thread.join()
    assert names(tmp_path / "target") == ["sub"]


# What is refused


@pytest.mark.parametrize(
    ("relative", "reason"),
    [
        ("source", "the target is the source"),
        ("source/sub", "the target lies inside the source"),
        ("source/../source/sub/deep", "the target lies inside the source"),
        ("link/sub", "the target lies inside the source"),
        ("link", "a symbolic link"),
        ("dangling", "a symbolic link"),
        ("loop", "a symbolic link"),
        (".", "the source lies inside the target"),
        ("", "the source lies inside the target"),
        ("file", "expected a directory or nothing, got a file"),
        ("pipe", "expected a directory or nothing, got a file"),
        ("file/target", "parent is not a directory"),
        ("loop/target", "parent is not a directory"),
        ("x" * 256, "File name too long"),
        ("full", "the target exists and is not a checkpoint"),
        ("notes", "the target exists and is not a checkpoint"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
def test_target_that_cannot_be_is_refused(
    tmp_path: Path, source: Path, relative: str, reason: str, overwrite: bool
) -> None:
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("precious")
    if relative == "pipe":
        os.mkfifo(tmp_path / "pipe")
    for name in ("full/precious.txt", "notes/config.json"):  # many projects have a config.json
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("precious")
    target = tmp_path / relative
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TargetError, match=reason):
        write(target, source, overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "precious.txt").read_text() == "precious"


def test_target_checkpoint_without_overwrite_is_refused(source: Path, old: Path, tree: Tree) -> None:
    before = tree(old)
    with pytest.raises(TargetError, match=r"the target exists\. Give --overwrite to replace it"):
        write(old, source)
    assert tree(old) == before


@pytest.mark.parametrize("checkpoint", [True, False], ids=["a checkpoint", "another folder"])
@pytest.mark.parametrize("overwrite", [True, False], ids=["overwrite", ""])
def test_target_that_appears_meanwhile_is_not_lost(
    tmp_path: Path, source: Path, tree: Tree, checkpoint: bool, overwrite: bool
) -> None:
    target = tmp_path / "target"

    def run() -> None:
        with new_directory(target, source=source, overwrite=overwrite):
            target.mkdir()
            for name in ("config.json", "model.safetensors") if checkpoint else ("precious",):
                (target / name).write_text("other")

    if checkpoint and overwrite:
        run()
        assert names(target) == []
    else:
        with pytest.raises(TargetError, match="the target exists"):
            run()
        assert "other" in {path.read_text() for path in target.iterdir()}
    assert names(tmp_path) == ["source", "target"]


def test_target_that_appears_in_the_last_moment_is_not_lost(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "target", os.rename

    def late(one: Path, other: Path) -> None:
        target.mkdir()
        (target / "precious").write_text("other")
        rename(one, other)

    monkeypatch.setattr(os, "rename", late)
    with pytest.raises(TargetError, match="not empty"):
        write(target, source)
    assert names(target) == ["precious"]


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder where not even root can write."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    if os.geteuid():
        folder.chmod(0o555)
        yield folder
        return
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("root, and no permission to mount a read-only file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("relative", ["target", "new/parents/target"])
def test_target_where_nobody_may_write_is_refused(read_only: Path, source: Path, relative: str) -> None:
    with pytest.raises(TargetError, match=r"cannot be written .*; it is as it was"):
        write(read_only / relative, source)
    assert names(read_only) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["disk full", "quota"])
def test_target_disk_full_is_said_and_nothing_stays(tmp_path: Path, source: Path, number: int) -> None:
    with pytest.raises(TargetError, match=r"new/target: the disk is full; the target is as it was\. Free some space"):
        write(tmp_path / "new" / "target", source, then=raising(OSError(number, os.strerror(number))))
    assert names(tmp_path) == ["source"]


def test_target_source_that_cannot_be_read_is_named(tmp_path: Path, source: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"source/gone: cannot be read \(No such file"),
        new_directory(tmp_path / "target", source=source, overwrite=False),
    ):
        (source / "gone").read_bytes()
    assert names(tmp_path) == ["source"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("exists", [True, False], ids=["old target", "no target"])
def test_target_any_exception_leaves_everything_as_it_was(
    tmp_path: Path, source: Path, old: Path, tree: Tree, error: type[BaseException], exists: bool
) -> None:
    target = old if exists else tmp_path / "x" / "y" / "target"
    before = tree(tmp_path)
    with pytest.raises(error):
        write(target, source, overwrite=exists, then=raising(error()))
    assert tree(tmp_path) == before


# What killed runs leave


def test_abandoned_directory_is_removed_by_the_next_run_and_nothing_else(tmp_path: Path, source: Path) -> None:
    abandoned = ".target.p2q-0123456789ab"
    others = [".target.p2q-backup", ".target.p2q-0123456789abc", ".targetXp2q-0123456789ab", ".t.p2q-0123456789ab"]
    for name in (abandoned, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / ".target.p2q-0123456789ac").symlink_to(tmp_path / others[0])
    write(tmp_path / "target", source)
    assert names(tmp_path) == sorted([*others, ".target.p2q-0123456789ac", "source", "target"])
    assert names(tmp_path / others[0]) == ["file"]


def test_directory_of_a_running_process_is_not_removed(tmp_path: Path, source: Path) -> None:
    with new_directory(tmp_path / "target", source=source, overwrite=False) as work:
        (work / "mine").write_text("x")
        write(tmp_path / "other", source)
        module._remove_abandoned(tmp_path / "target")
        assert (work / "mine").exists()


def test_directory_where_there_are_no_locks_is_made_and_not_removed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.EBADF, "no locks on this file system")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / ".target.p2q-0123456789ab").mkdir()
    write(tmp_path / "target", source)
    assert names(tmp_path) == [".target.p2q-0123456789ab", "source", "target"]


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_signal_unwinds_and_handlers_are_restored(tmp_path: Path, source: Path, number: signal.Signals) -> None:
    usual = [signal.getsignal(each) for each in STOP]
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "target", source, then=lambda: os.kill(os.getpid(), number))
    assert names(tmp_path) == ["source"]
    assert [signal.getsignal(each) for each in STOP] == usual


def test_signal_while_cleaning_up_does_not_disturb_it(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree = module.shutil.rmtree

    def impatient(path: Path, **options: bool) -> None:
        for number in STOP:
            os.kill(os.getpid(), number)
        rmtree(path, **options)

    monkeypatch.setattr(module.shutil, "rmtree", impatient)
    with pytest.raises(KeyboardInterrupt), new_directory(tmp_path / "target", source=source, overwrite=False):
        os.kill(os.getpid(), signal.SIGINT)
    assert names(tmp_path) == ["source"]


def test_signal_that_the_caller_handles_stays_the_callers(tmp_path: Path, source: Path) -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number)), signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with new_directory(tmp_path / "target", source=source, overwrite=False):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGHUP, before[1])
    assert seen == [signal.SIGTERM]
    assert (tmp_path / "target").is_dir()


def test_check_target_changes_nothing(tmp_path: Path, source: Path) -> None:
    check_target(tmp_path / "a" / "b", source=source, overwrite=False)
    assert names(tmp_path) == ["source"]
