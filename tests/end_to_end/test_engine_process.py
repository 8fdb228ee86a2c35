"""An engine's process ends with the command that started it, however that ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import Demo

PATIENCE = 120


def engines(model: Path) -> list[str]:
    """Process ids of engines whose specification names the model."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            if b"p2q.eval.engine" in arguments and str(model) in Path(os.fsdecode(arguments[3])).read_text():
                found.append(process.name)
        except (OSError, IndexError):
            continue
    return found


def wait_for(condition: bool, model: Path) -> list[str]:
    """The engines, once there are some (or none)."""
    deadline = time.monotonic() + PATIENCE
    while bool(found := engines(model)) != condition and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_engine_ends_with_the_evaluation(demo: Demo, tmp_path: Path, number: signal.Signals) -> None:
    model = tmp_path / "model"
    model.symlink_to(demo.converted)
    command = [sys.executable, "-c", "from p2q.cli import main; main()", "eval", "tokens", str(model)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        (engine,) = wait_for(True, model)
        process.send_signal(number)
    assert process.returncode == (-number if number == signal.SIGKILL else 130)
    deadline = time.monotonic() + PATIENCE
    while (Path("/proc") / engine / "cmdline").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not (Path("/proc") / engine / "cmdline").exists()
