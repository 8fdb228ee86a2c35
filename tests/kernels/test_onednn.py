"""oneDNN's int8 product on a CPU without VNNI saturates in int16: p2q must refuse it there, by name."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest
import torch

from p2q.errors import KernelError
from p2q.kernels import get_kernel
from p2q.kernels.probe import probe, require_exact

OPERANDS = [(x, w) for x in (127, -127) for w in (127, -127, -128)]

IN_A_PROCESS = f"""
import json
import torch
from p2q.errors import KernelError
from p2q.kernels import get_kernel
from p2q.kernels.probe import require_exact

kernel, one = get_kernel("onednn"), torch.ones(1)
sums = []
for x, w in {OPERANDS}:
    q_x, q_w = (torch.full((1, 64), value, dtype=torch.int8) for value in (x, w))
    y = kernel.apply(kernel.prepare(q_w, one, torch.float32), q_x, one.reshape(1, 1), None, torch.float32)
    sums.append(y.item())
try:
    require_exact("onednn")
    refusal = None
except KernelError as error:
    refusal = str(error)
print(json.dumps({{"sums": sums, "refusal": refusal}}))
"""


@pytest.fixture(autouse=True)
def onednn_runs_here() -> None:
    obstacle = get_kernel("onednn").obstacle(torch.device("cpu"))
    if obstacle is not None:
        pytest.skip(obstacle)


def test_onednn_held_to_avx2_is_inexact_and_refused_by_name() -> None:
    if platform.machine() != "x86_64":
        pytest.skip(f"ONEDNN_MAX_CPU_ISA=AVX2 is for x86-64 CPUs, this one is {platform.machine()}")
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["sums"] != [64 * x * w for x, w in OPERANDS]
    assert found["refusal"].startswith("kernel onednn is not exact on this machine: ")


@pytest.mark.parametrize(("x", "w"), OPERANDS)
def test_onednn_full_scale_rows_equal_the_integer_sum_or_the_kernel_is_refused(x: int, w: int) -> None:
    if not probe("onednn").exact:
        with pytest.raises(KernelError, match="kernel onednn is not exact on this machine: "):
            require_exact("onednn")
        return
    kernel = get_kernel("onednn")
    q_x, q_w = (torch.full((1, 64), value, dtype=torch.int8) for value in (x, w))
    prepared = kernel.prepare(q_w, torch.ones(1), torch.float32)
    assert kernel.apply(prepared, q_x, torch.ones(1, 1), None, torch.float32).tolist() == [[64 * x * w]]
