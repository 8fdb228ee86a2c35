"""Ctrl-C, SIGTERM, SIGHUP and SIGKILL in the middle of a conversion, in a process of its own."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import p2q.convert
from p2q.cli import main
from p2q.convert import convert
from p2q.shards import requantize_blocks

Make = Callable[..., Path]
Tree = Callable[[Path], dict[str, str]]
Fork = Callable[[Callable[[], object]], int]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def hang_in_second_layer(ready: Path) -> Callable[..., Any]:
    count = 0

    def slow(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            ready.touch()
            time.sleep(60)
        return requantize_blocks(*arguments)

    return slow


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda n: n.name)
@pytest.mark.parametrize("exists", [False, True], ids=["no target", "old target"])
def test_conversion_that_is_stopped_leaves_the_target_as_it_was(
    tmp_path: Path, make_checkpoint: Make, tree: Tree, fork: Fork, number: signal.Signals, exists: bool
) -> None:
    source, out = make_checkpoint(), tmp_path / "out"
    target, ready, said = out / "target", tmp_path / "ready", tmp_path / "said"
    out.mkdir()
    if exists:
        convert(source, target, rule="ceil")
    before, original = tree(out), tree(source)

    def run() -> None:
        file = os.open(said, os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(file, stream)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        p2q.shards.requantize_blocks = hang_in_second_layer(ready)
        sys.argv = ["p2q", "convert", str(source), str(target), "--overwrite"]
        main()

    child = fork(run)
    wait_for(ready)
    assert (out / ".target.p2q-work" / "tree" / "model.safetensors.partial").exists()  # it is in the midst of it
    os.kill(child, number)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert tree(source) == original
    if number == signal.SIGKILL:
        assert code == -number
        assert {name: what for name, what in tree(out).items() if not name.startswith(".target.p2q-")} == before
        assert tree(out) != before
    else:
        assert code == 130
        assert said.read_text() == "interrupted; nothing was left half-written\n"
        assert tree(out) == before
    convert(source, target, overwrite=True)
    assert [path.name for path in out.iterdir()] == ["target"]


def test_command_that_is_interrupted_leaves_nothing(tmp_path: Path, tiny_w8a8: Path) -> None:
    """The installed command itself, stopped by the keyboard's signal once the unfinished directory is there."""
    hook = tmp_path / "sitecustomize.py"
    hook.write_text(
        "import sys, time, pathlib\n"
        f"ready = pathlib.Path({str(tmp_path / 'ready')!r})\n"
        "def hook(event, arguments):\n"
        "    if event == 'fcntl.flock' and not ready.exists():  # that of the unfinished directory\n"
        "        ready.touch()\n"
        "        time.sleep(60)\n"
        "sys.addaudithook(hook)\n"
    )
    command = [Path(sys.executable).with_name("p2q"), "convert", tiny_w8a8, tmp_path / "target"]
    child = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(tmp_path / "ready")
    assert list(tmp_path.glob(".target.p2q-*"))
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, "", "interrupted; nothing was left half-written\n")
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("__")) == [
        "ready",
        "sitecustomize.py",
    ]


# A stop at every single step of a conversion: each time that Python tells its audit hooks of a file operation.

_EVENTS = ("open", "os.", "shutil.", "fcntl.", "ctypes.")


def convert_until(step: int, number: signal.Signals, source: Path, target: Path) -> int:
    """Convert, but send oneself a signal before file operation `step`. Returns how many there were."""
    count, listening = 0, True

    def hook(event: str, _arguments: object) -> None:
        nonlocal count
        if listening and event.startswith(_EVENTS):
            count += 1
            if count == step:
                os.kill(os.getpid(), number)

    sys.addaudithook(hook)
    try:
        convert(source, target, overwrite=True)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        listening = False
    return count


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("exists", [False, True], ids=["no target", "old target"])
def test_conversion_stopped_at_any_step_leaves_the_target_whole(
    tmp_path: Path, make_checkpoint: Make, tree: Tree, fork: Fork, number: signal.Signals, exists: bool
) -> None:
    source = make_checkpoint(shards={"a.safetensors": ["model.layers.0.mlp.up_proj.weight"], "b.safetensors": [
        "model.layers.0.mlp.up_proj.weight_scale", "model.norm.weight"
    ]})  # fmt: skip
    beside = tmp_path / "out"
    beside.mkdir()
    target, count_file = beside / "target", tmp_path / "count"
    convert(source, tmp_path / "finished")
    new, original = tree(tmp_path / "finished"), tree(source)
    allowed = [new]
    if exists:
        convert(source, tmp_path / "earlier", rule="ceil")
        (tmp_path / "earlier" / "stale.txt").write_text("stale")
        allowed.append(tree(tmp_path / "earlier"))
    child = fork(lambda: count_file.write_text(str(convert_until(0, number, source, tmp_path / "x"))))
    assert os.waitpid(child, 0)[1] == 0

    stopped = seen_new = 0
    for step in range(1, int(count_file.read_text()) + 30):
        if exists:
            shutil.copytree(tmp_path / "earlier", target)
        status = os.waitpid(fork(lambda step=step: convert_until(step, number, source, target)), 0)[1]
        if os.waitstatus_to_exitcode(status) == 0:
            break
        stopped += 1
        assert os.waitstatus_to_exitcode(status) == (130 if number == signal.SIGINT else -number)
        if target.exists():
            assert tree(target) in allowed, f"step {step}"
            seen_new += tree(target) == new
        else:
            assert not exists, f"step {step}"
        if number == signal.SIGINT and (beside / ".target.p2q-work").exists():  # only for finished shards
            assert list((beside / ".target.p2q-work" / "records").glob("*.json")), f"step {step}"
        assert tree(source) == original
        convert(source, target, overwrite=True)
        assert tree(target) == new
        assert names(beside) == ["target"], f"step {step}"
        shutil.rmtree(target)
    assert stopped > 30
    assert 0 < seen_new < stopped  # some came after the renaming, most before
