"""The demo's evaluation on a GPU: real vLLM, real weights. Needs the packaged model."""

from pathlib import Path

import pytest
from p2q.eval.prompts import PROMPTS
from p2q.eval.report import prepare_folder, write_report
from p2q.eval.tokens import evaluate_tokens

from p2q.convert import convert
from p2q.demo import packaged_weights, unpack_model
from p2q.errors import CheckpointError
from p2q.quantize import quantize

pytest.importorskip("vllm", reason="needs vLLM with CUDA kernels")


def test_streams_and_layers_agree_after_conversion_on_cuda(tmp_path: Path) -> None:
    try:
        packaged_weights()
    except CheckpointError as error:
        pytest.skip(str(error))
    unpack_model(tmp_path / "bf16")
    quantize(tmp_path / "bf16", tmp_path / "w8a8")
    convert(tmp_path / "w8a8", tmp_path / "p2q")
    report = evaluate_tokens(
        {"before": tmp_path / "w8a8", "after": tmp_path / "p2q"},
        ["cutlass-order", "triton-order"],
        PROMPTS,
        max_tokens=64,
        command="pytest",
    )
    prepare_folder(tmp_path / "report")
    write_report(report, tmp_path / "report")
    for checkpoint in report.checkpoints:
        pair = checkpoint.comparisons[0]
        layers, streams = len(pair.layers), len(pair.streams)
        print(f"{checkpoint.label}: {pair.agreeing}/{layers} layers, {pair.identical}/{streams} streams")
    before, after = (checkpoint.comparisons[0] for checkpoint in report.checkpoints)
    assert len(before.layers) == 210
    assert before.agreeing < 210
    assert after.passed
    assert "Paris" in after.streams[0].text
