"""The main job on a real model, as a newcomer runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

from p2q.eval.prompts import PROMPTS
from p2q.eval.tokens import TokensReport, evaluate_tokens

from p2q.demo import unpack_model
from p2q.inspection import inspect

from .conftest import ROOT, Demo


def test_readme_names_the_two_commands_that_a_newcomer_pastes() -> None:
    blocks = re.findall(r"^```(?:bash|sh)?\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    commands = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    assert "make demo" in commands
    assert "make test" in commands


def test_kernels_disagree_before_conversion(demo: Demo) -> None:
    (before,) = demo.report.checkpoints[0].comparisons
    assert (before.first, before.second) == ("cutlass-order", "triton-order")
    assert len(before.layers) == 210
    assert before.agreeing < 210
    assert before.identical < len(before.streams) == len(PROMPTS) == 8
    assert demo.report.checkpoints[0].contract_layers == 0


def test_kernels_agree_in_every_layer_and_stream_after_conversion(demo: Demo) -> None:
    (after,) = demo.report.checkpoints[1].comparisons
    assert after.agreeing == len(after.layers) == 210
    assert after.identical == len(after.streams) == 8
    assert after.outputs > 10_000_000
    assert sum(stream.tokens for stream in after.streams) > 8 * 16
    assert demo.report.checkpoints[1].contract_layers == 210


def test_converted_model_still_knows_the_capital_of_france(demo: Demo) -> None:
    first = demo.report.checkpoints[1].comparisons[0].streams[0]
    assert first.prompt == "The capital of France is"
    assert first.text.startswith(" Paris")


def test_demo_prints_the_table_and_the_report_paths(demo: Demo) -> None:
    assert "210 of 210" in demo.output
    assert "8 of 8" in demo.output
    assert "build/demo/report.html" in demo.output
    assert "build/demo/report.json" in demo.output


def test_report_page_holds_every_answer_and_no_outside_resource(demo: Demo) -> None:
    page = demo.page.read_text()
    assert page.count("<tr><td><pre>") == 16
    assert "210 of 210" in page
    assert not re.search(r"(?:src|href)\s*=|@import|url\(", page)


def test_converted_checkpoint_satisfies_the_contract_and_its_digests(demo: Demo) -> None:
    found = inspect(demo.converted)
    assert found.contract_holds
    assert found.manifest is not None
    assert found.manifest.rule == "mse"
    assert found.changed == {}
    assert not inspect(demo.quantized).contract_holds


def test_second_demo_reuses_the_unpacked_model(demo: Demo) -> None:
    folder = demo.converted.with_name("SmolLM2-135M-Instruct")
    before = (folder / "model.safetensors").stat()
    assert unpack_model(folder) is False
    assert (folder / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns


def test_streams_of_the_same_formula_agree_on_any_scales(demo: Demo, tmp_path: Path) -> None:
    # A negative control: without biases, `p2q` and `cutlass-order` are one formula, so that whatever parts the streams
    # before conversion is the order of multiplication and not the engine.
    report = evaluate_tokens(
        {"w8a8": demo.quantized}, ["cutlass-order", "p2q"], PROMPTS, max_tokens=24, command="pytest"
    )
    assert report.checkpoints[0].passed


def test_evaluation_shows_a_kernel_that_is_not_exact_for_what_it_is(demo: Demo) -> None:
    # The saturating kernel runs as the thing under test: even power-of-two scales cannot make it agree.
    command = ["eval", "tokens", str(demo.converted), "--kernel", "p2q", "--kernel", "onednn", "--max-tokens", "4"]
    done = subprocess.run(
        [sys.executable, "-c", "from p2q.cli import main; main()", *command, "--json"],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr[-2000:]
    report = TokensReport.model_validate_json(done.stdout)
    assert "outputs differ" in report.inexact_kernels["onednn"]
    assert report.checkpoints[0].contract_layers == 210
    assert report.checkpoints[0].comparisons[0].agreeing < 210
