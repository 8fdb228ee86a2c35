"""Writing a target directory atomically: complete or absent, never half-written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from p2q.errors import TargetError


@contextlib.contextmanager
def new_directory(target: Path, *, source: Path, overwrite: bool) -> Iterator[Path]:
    """A directory beside the target that becomes the target when the block ends well.

    Whatever happens inside (an error, a full disk, Ctrl-C, SIGTERM), the target is afterwards complete or as it was.
    After SIGKILL an unfinished directory may stay; the next call for the same target removes it.

    Raises:
        TargetError: the target exists (without `overwrite`, or is not a checkpoint), overlaps the source, or cannot be written.
    """
    check_target(target, source=source, overwrite=overwrite)
    final = target.absolute()
    prefix = f".{final.name}.p2q-"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(final.parent, prefix)
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
    except OSError as error:
        raise _target_error(target, error) from error
    lock = os.open(work, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with _terminate_as_interrupt():
            work.chmod(0o777 & ~_umask())
            yield work
            _sync_directory(work)
            _put_in_place(work, final)
    except OSError as error:
        if error.filename and not str(error.filename).startswith(str(work)):
            raise
        raise _target_error(target, error) from error
    finally:
        os.close(lock)
        shutil.rmtree(work, ignore_errors=True)


def check_target(target: Path, *, source: Path, overwrite: bool) -> None:
    """Refuse a target that exists or overlaps the source, before any work is done."""
    final, origin = target.resolve(), source.resolve()
    if final == origin:
        raise TargetError("the target is the source", file=target)
    if final.is_relative_to(origin):
        raise TargetError("the target lies inside the source", file=target)
    if origin.is_relative_to(final):
        raise TargetError("the source lies inside the target", file=target)
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise TargetError("the target exists and is not a directory", file=target)
    if target.exists() and any(target.iterdir()):
        if not overwrite:
            raise TargetError("the target exists", file=target, hint="Give --overwrite to replace it")
        if not (target / "config.json").is_file():
            raise TargetError("the target exists and is not a checkpoint; it is not replaced", file=target)


def _put_in_place(work: Path, final: Path) -> None:
    if not final.exists():
        os.rename(work, final)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{final.name}.p2q-", dir=final.parent))
    os.rename(final, old)  # onto an empty directory: atomic
    try:
        os.rename(work, final)
    except OSError:
        os.rename(old, final)
        raise
    _sync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove what a killed run left: a directory of ours that nobody holds locked."""
    for path in parent.glob(f"{prefix}*"):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(handle)


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C while the block runs, so that cleaning up happens."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread: signals are the caller's business
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _target_error(target: Path, error: OSError) -> TargetError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TargetError("the disk is full; nothing was written", file=target, hint="Free some space and run it again")
    return TargetError(f"cannot be written ({error.strerror or error}); nothing was written", file=target)
