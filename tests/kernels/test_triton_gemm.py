"""p2q's Triton kernel in Triton's interpreter on a CPU, at shapes that are not multiples of its tiles.

The interpreter is chosen when the kernel is defined, hence a process of its own. It truncates where hardware rounds to
bfloat16, so that outputs here are float32 and float16; tests/gpu covers bfloat16.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch
from p2q import contract
from p2q.kernels.triton_gemm import int8_gemm
k, compared = int(sys.argv[1]), 0
for n in (1, 15, 16, 17, 576, 3420):
    random = torch.Generator().manual_seed(k * 1_009 + n)
    q_x = torch.randint(-127, 128, (33, k), generator=random).to(torch.int8)
    q_w = torch.randint(-128, 128, (n, k), generator=random).to(torch.int8)
    q_x[0], q_w[-1] = 127, -128
    s_x = torch.rand(33, 1, generator=random) / 64
    s_w = torch.ldexp(torch.ones(n), torch.randint(-18, -9, (n,), generator=random))
    acc = contract.accumulate(q_x, q_w)
    for dtype in (torch.float32, torch.float16):
        expected = contract.epilogue(acc, s_x, s_w, dtype)
        assert torch.isfinite(expected).all()
        for m in (1, 16, 17, 33) if n * k < 600_000 else (17,):
            got = int8_gemm(q_x[:m], q_w, s_x[:m], s_w, dtype)
            assert torch.equal(got.view(torch.uint8), expected[:m].view(torch.uint8)), (m, n, k, dtype)
            compared += 1
print("compared", compared)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("k", [1, 15, 16, 17, 576, 3420])
def test_triton_kernel_interpreted_equals_the_contract(k: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(k)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "compared" in done.stdout
