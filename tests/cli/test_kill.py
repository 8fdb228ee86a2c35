"""Conversions that are killed, made in parts, or run side by side: what was finished counts, and nothing else does."""

import functools
import itertools
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from p2q import convert as module
from p2q import shards
from p2q.convert import convert

Make = Callable[..., Path]
Tree = Callable[[Path], dict[str, str]]
Fork = Callable[[Callable[[], object]], int]
P2Q = Callable[..., Any]
Refused = Callable[..., str]
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
SHARDS = [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
CALLS = ("pwrite", "preadv", "replace", "rename", "fsync")
PARTS = ("1/3", "2/3", "3/3")
WORK = ".target.p2q-work"


@pytest.fixture
def source(make_checkpoint: Make, w8a8: dict[str, torch.Tensor]) -> Path:
    """Four shards: a weight and its scale apart, another pair together, and one without either."""
    apart = [f"{UP}.weight", "model.norm.weight"], [f"{UP}.weight_scale"]
    placed = *apart, [f"{DOWN}.weight", f"{DOWN}.weight_scale"], ["model.embed_tokens.weight", "lm_head.weight"]
    return make_checkpoint(w8a8, shards=dict(zip(SHARDS, placed, strict=True)))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "target"


@pytest.fixture
def whole(source: Path, tmp_path: Path, tree: Tree) -> dict[str, str]:
    """The tree of a conversion that nothing disturbs."""
    convert(source, tmp_path / "whole")
    return tree(tmp_path / "whole")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    real = shards.convert_shard

    def note(plan: Any, name: str, path: Path | None) -> Any:
        names.append(name)
        return real(plan, name, path)

    monkeypatch.setattr(module, "convert_shard", note)
    return names


def count_calls(calls: tuple[str, ...], step: int, kill: Callable[[], object]) -> Callable[[], int]:
    """Call `kill` before call `step` of functions of os. For a process that ends: nothing is put back."""
    numbers, seen = itertools.count(1), [0]

    def call(real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        seen[0] = next(numbers)
        if seen[0] == step:
            kill()
        return real(*arguments, **options)

    for name in calls:
        setattr(os, name, functools.partial(call, getattr(os, name)))
    return lambda: seen[0]


def killed(fork: Fork, calls: tuple[str, ...], step: int, source: Path, target: Path, workers: int) -> None:
    def run() -> None:
        count_calls(calls, step, lambda: os.kill(os.getpid(), signal.SIGKILL))
        convert(source, target, workers=workers)

    assert os.waitstatus_to_exitcode(os.waitpid(fork(run), 0)[1]) == -signal.SIGKILL


def killed_after(shards: int, fork: Fork, source: Path, target: Path) -> None:
    """The names that files get in one worker's run: job.json, then for each shard its own and its record's."""
    killed(fork, ("replace", "rename"), 2 + 2 * shards, source, target, workers=1)
    assert len(list((target.parent / WORK / "records").iterdir())) == shards


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("workers", [1, 2])
def test_conversion_killed_at_any_of_twenty_moments_is_completed_by_the_next_call(
    fork: Fork, source: Path, target: Path, whole: dict[str, str], tmp_path: Path, tree: Tree, workers: int
) -> None:
    original, said = tree(source), tmp_path / "said"

    def count() -> None:
        calls = count_calls(CALLS, 0, lambda: None)
        convert(source, tmp_path / "counted", workers=workers)
        said.write_text(str(calls()))

    assert os.waitpid(fork(count), 0)[1] == 0
    kept = 0
    for step in random.Random(workers).sample(range(1, int(said.read_text()) + 1), 20):
        killed(fork, CALLS, step, source, target, workers=workers)
        assert tree(source) == original
        assert not target.exists() or tree(target) == whole, f"step {step}"
        kept += convert(source, target, overwrite=target.exists(), workers=workers).kept
        assert tree(target) == whole, f"step {step}"
        assert os.listdir(target.parent) == ["target"], f"step {step}"
        shutil.rmtree(target)
    assert kept > 0


@pytest.mark.parametrize("finished", [1, 2, 3, 4])
def test_finished_shards_are_kept_and_not_converted_again(
    fork: Fork, source: Path, target: Path, whole: dict[str, str], tree: Tree, made: list[str], finished: int
) -> None:
    killed_after(finished, fork, source, target)
    done = convert(source, target, workers=1)
    assert (done.kept, done.shards) == (finished, 4 - finished)
    assert made == SHARDS[finished:]
    assert tree(target) == whole
    assert os.listdir(target.parent) == ["target"]


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "shard, first bit": lambda tree, _: flip(tree / SHARDS[0], 0),
    "shard, last bit": lambda tree, _: flip(tree / SHARDS[0], -1),
    "shard truncated": lambda tree, _: os.truncate(tree / SHARDS[0], 100),
    "shard of another": lambda tree, _: shutil.copy(tree / SHARDS[1], tree / SHARDS[0]),
    "record garbage": lambda _, record: record.write_bytes(b"\xff\xfe{"),
    "record of another": lambda _, record: shutil.copy(record.with_name(f"{SHARDS[1]}.json"), record),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_finished_shard_that_is_no_longer_whole_is_made_again(
    fork: Fork, source: Path, target: Path, whole: dict[str, str], tree: Tree, made: list[str], damage: str
) -> None:
    killed_after(2, fork, source, target)
    DAMAGES[damage](target.parent / WORK / "tree", target.parent / WORK / "records" / f"{SHARDS[0]}.json")
    assert convert(source, target, workers=1).kept == 1
    assert made == [SHARDS[0], *SHARDS[2:]]
    assert tree(target) == whole


CHANGES = [(0, -17, [0, 1]), (1, -2, [0, 1]), (2, -2, [2]), (3, -1, [3])]  # the first two need each other


@pytest.mark.parametrize(("shard", "position", "redone"), CHANGES)
def test_finished_shard_whose_source_was_changed_is_made_again(
    fork: Fork, source: Path, target: Path, tmp_path: Path, tree: Tree, made: list[str], shard: int,
    position: int, redone: list[int],
) -> None:  # fmt: skip
    killed_after(4, fork, source, target)
    flip(source / SHARDS[shard], position)
    convert(source, tmp_path / "changed")
    made.clear()
    assert convert(source, target, workers=1).kept == 4 - len(redone)
    assert made == [SHARDS[i] for i in redone]
    assert tree(target) == tree(tmp_path / "changed")


def test_options_that_changed_after_a_kill_are_refused_until_overwrite(
    refused: Refused, p2q: P2Q, fork: Fork, source: Path, target: Path, tmp_path: Path, tree: Tree
) -> None:
    killed_after(1, fork, source, target)
    told = refused("convert", source, target, "--rule", "ceil")
    assert told.startswith(f"{target.parent / WORK}: ")
    assert "expected rule mse, got rule ceil" in told
    assert p2q("convert", source, target, "--rule", "ceil", "--overwrite", "--json").json()["kept"] == 0
    convert(source, tmp_path / "ceil", rule="ceil")
    assert tree(target) == tree(tmp_path / "ceil")
    assert os.listdir(target.parent) == ["target"]


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no permission to mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(("disk", "relative"), [("ro", "target"), ("ro", "new/parents/target")], indirect=["disk"])
def test_target_where_nobody_may_write_is_refused(refused: Refused, source: Path, disk: Path, relative: str) -> None:
    told = refused("convert", source, disk / relative)
    assert told == f"{disk / relative}: cannot be written (Read-only file system); it is as it was"


@pytest.mark.parametrize("disk", ["size=256k"], indirect=True)
def test_disk_that_fills_half_way_is_refused_and_the_next_call_goes_on(
    p2q: P2Q, source: Path, disk: Path, whole: dict[str, str], tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, target, filler = shards.convert_shard, disk / "target", disk / "filler"

    def fill(plan: Any, name: str, path: Path) -> Any:
        if name == SHARDS[2]:
            filler.write_bytes(bytes(shutil.disk_usage(disk).free))
        return real(plan, name, path)

    with monkeypatch.context() as patch:
        patch.setattr(module, "convert_shard", fill)
        found = p2q("convert", source, target, "--workers", 1)
    full = f"{target}: the disk is full; the target is as it was. Free some space and run it again"
    assert (found.code, found.out, found.err) == (2, "", f"error: {full}\n")
    assert not target.exists()
    assert sorted(path.name for path in (disk / WORK / "tree").iterdir()) == SHARDS[:2]
    filler.unlink()
    assert p2q("convert", source, target, "--json").json()["kept"] == 2
    assert tree(target) == whole
    assert os.listdir(disk) == ["target"]


RUNS = [(None, ""), (None, "--overwrite"), (None, "--part=1/2"), (1, ""), (1, "--part=1/2"), (1, "--part=finish")]


@pytest.mark.parametrize(("first", "second"), RUNS)
def test_second_run_for_a_target_at_the_same_time_is_refused(
    refused: Refused, source: Path, target: Path, whole: dict[str, str], tree: Tree, first: int | None, second: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    told: list[str] = []
    real = shards.convert_shard

    def meanwhile(plan: Any, name: str, path: Path) -> Any:
        if not told:
            told.append(refused("convert", source, target, *second.split()))
        return real(plan, name, path)

    monkeypatch.setattr(module, "convert_shard", meanwhile)
    convert(source, target, workers=1, part=module.Part(first, 2) if first else None)
    assert told == [f"{target}: another run for the same target is under way"]
    convert(source, target, overwrite=True)
    assert tree(target) == whole


@pytest.mark.parametrize("order", [*itertools.permutations(PARTS), (*PARTS, *PARTS)], ids=" ".join)
def test_parts_in_any_order_and_twice_give_the_bytes_of_one_run(
    p2q: P2Q, source: Path, target: Path, whole: dict[str, str], tree: Tree, made: list[str], order: tuple[str, ...]
) -> None:
    for part in order:
        assert p2q("convert", source, target, "--part", part).code == 0
        assert not target.exists()
    assert p2q("convert", source, target, "--part", "finish", "--json").json()["kept"] == 4
    assert sorted(made) == SHARDS
    assert tree(target) == whole
    assert os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize(("missing", "shards"), [("1/3", [0, 3]), ("2/3", [1]), ("3/3", [2])])
def test_finish_without_a_part_is_refused_and_a_plain_call_completes(
    refused: Refused, p2q: P2Q, source: Path, target: Path, whole: dict[str, str], tree: Tree, made: list[str],
    missing: str, shards: list[int],
) -> None:  # fmt: skip
    for part in sorted({*PARTS} - {missing}):
        p2q("convert", source, target, "--part", part)
    names = [SHARDS[i] for i in shards]
    told = refused("convert", source, target, "--part", "finish")
    assert told.startswith(f"{target}: parts are missing; expected 4 converted shards, got {4 - len(shards)}, without ")
    assert f"without {', '.join(names)}. Run the parts" in told
    made.clear()
    assert p2q("convert", source, target, "--json").json()["kept"] == 4 - len(shards)
    assert sorted(made) == names
    assert tree(target) == whole


@pytest.mark.parametrize(
    ("options", "reason"), [("2/4", "expected parts 3, got parts 4"), ("2/3 --rule ceil", "rule mse, got rule ceil")]
)
def test_part_of_another_division_or_rule_is_refused(
    p2q: P2Q, tree: Tree, source: Path, target: Path, options: str, reason: str
) -> None:
    p2q("convert", source, target, "--part", "1/3")
    before = tree(target.parent)
    found = p2q("convert", source, target, "--part", *options.split())
    assert found.code == 2
    assert found.err.startswith(f"error: {target.parent / WORK}: ")
    assert reason in found.err
    after = tree(target.parent)
    assert {name: after[name] for name in before} == before
    assert all(Path(name).name.startswith("lock") for name in after.keys() - before.keys())


@pytest.mark.parametrize("part", ["0/3", "4/3", "x", "", "1", "1/0", "-1/3", "1/3/3", "1.0/3", "٣/٣"])
def test_part_that_is_none_is_refused(p2q: P2Q, source: Path, target: Path, part: str) -> None:
    found = p2q("convert", source, target, f"--part={part}")
    assert found.code == 2
    assert "Traceback" not in found.err
    assert "expected i/n with i from 1 to n, or finish" in " ".join(found.err.replace("│", "").split())
    assert os.listdir(target.parent) == []


def test_folder_left_by_a_kill_after_the_target_got_its_name_is_removed_by_the_next_call(
    p2q: P2Q, tree: Tree, source: Path, target: Path, whole: dict[str, str]
) -> None:
    p2q("convert", source, target, "--part", "1/1")
    shutil.rmtree(target.parent / WORK / "tree")
    convert(source, target.with_name("copy"))
    target.with_name("copy").rename(target)
    assert p2q("convert", source, target).code == 2  # the target exists
    assert os.listdir(target.parent) == [target.name]
    assert tree(target) == whole
