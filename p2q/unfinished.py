"""The folder beside the target in which a conversion grows: finished shards stay there for the next call.

.NAME.p2q-work/
    lock       one run holds it alone, or the runs of several parts share it
    job.json   what is converted, and how: shards of another job are never mixed with these
    tree/      the target to be; a shard that is not finished is called NAME.partial
    records/   what is known of each finished shard
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from p2q.errors import P2QError, TargetError
from p2q.manifest import ShardRecord
from p2q.signals import stoppable
from p2q.target import check_target, explained, flush, put_in_place, real_path, sync

_BUSY = {errno.EWOULDBLOCK, errno.EACCES}
_NAME_BYTES = 200
Job = dict[str, object]


def unfinished_folder(target: Path) -> Path:
    """Where an unfinished conversion to a target lies."""
    final = real_path(target)
    name = final.name
    if len(os.fsencode(name)) > _NAME_BYTES:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return final.with_name(f".{name}.p2q-work")


class Unfinished:
    """An unfinished conversion that this process holds."""

    def __init__(self, target: Path, source: Path) -> None:
        self.target, self.source = target, source
        self.folder = unfinished_folder(target)
        self.tree, self._records = self.folder / "tree", self.folder / "records"
        self.lock = -1

    def finished(self) -> dict[str, ShardRecord]:
        """The records of the finished shards. One that cannot be read counts for nothing."""
        found = {}
        for path in sorted(self._records.glob("*.json")):
            shard = path.name.removesuffix(".json")
            with contextlib.suppress(ValidationError, OSError):
                if (self.tree / shard).is_file():
                    found[shard] = ShardRecord.model_validate_json(path.read_bytes())
        return found

    def convert(self, shard: str, convert: Callable[[Path], ShardRecord]) -> ShardRecord:
        """Make a shard and note it as finished. A part of it never stands under its name."""
        partial, path = self.tree / f"{shard}.partial", self.tree / shard
        partial.unlink(missing_ok=True)
        try:
            record = convert(partial)
            sync(partial)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        sync(self.tree)
        self._write(self._records / f"{shard}.json", record.model_dump_json())
        return record

    def put_in_place(self, *, overwrite: bool) -> None:
        """Give the tree the target's name."""
        flush(self.tree)
        check_target(self.target, source=self.source, overwrite=overwrite)  # it may have appeared meanwhile
        put_in_place(self.tree, real_path(self.target), overwrite=overwrite)

    def start(self, job: Job, *, again: bool) -> None:
        """Take over what is there of the same job, or begin.

        Raises:
            TargetError: the folder holds shards of another job that are not to be thrown away (`again`), or another
                part's run is under way with other options.
        """
        path = self.folder / "job.json"
        there = _read_job(path)
        if "parts" not in job:  # a run of all shards may go on where parts ended
            there.pop("parts", None)
        names = sorted(name for name in {*there, *job} if there.get(name) != job.get(name))
        if there and names:
            if (self.finished() and not again) or not self.alone():
                raise TargetError(
                    "an unfinished conversion of another source, or with other options, is there",
                    file=self.folder,
                    expected=", ".join(f"{name} {there.get(name)}" for name in names),
                    got=", ".join(f"{name} {job.get(name)}" for name in names),
                    hint="Finish it with its own options, or give --overwrite to throw it away",
                )
            for folder in (self._records, self.tree):
                shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.tree, self._records):
            folder.mkdir(exist_ok=True)
        if names:
            self._write(path, json.dumps(job, sort_keys=True, indent=1))

    def alone(self) -> bool:
        """Whether no other run holds the folder, and none will while this one does: its lock is no longer shared."""
        with contextlib.suppress(OSError):
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        with contextlib.suppress(OSError):
            fcntl.flock(self.lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a failed conversion may lose the lock
        return False

    @staticmethod
    def _write(path: Path, text: str) -> None:
        new = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            new.write_text(text, encoding="utf-8")
            sync(new)
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)


@contextlib.contextmanager
def unfinished(target: Path, *, source: Path, overwrite: bool, part: str | None) -> Iterator[Unfinished]:
    """Hold the folder while a block runs: alone, or as the run of a part, beside those of other parts.

    A block that ends well without `put_in_place` leaves the folder. One that is stopped (Ctrl-C, SIGTERM, a full disk)
    leaves it where it holds finished shards. Bad input leaves nothing but what other parts have made.

    Raises:
        TargetError: the target exists (without `overwrite`, or is not a checkpoint), overlaps the source, cannot be
            written, or another run for it is under way.
        CheckpointError: a file of the source cannot be read.
    """
    check_target(target, source=source, overwrite=overwrite)
    work = Unfinished(target, source)
    made = [folder for folder in work.folder.parents if not folder.exists()]
    keep = False
    with stoppable() as signals:
        try:
            work.folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(work, part):
                try:
                    yield work
                    keep = part is not None
                except BaseException as error:
                    bad_input = isinstance(error, P2QError) and not isinstance(error, TargetError)
                    keep = bool(work.finished()) and (part is not None or not bad_input)
                    raise
        except OSError as error:
            raise explained(error, target, source) from error
        finally:
            signals.unwind = False
            if not keep:
                _remove(work)
            for folder in made:  # those that stayed empty
                with contextlib.suppress(OSError):
                    folder.rmdir()


def check_inputs(target: Path, inputs: list[Path]) -> None:
    """Refuse to replace, or to work in, a folder in which something that is read lies.

    Raises:
        TargetError: naming the file or folder.
    """
    places = [real_path(target), real_path(unfinished_folder(target))]
    for path in inputs:
        if any(real_path(path).is_relative_to(place) for place in places):
            raise TargetError("the target would replace what it is made from", file=target, got=str(path))


def remove_leftover(target: Path, source: Path) -> None:
    """Remove what a run leaves that is killed after its target got its name: a folder without a tree."""
    work = Unfinished(target, source)
    if (work.folder / "job.json").is_file() and not work.tree.is_dir():
        _remove(work)


def _remove(work: Unfinished) -> None:
    """Remove the folder, unless another run holds it."""
    with contextlib.suppress(OSError, TargetError), contextlib.ExitStack() as stack:
        _lock(work, "lock", fcntl.LOCK_EX, stack)
        shutil.rmtree(work.folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(work: Unfinished, part: str | None) -> Iterator[None]:
    """Hold the folder's lock, and that of the part. Where the file system has no locks, nothing is held."""
    while True:
        work.folder.mkdir(exist_ok=True)
        with contextlib.ExitStack() as stack:
            work.lock = _lock(work, "lock", fcntl.LOCK_EX if part is None else fcntl.LOCK_SH, stack)
            if part is not None:
                _lock(work, f"lock-{part}", fcntl.LOCK_EX, stack)
            try:
                same = os.path.samestat(os.fstat(work.lock), os.stat(work.folder / "lock"))
            except FileNotFoundError:
                same = False
            if same:  # else the run that held it has removed the folder meanwhile
                yield
                return


def _lock(work: Unfinished, name: str, kind: int, stack: contextlib.ExitStack) -> int:
    handle = os.open(work.folder / name, os.O_RDWR | os.O_CREAT, 0o666)
    stack.callback(os.close, handle)
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            raise TargetError("another run for the same target is under way", file=work.target) from error
    return handle


def _read_job(path: Path) -> Job:
    try:
        job = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        return {"job": "that cannot be read"}
    return job if isinstance(job, dict) else {"job": job}
