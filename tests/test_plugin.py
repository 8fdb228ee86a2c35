"""Which checkpoints the plug-in takes, without starting an engine (tests/end_to_end starts them)."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2q.errors import CheckpointError, ContractError, P2QError, SchemeError
from p2q.manifest import MANIFEST_NAME

pytest.importorskip("vllm", reason="needs vLLM")

COMPRESSED = {"quant_method": "compressed-tensors"}


def chosen(folder: Path | str, user: str | None = None, quantization: dict[str, str] | None = None) -> str | None:
    from p2q.plugin import P2QConfig

    model = SimpleNamespace(name_or_path=str(folder))
    return P2QConfig.override_quantization_method(quantization or COMPRESSED, user, hf_config=model)


def test_checkpoint_with_a_manifest_is_taken(tiny_p2q: Path) -> None:
    assert chosen(tiny_p2q) == "p2q"


@pytest.mark.parametrize("folder", ["", "org/model-of-a-hub", "/nothing/there"])
def test_checkpoint_without_a_manifest_is_left_to_vllm(
    folder: str, tiny_p2q: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_p2q)  # a model without a name is not the current directory
    assert chosen(folder) is None


def test_checkpoint_without_a_manifest_is_taken_when_asked_for(tiny_w8a8: Path) -> None:
    assert chosen(tiny_w8a8) is None
    assert chosen(tiny_w8a8, "p2q") == "p2q"


def test_checkpoint_with_a_manifest_is_left_to_vllm_when_its_method_is_asked_for(tiny_p2q: Path) -> None:
    assert chosen(tiny_p2q, "compressed-tensors") is None


@pytest.mark.parametrize("user", [None, "p2q"])
def test_other_quantizations_are_never_taken(tiny_p2q: Path, user: str | None) -> None:
    assert chosen(tiny_p2q, user, {"quant_method": "gptq"}) is None


@pytest.mark.parametrize("user", [None, "p2q"])
def test_manifest_of_another_contract_is_refused(tiny_p2q: Path, tmp_path: Path, user: str | None) -> None:
    manifest = json.loads((tiny_p2q / MANIFEST_NAME).read_text())
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**manifest, "contract": 99}))
    with pytest.raises(ContractError, match="expected version 1, got version 99"):
        chosen(tmp_path, user)


def test_broken_manifest_is_refused_and_not_taken_for_none(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_text("{")
    with pytest.raises(CheckpointError, match="not a p2q manifest"):
        chosen(tmp_path)


def test_checkpoint_that_is_not_quantized_is_refused_by_name() -> None:
    from p2q.plugin import P2QConfig

    with pytest.raises(SchemeError, match="the checkpoint is not quantized"):
        P2QConfig()


@pytest.mark.parametrize(
    ("arrived", "missing"),
    [
        ({None}, None),
        ({"q", "k", "v"}, None),
        ({"q", "v"}, "a.k_proj.weight"),
        (set(), "a.q_proj.weight"),
    ],
)
def test_shard_that_never_arrived_is_named(arrived: set[str | None], missing: str | None) -> None:
    from p2q.plugin import _require_all

    shards = ["a.q_proj", "a.k_proj", "a.v_proj"]
    if missing is None:
        _require_all(arrived, shards, "weight", 3)
        return
    with pytest.raises(ContractError, match=f"{missing}: missing from the checkpoint"):
        _require_all(arrived, shards, "weight", 3)


def test_loader_notes_every_shard_it_was_given() -> None:
    from p2q.loading import noting

    loaded, arrived = [], set()
    load = noting(lambda *given, **named: loaded.append((given, named)), arrived)
    load("p", "t")
    load("p", "t", "q")
    load("p", "t", loaded_shard_id=(0, 1))
    assert arrived == {None, "q", 0, 1}
    assert loaded == [(("p", "t"), {}), (("p", "t", "q"), {}), (("p", "t"), {"loaded_shard_id": (0, 1)})]


@pytest.mark.parametrize("options", ["triton-order", None, ["kernel"]])
def test_engine_option_that_is_no_mapping_is_refused(monkeypatch: pytest.MonkeyPatch, options: object) -> None:
    from p2q import vllm_api

    engine = SimpleNamespace(additional_config={"p2q": options})
    monkeypatch.setattr(vllm_api, "get_current_vllm_config", lambda: engine)
    with pytest.raises(P2QError, match="expected a mapping of options"):
        vllm_api.engine_options()
