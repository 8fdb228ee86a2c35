from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from p2q.eval.engine import LayerAgreement, RunResult, RunSpec, Stream
from p2q.eval.prompts import read_prompts
from p2q.eval.tokens import (
    CheckpointResult,
    Comparison,
    Divergence,
    StreamVerdict,
    TokensReport,
    evaluate_tokens,
)

from p2q.errors import EngineError

P2Q = Callable[..., Any]
Refused = Callable[..., str]


def report(*, part: bool) -> TokensReport:
    divergence = Divergence(position=1, first="[b]a", second=None) if part else None
    stream = StreamVerdict(prompt="p", text="t", other_text="u", tokens=2, divergence=divergence)
    comparison = Comparison(first="p2q", second="triton-order", streams=[stream], layers={"l": 0}, outputs=8)
    result = CheckpointResult(label="c", path="c", digest=None, contract_layers=1, layers=1, comparisons=[comparison])
    return TokensReport(
        kernels=["p2q", "triton-order"],
        inexact_kernels={},
        max_tokens=2,
        environment={},
        command="p2q eval tokens c",
        checkpoints=[result],
    )


@pytest.mark.parametrize("part", [False, True], ids=["identical", "they part"])
def test_tokens_json_is_one_object_and_the_code_says_whether_streams_part(
    monkeypatch: pytest.MonkeyPatch, p2q: P2Q, tiny_p2q: Path, part: bool
) -> None:
    made = report(part=part)
    monkeypatch.setattr("p2q.cli.evaluate.evaluate_tokens", lambda *_arguments, **_options: made)
    found = p2q("eval", "tokens", tiny_p2q, "--json")
    assert (found.code, found.err) == (int(part), "")
    assert found.json() == made.model_dump(mode="json")
    text = p2q("eval", "tokens", tiny_p2q)
    assert text.code == int(part)
    assert ("c: prompt 1 parts at token 2: '[b]a' (p2q), None (triton-order)" in text.out) == part


def test_tokens_path_that_is_no_checkpoint_is_refused_before_an_engine_starts(
    refused: Refused, tmp_path: Path, tiny_p2q: Path
) -> None:
    told = refused("eval", "tokens", tiny_p2q, tmp_path / "nothing")
    assert told == f"{tmp_path / 'nothing'}: not a checkpoint directory; expected a directory, got nothing there"


def test_tokens_checkpoint_that_is_not_w8a8_is_refused_before_an_engine_starts(
    refused: Refused, tiny_llama: Path
) -> None:
    assert refused("eval", "tokens", tiny_llama).startswith(f"{tiny_llama / 'config.json'}: not quantized; expected")


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        (["p2q"], "nothing to compare; expected two or more different kernels, got p2q"),
        (["p2q", "p2q"], "nothing to compare; expected two or more different kernels, got p2q, p2q"),
        (["p2q", "triton-order", "p2q"], "nothing to compare; expected two or more different kernels, got p2q, "),
        (["p2q", "nope"], "unknown kernel; expected one of "),
    ],
    ids=" ".join,
)
def test_tokens_kernels_that_cannot_be_compared_are_refused(
    refused: Refused, tiny_p2q: Path, kernels: list[str], reason: str
) -> None:
    options = [option for kernel in kernels for option in ("--kernel", kernel)]
    assert refused("eval", "tokens", tiny_p2q, *options).startswith(reason)


def test_tokens_prompts_that_cannot_be_read_are_refused(refused: Refused, tiny_p2q: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    assert refused("eval", "tokens", tiny_p2q, "--prompts", path).startswith(f"{path}: not a readable text file")
    path.write_text(" \n\n")
    assert refused("eval", "tokens", tiny_p2q, "--prompts", path).startswith(f"{path}: no prompts")


def test_tokens_prompts_are_lines_and_nothing_else_ends_one(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\u2028still one\x0c\r\ntwo\u0085too\n \n".encode())
    assert read_prompts(path) == ["one\u2028still one\x0c", "two\u0085too"]


def test_tokens_same_checkpoint_twice_is_refused(refused: Refused, tiny_p2q: Path) -> None:
    again = tiny_p2q.parent / ".." / tiny_p2q.parent.name / tiny_p2q.name
    assert refused("eval", "tokens", tiny_p2q, again).startswith("a checkpoint is given twice")


def test_tokens_report_folder_that_cannot_be_made_is_refused_before_an_engine_starts(
    refused: Refused, tiny_p2q: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2q.cli.evaluate.evaluate_tokens", lambda *_a, **_o: pytest.fail("an engine was started"))
    told = refused("eval", "tokens", tiny_p2q, "--report", "/proc/x")
    assert told.startswith("/proc/x: the report cannot be written")
    assert "the path is not text" in refused("eval", "tokens", tiny_p2q, "--report", "/tmp/\udcff")


def test_tokens_names_that_look_like_markup_are_printed_as_they_are(
    monkeypatch: pytest.MonkeyPatch, p2q: P2Q, tiny_p2q: Path, tmp_path: Path
) -> None:
    made = report(part=True)
    made.checkpoints[0].label = "m[/x]"

    def evaluate(*_arguments: object, stage: Callable[[str], None], **_options: object) -> TokensReport:
        stage("m[/x]: p2q, starting")
        return made

    monkeypatch.setattr("p2q.cli.evaluate.evaluate_tokens", evaluate)
    found = p2q("eval", "tokens", tiny_p2q, "--report", tmp_path / "out[v2]")
    assert found.code == 1
    assert "m[/x]" in found.out
    assert "m[/x]: p2q, starting" in found.err
    assert str(tmp_path / "out[v2]" / "report.html") in found.out
    assert (tmp_path / "out[v2]" / "report.json").is_file()


def run(spec: RunSpec, layers: dict[str, LayerAgreement], layer_count: int) -> RunResult:
    stream = Stream(tokens=[1], pieces=["a"], text="a", finish_reason="length")
    compared = dict.fromkeys(spec.compare_with, layers)
    return RunResult(
        spec=spec, streams=[stream], layers=compared, layer_count=layer_count, proved_layers=layer_count, environment={}
    )


@pytest.mark.parametrize(
    ("layers", "count"),
    [({}, 0), ({}, 2), ({"l": LayerAgreement(outputs=8)}, 2), ({"l": LayerAgreement()}, 1)],
    ids=["none", "none of two", "one of two", "one that never ran"],
)
def test_tokens_layers_that_were_not_compared_are_an_error_and_no_agreement(
    monkeypatch: pytest.MonkeyPatch, tiny_p2q: Path, layers: dict[str, LayerAgreement], count: int
) -> None:
    monkeypatch.setattr("p2q.eval.tokens.run_engine", lambda spec, **_options: run(spec, layers, count))
    with pytest.raises(EngineError, match="not every layer was compared"):
        evaluate_tokens({"c": tiny_p2q}, ["p2q", "triton-order"], ["x"], max_tokens=1, command="")
