"""Writing a target directory atomically: complete or absent, never half-written."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from p2q.errors import CheckpointError, TargetError
from p2q.signals import stoppable

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_NOT_EMPTY = {errno.ENOTEMPTY, errno.EEXIST}
_RANDOM_BYTES = 6


@contextlib.contextmanager
def new_directory(target: Path, *, source: Path, overwrite: bool) -> Iterator[Path]:
    """A directory beside the target that becomes the target when the block ends well.

    Whatever happens inside (an error, a full disk, Ctrl-C, SIGTERM), the target is afterwards complete or as it was.
    After SIGKILL an unfinished directory may stay; the next call for the same target removes it.

    Raises:
        TargetError: the target exists (without `overwrite`, or is not a checkpoint), overlaps the source, or cannot be
            written.
        CheckpointError: a file of the source cannot be read.
    """
    check_target(target, source=source, overwrite=overwrite)
    final = real_path(target)
    made = [folder for folder in final.parents if not folder.exists()]
    work = final.with_name(_prefix(final) + secrets.token_hex(_RANDOM_BYTES))
    with stoppable() as signals:
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(final)
            work.mkdir()
            with _locked(work):
                if not work.exists():
                    raise TargetError("another run for the same target is under way", file=target)
                yield work
                flush(work)
                check_target(target, source=source, overwrite=overwrite)  # it may have appeared meanwhile
                put_in_place(work, final, overwrite=overwrite)
        except OSError as error:
            raise explained(error, target, source) from error
        finally:
            signals.unwind = False
            shutil.rmtree(work, ignore_errors=True)
            for folder in made:  # those that stayed empty
                with contextlib.suppress(OSError):
                    folder.rmdir()


def check_target(target: Path, *, source: Path, overwrite: bool) -> None:
    """Refuse a target that exists or overlaps the source, before any work is done.

    Raises:
        TargetError: see `new_directory`.
    """
    try:
        _check_target(target, source, overwrite)
    except OSError as error:
        raise explained(error, target, source) from error


def _check_target(target: Path, source: Path, overwrite: bool) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        got = "a symbolic link" if target.is_symlink() else "a file"
        raise TargetError("the target is not a directory", file=target, expected="a directory or nothing", got=got)
    final, origin = real_path(target), real_path(source)
    if not final.name:
        raise TargetError("the target has no name", file=target, expected="a folder below another one")
    if final == origin:
        raise TargetError("the target is the source", file=target)
    if final.is_relative_to(origin):
        raise TargetError("the target lies inside the source", file=target)
    if origin.is_relative_to(final):
        raise TargetError("the source lies inside the target", file=target)
    above = next(folder for folder in final.parents if os.path.lexists(folder))
    if not above.is_dir():
        raise TargetError("the target's parent is not a directory", file=above, expected="a directory", got="a file")
    if not target.exists() or not any(target.iterdir()):
        return
    if not ((target / "config.json").is_file() and any(target.glob("*.safetensors"))):
        raise TargetError("the target exists and is not a checkpoint; it is not replaced", file=target)
    if not overwrite:
        raise TargetError("the target exists", file=target, hint="Give --overwrite to replace it")


def real_path(path: Path) -> Path:
    """An absolute path without links."""
    return Path(os.path.realpath(path))  # unlike Path.resolve, no exception for a loop of links


def _prefix(final: Path, word: str = "p2q") -> str:
    return f".{final.name[:50]}.{word}-"  # with the random letters within the 255 bytes of a file name


def _remove_abandoned(final: Path) -> None:
    """Remove what killed runs left: unfinished directories that no process holds locked."""
    ours = re.compile(re.escape(_prefix(final)) + f"[0-9a-f]{{{2 * _RANDOM_BYTES}}}")
    for path in final.parent.iterdir():
        if ours.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError), _locked(path) as free:  # another run may be removing it
                if free:
                    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock while the block runs. False where another process has it, or there are no locks here."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = True
    except OSError:
        locked = False
    try:
        yield locked
    finally:
        os.close(handle)


def put_in_place(work: Path, final: Path, *, overwrite: bool) -> None:
    """Give the finished directory its name. What it replaces is afterwards at `work`."""
    try:
        os.rename(work, final)  # onto nothing, or an empty directory
    except OSError as error:
        if error.errno not in _NOT_EMPTY or not overwrite:
            raise
        _exchange(work, final)
    with contextlib.suppress(OSError):  # the target is there and whole; saying that it is not would be wrong
        sync(final.parent)


def _exchange(one: Path, other: Path) -> None:
    """Swap two directories: in one step, so that a kill finds either; in three where the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number not in _NO_EXCHANGE:
        raise OSError(number, os.strerror(number), str(other))
    aside = other.with_name(_prefix(other, "replaced") + secrets.token_hex(_RANDOM_BYTES))
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except BaseException:
        os.rename(aside, other)
        raise
    os.rename(aside, one)


def flush(work: Path) -> None:
    """Bring every file to the disk before the directory gets its name."""
    for path in (*work.rglob("*"), work):
        sync(path)


def sync(path: Path) -> None:
    """Bring a file or a directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def explained(error: OSError, target: Path, source: Path) -> CheckpointError | TargetError:
    """What the failure of a file operation means for the user."""
    reason = error.strerror or str(error)
    if error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(source):
        return CheckpointError(f"cannot be read ({reason})", file=os.fsdecode(error.filename))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TargetError(
            "the disk is full; the target is as it was", file=target, hint="Free some space and run it again"
        )
    return TargetError(f"cannot be written ({reason}); it is as it was", file=target)
