"""What `p2q serve` refuses before vLLM starts. That it serves is in tests/end_to_end."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from p2q.serve.launch import server_command, server_environment

from p2q.manifest import MANIFEST_NAME

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


@pytest.mark.parametrize(
    "options",
    [
        ["--model", "other"],
        ["--model=other"],
        ["--quantization", "compressed-tensors"],
        ["-q", "compressed-tensors"],
        ["-qcompressed-tensors"],
        ["--additional-config", '{"p2q": {"evaluate": true}}'],
        ["--additional_config={}"],
        ["--additional-config.p2q.evaluate", "true"],
    ],
    ids=" ".join,
)
def test_serve_option_that_would_change_what_is_served_is_refused(
    refused: Refused, tiny_p2q: Path, options: list[str]
) -> None:
    told = refused("serve", tiny_p2q, "--port", "8000", *options)
    assert told.startswith("p2q serve sets this option itself; expected options of vLLM other than")
    assert f"got {options[0]}" in told


def test_serve_checkpoint_of_another_contract_is_refused(refused: Refused, tiny_p2q: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_p2q, copy)
    manifest = json.loads((copy / MANIFEST_NAME).read_text())
    (copy / MANIFEST_NAME).write_text(json.dumps({**manifest, "contract": 2}))
    assert "expected version 1, got version 2" in refused("serve", copy)


def test_server_command_puts_what_was_checked_last(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    command = server_command(tmp_path, "triton-order", ["--port", "1", "--config", "file.yaml"])
    settings = '{"p2q": {"kernel": "triton-order", "evaluate": false}}'
    assert command[-6:] == ["--model", str(tmp_path), "--quantization", "p2q", "--additional-config", settings]
    assert command[3:9] == ["--host", "127.0.0.1", "--port", "1", "--config", "file.yaml"]


def test_server_environment_holds_no_setting_of_p2q(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2Q_EVALUATE", "1")
    monkeypatch.setenv("P2Q_KERNEL", "onednn")
    assert not [name for name in server_environment() if name.startswith("P2Q_")]
