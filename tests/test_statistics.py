"""Statistics of activations, against hooks on the model that add up the same."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from p2q import statistics
from p2q.checkpoint import ShardWriter, open_checkpoint
from p2q.contract import quantize_per_token
from p2q.errors import CheckpointError, P2QError, SchemeError, TargetError
from p2q.scheme import quantized_layers
from p2q.statistics import Collected, Statistics, collect

P2Q = Callable[..., Any]
Make = Callable[..., Path]
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
WORDS = [f"w{number}" for number in range(100)]


@pytest.fixture(scope="module")
def source(tiny_w8a8: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny W8A8 Llama with a tokenizer of words."""
    return add_tokenizer(Path(shutil.copytree(tiny_w8a8, tmp_path_factory.mktemp("statistics") / "w8a8")), WORDS)


def add_tokenizer(path: Path, words: list[str]) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate([*words, "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 words."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(WORDS[number**2 % 97] for number in range(400)))
    return path


@pytest.fixture(scope="module")
def stats(source: Path, text: Path) -> Path:
    """Of six windows of 50 words."""
    target = source.with_name("stats")
    done = collect(source, target, text, windows=6, window=50)
    assert done == Collected(windows=6, tokens=300, layers=14, groups=8)
    return target


def opened(stats: Path, source: Path) -> Statistics:
    checkpoint = open_checkpoint(source)
    return Statistics(stats, checkpoint, quantized_layers(checkpoint))


def test_statistics_equal_what_hooks_add_up(source: Path, stats: Path, text: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model(torch.zeros(1, 1, dtype=torch.int64))  # decompresses it
    layers = quantized_layers(open_checkpoint(source))
    sums: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[..., tuple[torch.Tensor]]:
        def before(_module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            levels, scale = quantize_per_token(args[0][0])
            rows = levels.double() * scale.double()
            sums[name] = sums.get(name, torch.zeros(())) + rows.t() @ rows
            return ((levels * scale).unsqueeze(0),)

        return before

    for layer in layers:
        model.get_submodule(layer.name).register_forward_pre_hook(hook(layer.name))
    ids = torch.tensor([int(word[1:]) for word in text.read_text().split()])
    with torch.no_grad():
        for piece in ids[:300].split(50):
            model(piece.reshape(1, -1))
    found = opened(stats, source)
    for layer in layers:
        hessian = found.of(layer)
        assert hessian.dtype == torch.float64
        torch.testing.assert_close(hessian, sums[layer.name], rtol=1e-5, atol=1e-6 * float(sums[layer.name].max()))


def test_statistics_are_stored_once_for_layers_with_the_same_input(source: Path, stats: Path) -> None:
    with safe_open(stats, framework="pt") as file:
        about = json.loads(file.metadata()["p2q"])
        names = set(file.keys())
    groups = about["layers"]
    assert {groups[f"{ATTENTION}.{part}_proj"] for part in "qkv"} == {f"{ATTENTION}.q_proj"}
    assert groups[f"{MLP}.gate_proj"] == groups[f"{MLP}.up_proj"] != groups[f"{MLP}.down_proj"]
    assert set(groups.values()) == names
    assert (len(groups), len(names)) == (14, 8)
    assert (about["windows"], about["tokens"]) == (6, 300)
    assert all(tensor.dtype == torch.float32 for tensor in load_file(stats).values())
    assert sorted(path.name for path in stats.parent.iterdir()) == ["stats", "w8a8"]


def test_collect_uses_what_there_is_of_a_short_text_and_tells_progress(
    source: Path, text: Path, tmp_path: Path
) -> None:
    told: list[tuple[int, int]] = []
    done = collect(source, tmp_path / "stats", text, window=150, progress=lambda *counts: told.append(counts))
    assert (done.windows, done.tokens) == (6, 384)  # of 64 tokens: the model has no more positions
    assert told == [(number, 6) for number in range(1, 7)]


def test_collect_refuses_a_text_without_one_window(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("w1 w2 w3")
    with pytest.raises(P2QError, match="text: the text is too short; expected 20 tokens or more, got 3"):
        collect(source, tmp_path / "stats", tmp_path / "text", window=20)
    with pytest.raises(P2QError, match="the text cannot be read"):
        collect(source, tmp_path / "stats", tmp_path / "nothing")
    (tmp_path / "text").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(P2QError, match=r"the text cannot be read .* expected a file in UTF-8"):
        collect(source, tmp_path / "stats", tmp_path / "text")
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_collect_refuses_a_checkpoint_without_a_tokenizer(tiny_w8a8: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer that can be loaded"):
        collect(tiny_w8a8, tmp_path / "stats", text)


def test_collect_refuses_the_tokenizer_of_another_model(tiny_w8a8: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_w8a8, tmp_path / "w8a8"))
    add_tokenizer(source, [f"w{number}" for number in range(300)])
    (tmp_path / "text").write_text("w5 w250 " * 40)
    with pytest.raises(CheckpointError, match="the tokenizer is not the model's; expected tokens below 128, got 250"):
        collect(source, tmp_path / "stats", tmp_path / "text")


def test_collect_refuses_a_target_that_exists_unless_told(source: Path, text: Path, tmp_path: Path) -> None:
    target = tmp_path / "stats"
    target.write_text("mine")
    with pytest.raises(TargetError, match=r"the target exists\. Give --overwrite"):
        collect(source, target, text, window=50)
    assert target.read_text() == "mine"
    collect(source, target, text, windows=1, window=50, overwrite=True)
    opened(target, source)


def test_collect_refuses_targets_that_cannot_be(source: Path, text: Path, tmp_path: Path) -> None:
    for target in (tmp_path, source / "stats", tmp_path / "no" / "stats"):
        with pytest.raises(TargetError):
            collect(source, target, text)


def test_collect_leaves_nothing_when_it_is_stopped(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(source, tmp_path / "stats", text, windows=1, window=50, progress=stop)
    monkeypatch.setattr(ShardWriter, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        collect(source, tmp_path / "stats", text, windows=1, window=50)
    monkeypatch.setattr(ShardWriter, "write", lambda *_: os.stat("/nowhere"))
    with pytest.raises(TargetError):
        collect(source, tmp_path / "stats", text, windows=1, window=50)
    assert not list(tmp_path.iterdir())


def test_collect_refuses_activations_that_are_not_finite(source: Path, text: Path, tmp_path: Path) -> None:
    bad = Path(shutil.copytree(source, tmp_path / "bad"))
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][3] = float("inf")
    save_file(tensors, bad / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1.*expected finite sums of squares"):
        collect(bad, tmp_path / "stats", text, windows=1, window=50)


def test_collect_refuses_layers_that_no_token_reached(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = statistics._Inputs.hook

    def hook(self: Any, name: str) -> Any:
        real = before(self, name)
        return (lambda *_: None) if name.startswith("model.layers.1") else real

    monkeypatch.setattr(statistics._Inputs, "hook", hook)
    reached = "no token of the text reached the layer"
    with pytest.raises(P2QError, match=rf"model\.layers\.1\.mlp\.down_proj, .* and 4 more: {reached}"):
        collect(source, tmp_path / "stats", text, windows=1, window=50)


def test_collect_refuses_experts_in_one_tensor(make_checkpoint: Make, w8a8: Any, text: Path, tmp_path: Path) -> None:
    w8a8[f"{MLP}.up_proj.weight"] = torch.ones(2, 6, 8, dtype=torch.int8)
    w8a8[f"{MLP}.up_proj.weight_scale"] = torch.ones(2, 6, 1)
    with pytest.raises(SchemeError, match=f"{MLP}.up_proj.weight: statistics of experts in one tensor"):
        collect(make_checkpoint(w8a8), tmp_path / "stats", text)


def test_inputs_that_are_shared_now_and_then_are_refused() -> None:
    inputs, one, other, module = statistics._Inputs(), torch.ones(1, 4), torch.ones(1, 4), torch.nn.Identity()
    for name, x in (("a", one), ("b", one), ("a", other)):
        inputs.hook(name)(module, (x,))
    checkpoint: Any = None
    with pytest.raises(SchemeError, match="b: the layer shares only some inputs with a"):
        inputs.check(checkpoint, [], Path("text"))
    with pytest.raises(SchemeError, match="b: the layer shares its input with different ones"):
        inputs.hook("b")(module, (one,))


def test_statistics_of_another_checkpoint_are_refused(
    source: Path, stats: Path, tiny_p2q: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="the statistics of another checkpoint"):
        opened(stats, tiny_p2q)
    for content in (b"", b"text", (source / "model.safetensors").read_bytes()):
        (tmp_path / "stats").write_bytes(content)
        with pytest.raises(CheckpointError, match="not a file of statistics"):
            opened(tmp_path / "stats", source)
    with pytest.raises(CheckpointError, match="not a file of statistics"):
        opened(tmp_path / "nothing", source)


@pytest.mark.parametrize("change", ["missing", "shape", "format"])
def test_statistics_that_lack_something_are_refused(source: Path, stats: Path, tmp_path: Path, change: str) -> None:
    tensors, name = load_file(stats), f"{MLP}.down_proj"
    with safe_open(stats, framework="pt") as file:
        about = json.loads(file.metadata()["p2q"])
    if change == "missing":
        del about["layers"][name]
    elif change == "shape":
        tensors[name] = tensors[name][:5].contiguous()
    else:
        about["format"] = 9
    save_file(tensors, tmp_path / "stats", {"p2q": json.dumps(about)})
    with pytest.raises(CheckpointError, match="another version" if change == "format" else f"{name}: no statistics"):
        opened(tmp_path / "stats", source)
