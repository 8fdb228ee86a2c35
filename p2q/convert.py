"""Converting a W8A8 checkpoint to power-of-two scales.

Every shard keeps its header, hence its tensor order, dtypes, shapes and offsets. Bytes outside the quantized weights
and their scales are copied as they are.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import p2q
from p2q.checkpoint import Checkpoint, check_tied, copy_others, header_digest, open_checkpoint
from p2q.contract import CONTRACT_VERSION, exponent_bounds
from p2q.errors import P2QError, ScaleError, TargetError
from p2q.layers import Layer, check_length
from p2q.manifest import MANIFEST_NAME, Manifest, ShardRecord, digest_of_files, read_manifest, sha256_of
from p2q.originals import Originals
from p2q.requantize import requantizer_on
from p2q.scales import Rule, exponent_of, is_power_of_two
from p2q.scheme import quantized_layers
from p2q.shards import Plan, convert_shard, others_digest, stored_input_exponent
from p2q.statistics import Statistics
from p2q.target import check_target
from p2q.unfinished import Job, Unfinished, check_inputs, remove_leftover, unfinished

Progress = Callable[[int, int], None]
"""Called with (bytes of shards done, bytes in all), from any thread, one call at a time."""


@dataclass(frozen=True)
class Part:
    """Which shards a run converts: the number-th of `count` parts, or none, to finish what the parts have made."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}-of-{self.count}"


