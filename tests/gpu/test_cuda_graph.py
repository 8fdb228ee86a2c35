"""p2q's op and vLLM's default engine settings on a GPU: CUDA graphs capture it, and a replay gives the same bits."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from p2q.convert import convert
from p2q.demo import packaged_weights, unpack_model
from p2q.errors import CheckpointError
from p2q.kernels import KERNELS, get_kernel
from p2q.ops import int8_linear
from p2q.quantize import quantize

SCRIPT = """
import sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=512, gpu_memory_utilization=0.3)
(answer,) = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))
print("answer:" + answer.outputs[0].text.replace(chr(10), " "))
"""


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if "cuda" in kernel.devices])
def test_op_is_captured_in_a_graph_and_replays_to_the_same_bits(name: str, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q_w = torch.randint(-127, 128, (96, 576), generator=generator).to(torch.int8).cuda()
    s_w = torch.ldexp(torch.ones(96), torch.randint(-9, -4, (96,), generator=generator)).cuda()
    bias = torch.randn(96, generator=generator).to(torch.bfloat16).cuda() if with_bias else None
    x = torch.randn(8, 576, generator=generator).to(torch.bfloat16).cuda()
    prepared = get_kernel(name).prepare(q_w, s_w, torch.bfloat16)
    int8_linear(x, prepared, bias, name, contract_bias=True)  # warm-up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = int8_linear(x, prepared, bias, name, contract_bias=True)
    x.copy_(torch.randn(8, 576, generator=generator).to(torch.bfloat16))
    graph.replay()
    assert torch.equal(captured, int8_linear(x, prepared, bias, name, contract_bias=True))


def test_engine_with_its_default_settings_serves_a_converted_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM with CUDA kernels")
    try:
        packaged_weights()
    except CheckpointError as error:
        pytest.skip(str(error))
    unpack_model(tmp_path / "bf16")
    quantize(tmp_path / "bf16", tmp_path / "w8a8")
    convert(tmp_path / "w8a8", tmp_path / "p2q")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "p2q")], capture_output=True, text=True, cwd=tmp_path
    )
    assert "answer: Paris" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
