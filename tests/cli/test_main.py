import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from p2q.cli import app, main
from p2q.errors import CheckFailed, P2QError

P2Q = Callable[..., Any]


def commands() -> list[str]:
    """Every command as it is typed, from the application itself."""

    def names(group: typer.Typer, before: str) -> list[str]:
        found = [f"{before}{command.name}" for command in group.registered_commands]
        for inner in group.registered_groups:
            assert inner.typer_instance is not None
            found += names(inner.typer_instance, f"{before}{inner.name} ")
        return found

    return names(app, "")


def plain(text: str) -> str:
    """Help without its boxes, so that a line that was wrapped is whole again."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)


def test_commands_are_those_of_the_design() -> None:
    assert {"convert", "quantize", "inspect", "doctor", "serve", "eval tokens", "demo"} <= set(commands())


@pytest.mark.parametrize("command", commands())
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_of_each_command_has_an_example(p2q: P2Q, command: str, option: str) -> None:
    found = p2q(*command.split(), option)
    assert (found.code, found.err) == (0, "")
    assert f"Example: p2q {command}" in plain(found.out)


def test_help_of_the_whole_lists_every_command(p2q: P2Q) -> None:
    found = p2q("--help")
    assert found.code == 0
    assert all(f" {command.split()[0]} " in plain(found.out) for command in commands())


@pytest.mark.parametrize("command", [command for command in commands() if command != "serve"])  # serve hands them on
def test_unknown_option_is_bad_input(p2q: P2Q, tmp_path: Path, command: str) -> None:
    arguments = {"convert": 2, "quantize": 2, "inspect": 1, "eval tokens": 1}.get(command, 0)
    found = p2q(*command.split(), *[tmp_path / str(n) for n in range(arguments)], "--no-such-option")
    assert (found.code, found.out) == (2, "")
    assert "No such option: --no-such-option" in plain(found.err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["convert"],
        ["convert", "a"],
        ["convert", "a", "b", "c"],
        ["convert", "a", "b", "--rule", "floor"],
        ["convert", "a", "b", "--rule"],
        ["quantize", "a", "b", "--scales", "max"],
        ["inspect"],
    ],
    ids=" ".join,
)
def test_wrong_use_is_bad_input(p2q: P2Q, arguments: list[str]) -> None:
    found = p2q(*arguments)
    assert (found.code, found.out) == (2, "")
    assert "Error" in found.err


# What main makes of exceptions


def raised(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def command(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr("p2q.cli.app", command)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (P2QError("", file="a", tensor="b", expected="c", got="d", hint="e"), 2, "error: a, b: ; expected c, got d. e"),
        (P2QError("wrong", got="d"), 2, "error: wrong; got d"),
        (CheckFailed("differs"), 1, "error: differs"),
        (P2QError("[b]x[/b] :smile: [/no] \\[", file="new\nline"), 2, "error: new line: [b]x[/b] :smile: [/no] \\["),
        (P2QError("x" * 500), 2, "error: " + "x" * 500),
        (PermissionError(13, "Permission denied", "a/b"), 2, "error: a/b: Permission denied"),
        (OSError("odd"), 2, "error: odd"),
        (SystemExit(130), 130, "interrupted; nothing was left half-written"),
    ],
)  # fmt: skip
def test_error_is_one_line_as_it_is(
    monkeypatch: pytest.MonkeyPatch, p2q: P2Q, error: BaseException, code: int, line: str
) -> None:
    raised(monkeypatch, error)
    found = p2q("convert")
    assert (found.code, found.out, found.err) == (code, "", line + "\n")


def test_error_of_our_own_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    raised(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main()


@pytest.mark.parametrize("usable", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_doctor_json_is_one_object_and_the_code_says_whether_it_can_serve(
    monkeypatch: pytest.MonkeyPatch, p2q: P2Q, usable: bool, exact: bool
) -> None:
    from p2q.cli import doctor

    kernel = {"kernel": "p2q", "device": "cpu", "formula": "f", "runs": True, "exact": exact, "reason": "r"}
    found = {
        "p2q": "0",
        "contract": 1,
        "python": "3",
        "torch": "2",
        "cpu": {"name": "c", "cores": 1, "flags": []},
        "gpus": [],
        "vllm": {"version": "1", "usable": usable, "reason": "r"},
        "default_kernel": "p2q",
        "kernels": [kernel],
    }
    monkeypatch.setattr(doctor, "examine", lambda: found)
    outcome = p2q("doctor", "--json")
    assert json.loads(outcome.out) == found
    assert (outcome.code, outcome.err) == (0 if usable and exact else 1, "")
    assert p2q("doctor").code == outcome.code
