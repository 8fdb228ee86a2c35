from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from p2q.eval.tokens import CheckpointResult, Comparison, Divergence, StreamVerdict, TokensReport

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