FINISH = Part(0, 0)


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    manifest: None for a part. changed: False where the source already had power-of-two scales. skipped: files left out.
    shards: how many this run converted. kept: how many an earlier run had finished, which were verified.
    """

    manifest: Manifest | None
    changed: bool
    skipped: list[str]
    shards: int
    kept: int


def convert(
    source: Path,
    target: Path,
    *,
    rule: Rule = "mse",
    input_scales: bool = False,
    from_weights: Path | None = None,
    feedback: Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    part: Part | None = None,
    workers: int | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Conversion:
    """Convert a checkpoint directory; the target is complete or untouched.

    A conversion that was stopped keeps its finished shards beside the target; the next call verifies and uses them.

    Args:
        source: a compressed-tensors int-quantized W8A8 checkpoint.
        target: the directory to make.
        rule: how each scale's exponent is chosen.
        input_scales: make static activation scales powers of two as well (the next larger ones).
        from_weights: a checkpoint with the original weights, to requantize from those.
        feedback: statistics that `p2q calibrate` collected, to carry errors from column to column.
        overwrite: replace an existing checkpoint, copy a source that is already converted, throw away an unfinished
            conversion with other options.
        dry_run: check and compute everything, write nothing. `files` of the manifest is then empty.
        part: convert only a part of the shards, or finish.
        workers: threads, each on a shard of its own; by default one more than there are cores.
        device: where weights are requantized. The result is the same.
        progress: told of bytes done.

    Raises:
        CheckpointError, SchemeError, ScaleError: the source is not a checkpoint that can be converted.
        TargetError: the target cannot be written, or parts of it are missing.
    """
    check_target(target, source=source, overwrite=True)
    inputs = [path for path in (from_weights, feedback) if path is not None]
    check_inputs(target, [source, *inputs])
    if not dry_run:
        remove_leftover(target, source)
    checkpoint = open_checkpoint(source)
    check_target(target, source=source, overwrite=overwrite)
    check_inputs(target, [shard.path for shard in checkpoint.shards.values()])
    layers = quantized_layers(checkpoint)
    check_tied(checkpoint)
    originals = Originals(from_weights, checkpoint, layers) if from_weights is not None else None
    statistics = Statistics(feedback, checkpoint, layers) if feedback is not None else None
    plan = Plan(checkpoint, layers, rule, requantizer_on(device), input_scales, originals, statistics)
    for layer in layers:
        _check_layer(plan, layer)
    converted = originals is None and all(_is_converted(plan, layer) for layer in layers)
    if converted and not overwrite:
        raise ScaleError(
            "every scale is already a power of two; there is nothing to convert",
            file=source,
            hint="Give --overwrite to copy it unchanged",
        )
    run = _Run(plan, progress, workers)
    if dry_run:
        records = run.over(checkpoint.shards, lambda plan, shard: convert_shard(plan, shard, None))
        return Conversion(_manifest(plan, records, {}), not converted, checkpoint.skipped, len(records), 0)
    # A source that p2q converted keeps its manifest, so that converting twice changes no byte.
    kept = read_manifest(source) if converted else None
    share = None if part == FINISH else part
    with unfinished(target, source=source, overwrite=overwrite, part=str(share) if share else None) as work:
        work.start(_job(plan) | ({"parts": share.count} if share else {}), again=overwrite)
        names = sorted(checkpoint.shards)
        mine = names[share.number - 1 :: share.count] if share else names
        done = run.verified(work, mine)
        missing = [name for name in mine if name not in done]
        _check_space(checkpoint, missing, work.folder)
        if part == FINISH and missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise TargetError(
                "parts are missing",
                file=target,
                expected=f"{len(names)} converted shards",
                got=f"{len(done)}, without {', '.join(missing[:3])}{more}",
                hint="Run the parts that are missing, or the same command without --part to convert the rest here",
            )
        made = run.over(missing, lambda plan, shard: work.convert(shard, lambda path: convert_shard(plan, shard, path)))
        manifest = None
        if share is None:
            manifest = _finish(plan, {**done, **made}, work.tree, kept)
            work.put_in_place(overwrite=overwrite)
    return Conversion(manifest, not converted, checkpoint.skipped, len(made), len(done))


def _check_layer(plan: Plan, layer: Layer) -> None:
    check_length(plan.checkpoint, layer)
    plan.scale_of(layer)
    plan.rows(layer)
    if layer.input_scale is not None:
        stored_input_exponent(plan.checkpoint, layer.input_scale)


def _check_space(checkpoint: Checkpoint, shards: list[str], folder: Path) -> None:
    """Find a disk that is too small at once, and not after an hour."""
    if sum(checkpoint.shards[name].path.stat().st_size for name in shards) > shutil.disk_usage(folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _finish(plan: Plan, records: dict[str, ShardRecord], tree: Path, kept: Manifest | None) -> Manifest:
    """Write all that is not a shard."""
    checkpoint = plan.checkpoint
    for path in tree.iterdir():  # left by a run that was stopped here, from a source that may have had other files
        if path.name not in records:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    copy_others(checkpoint, tree)
    files = {name: sha256_of(tree / name) for name in checkpoint.others}
    files |= {name: record.target for name, record in records.items()}
    manifest = kept if kept and kept.files == files else _manifest(plan, records, dict(sorted(files.items())))
    (tree / MANIFEST_NAME).write_text(manifest.dump(), encoding="utf-8")
    return manifest


def _is_converted(plan: Plan, layer: Layer) -> bool:
    """Whether every scale is a power of two in the proven range already."""
    scale = plan.checkpoint.read(layer.scale)
    low, high = exponent_bounds(plan.checkpoint.tensors[layer.weight].shape[-1])
    if not is_power_of_two(scale).all():
        return False
    if plan.input_scales and layer.input_scale and not is_power_of_two(plan.checkpoint.read(layer.input_scale)).all():
        return False
    exponents = exponent_of(scale)
    return bool(((exponents >= low) & (exponents <= high)).all())


class _Run:
    """Work on several shards side by side, and what of it is done."""

    def __init__(self, plan: Plan, progress: Progress | None, workers: int | None) -> None:
        self._plan = replace(plan, progress=self._count)
        self._progress = progress
        # One more than there are cores: while one waits for the disk, the others compute.
        self._workers = workers or len(os.sched_getaffinity(0)) + 1
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._done, self._total = 0, sum(_data_bytes(plan.checkpoint, name) for name in plan.checkpoint.shards)
        if progress is not None:
            progress(0, self._total)

    def over(self, shards: Iterable[str], work: Callable[[Plan, str], ShardRecord]) -> dict[str, ShardRecord]:
        """Work on shards, in threads. What one raises stops the others."""
        names = list(shards)
        if min(self._workers, len(names)) <= 1:
            return {name: work(self._plan, name) for name in names}
        with ThreadPoolExecutor(
            min(self._workers, len(names)), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            jobs = {name: pool.submit(work, self._plan, name) for name in names}
            try:
                for job in wait(jobs.values(), return_when=FIRST_EXCEPTION).done:
                    job.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        return {name: job.result() for name, job in jobs.items()}

    def verified(self, work: Unfinished, names: list[str]) -> dict[str, ShardRecord]:
        """The shards of an earlier run whose file, and all that went into it, is still what it was."""
        there = work.finished()
        checked = self.over(
            [name for name in names if name in there], lambda plan, name: self._verify(work, name, there[name])
        )
        return {name: record for name, record in checked.items() if record == there[name]}

    def _verify(self, work: Unfinished, name: str, record: ShardRecord) -> ShardRecord:
        path = work.tree / name
        if others_digest(self._plan, name) != record.others:
            return record.model_copy(update={"others": "changed"})
        source, target = sha256_of(self._plan.checkpoint.shards[name].path), sha256_of(path)
        if (source, target) == (record.source, record.target):
            self._count(_data_bytes(self._plan.checkpoint, name))
        return record.model_copy(update={"source": source, "target": target})

    def _count(self, size: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        with self._lock:
            self._done += size
            if self._progress is not None:
                self._progress(self._done, self._total)


class _Stopped(P2QError):
    """Another thread has failed, and its error is the one to tell."""

    def __init__(self) -> None:
        super().__init__("stopped")


def _data_bytes(checkpoint: Checkpoint, shard: str) -> int:
    found = checkpoint.shards[shard]
    return found.path.stat().st_size - len(found.header)


def _job(plan: Plan) -> Job:
    """What makes one conversion differ from another: options, and the headers and configuration of the source."""
    checkpoints = [plan.checkpoint, *([plan.originals.checkpoint] if plan.originals else [])]
    return {
        "made_by": f"p2q {p2q.__version__}",
        "contract": CONTRACT_VERSION,
        "rule": plan.rule,
        "input_scales": plan.input_scales,
        "feedback": plan.statistics.digest if plan.statistics else None,
        "source": [header_digest(checkpoint) for checkpoint in checkpoints],
    }


def _manifest(plan: Plan, records: dict[str, ShardRecord], files: dict[str, str]) -> Manifest:
    checkpoint = plan.checkpoint
    source = {name: sha256_of(checkpoint.path / name) for name in checkpoint.others}
    source |= {name: record.source for name, record in records.items()}
    tensors = {tensor: record for shard in records.values() for tensor, record in shard.tensors.items()}
    inputs = {tensor: k for shard in records.values() for tensor, k in shard.input_scales.items()}
    originals = {name: record.others.split()[-1] for name, record in records.items()}
    return Manifest(
        contract=CONTRACT_VERSION,
        made_by=f"p2q {p2q.__version__}",
        rule=plan.rule,
        source_digest=digest_of_files(source),
        weights_digest=digest_of_files(originals) if plan.originals else None,
        statistics_digest=plan.statistics.digest if plan.statistics else None,
        tensors=dict(sorted(tensors.items())),
        input_scales=dict(sorted(inputs.items())),
        files=files,
    )
