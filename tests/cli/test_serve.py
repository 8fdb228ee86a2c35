"""What `p2q serve` refuses before vLLM starts. That it serves is in tests/end_to_end."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_arguments: object) -> None:
        pytest.fail("the server was started")

    monkeypatch.setattr("p2q.cli.serve.launch", launch)


def test_serve_path_that_is_no_checkpoint_is_refused(refused: Refused, tmp_path: Path) -> None:
    assert refused("serve", tmp_path / "nothing").startswith(f"{tmp_path / 'nothing'}: not a checkpoint directory")


def test_serve_checkpoint_that_was_not_converted_is_refused(refused: Refused, tiny_w8a8: Path) -> None:
    told = refused("serve", tiny_w8a8, "--port", "8000")
    assert told.startswith(f"{tiny_w8a8}, model.layers.0.mlp.down_proj: the contract does not hold: ")
    assert told.endswith("`p2q convert` makes a checkpoint that satisfies it")


def test_serve_checkpoint_that_was_changed_is_refused(refused: Refused, tiny_p2q: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_p2q, copy)
    (copy / "chat_template.jinja").write_text("another")
    assert refused("serve", copy) == (
        f"{copy / 'chat_template.jinja'}: the checkpoint is not what its manifest says; "
        "expected the manifest's SHA-256, got changed"
    )


def test_serve_unknown_kernel_is_refused(refused: Refused, tiny_p2q: Path) -> None:
    assert refused("serve", tiny_p2q, "--kernel", "nope").startswith("unknown kernel; expected one of ")
