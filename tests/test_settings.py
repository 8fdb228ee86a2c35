"""Where the plug-in's settings come from."""

from __future__ import annotations

from typing import Any

import pytest

from p2q.errors import KernelError, P2QError
from p2q.kernels import DEFAULT_KERNEL, KERNELS
from p2q.settings import Settings, read_settings


def test_settings_without_anything_are_the_defaults() -> None:
    assert read_settings({}, {}) == Settings(kernel=DEFAULT_KERNEL, evaluate=False)


@pytest.mark.parametrize("name", KERNELS)
def test_settings_take_each_kernel_from_either_place(name: str) -> None:
    assert read_settings({"kernel": name}, {}).kernel == name
    assert read_settings({}, {"P2Q_KERNEL": name}).kernel == name


def test_settings_engine_option_wins_over_environment() -> None:
    environment = {"P2Q_KERNEL": "triton-order", "P2Q_EVALUATE": "0"}
    both = read_settings({"kernel": "cutlass-order", "evaluate": True}, environment)
    assert both == Settings(kernel="cutlass-order", evaluate=True)
    assert read_settings({"evaluate": True}, environment) == Settings(kernel="triton-order", evaluate=True)


def test_settings_engine_option_hides_a_bad_environment() -> None:
    assert read_settings({"kernel": "p2q"}, {"P2Q_KERNEL": "marlin"}).kernel == "p2q"


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("0", False), ("false", False)])
def test_settings_evaluate_is_read_from_text(text: str, value: bool) -> None:
    assert read_settings({}, {"P2Q_EVALUATE": text}).evaluate is value


def test_settings_read_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2Q_KERNEL", "triton-order")
    monkeypatch.delenv("P2Q_EVALUATE", raising=False)
    assert read_settings({}) == Settings(kernel="triton-order")


def test_settings_ignore_other_variables() -> None:
    assert read_settings({}, {"P2Q_VENV": ".venv", "KERNEL": "triton-order"}) == Settings()


@pytest.mark.parametrize(
    ("options", "environment", "named"),
    [
        ({"kernal": "p2q"}, {}, "kernal"),
        ({"evaluate": "perhaps"}, {}, "evaluate"),
        ({"kernel": 3}, {}, "kernel"),
        ({"kernel": None}, {}, "kernel"),
        ({}, {"P2Q_EVALUATE": "perhaps"}, "evaluate"),
    ],
    ids=["unknown key", "no truth value", "a number", "nothing", "no truth value in the environment"],
)
def test_settings_bad_option_is_refused_by_name(
    options: dict[str, Any], environment: dict[str, str], named: str
) -> None:
    with pytest.raises(P2QError, match=f"bad p2q option {named}: .*expected options kernel, evaluate"):
        read_settings(options, environment)


@pytest.mark.parametrize(("options", "environment"), [({"kernel": "marlin"}, {}), ({}, {"P2Q_KERNEL": "marlin"})])
def test_settings_unknown_kernel_is_refused_with_the_known_ones(
    options: dict[str, str], environment: dict[str, str]
) -> None:
    with pytest.raises(KernelError, match=f"expected one of {', '.join(KERNELS)}, got 'marlin'"):
        read_settings(options, environment)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read_settings({}, {}).kernel = "onednn"


def test_empty_variables_count_as_not_set() -> None:
    assert read_settings({}, {"P2Q_KERNEL": "", "P2Q_EVALUATE": ""}) == read_settings({}, {})
