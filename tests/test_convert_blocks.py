"""The result depends on neither the size of blocks, the number of workers nor what computes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from p2q import shards
from p2q.convert import convert
from p2q.requantize import Requantizer, TorchRequantizer
from p2q.requantize_cpu import CpuRequantizer
from p2q.scales import RULES, Rule

Make = Callable[..., Path]
Tree = Callable[[Path], dict[str, str]]
Tensors = dict[str, torch.Tensor]
FUSED = "model.layers.0.mlp.experts.down_proj"
BLOCKS = [1, 7, 64, 1000, 1 << 22]
REQUANTIZERS: dict[str, Requantizer] = {"torch": TorchRequantizer(), "compiled": CpuRequantizer()}


@pytest.fixture
def source(make_checkpoint: Make, w8a8: Tensors) -> Path:
    """Two layers per channel, one per tensor, and experts with a scale per row, per expert and in all: three shards.

    Some scales lie in another shard than their weight.
    """
    random = torch.Generator().manual_seed(41)

    def int8(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, generator=random).to(torch.int8)

    w8a8["one.weight"], w8a8["one.weight_scale"] = int8(13, 11), torch.tensor([0.0123])
    for number, shape in enumerate([(3, 5, 1), (3, 1, 1), (3,), (1,)]):
        scale = torch.rand(shape, generator=random) * 0.01 + 0.001
        w8a8[f"{FUSED}.{number}_proj"], w8a8[f"{FUSED}.{number}_proj_scale"] = int8(3, 5, 9), scale.to(torch.bfloat16)
    names = list(w8a8)
    files = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    return make_checkpoint(w8a8, shards=files)


def with_requantizer(monkeypatch: pytest.MonkeyPatch, requantizer: Requantizer) -> None:
    monkeypatch.setattr("p2q.convert.requantizer_on", lambda _device: requantizer)


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("block", BLOCKS)
def test_convert_in_any_blocks_by_any_workers_gives_the_same_bytes(
    source: Path, tmp_path: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch, block: int, workers: int
) -> None:
    convert(source, tmp_path / "usual", workers=1)
    monkeypatch.setattr(shards, "BLOCK_BYTES", block)
    convert(source, tmp_path / "blocks", workers=workers)
    assert tree(tmp_path / "blocks") == tree(tmp_path / "usual")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block", BLOCKS[1:3])
def test_convert_in_blocks_by_every_rule_gives_the_same_bytes(
    source: Path, tmp_path: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch, block: int, rule: Rule
) -> None:
    convert(source, tmp_path / "usual", rule=rule)
    monkeypatch.setattr(shards, "BLOCK_BYTES", block)
    convert(source, tmp_path / "blocks", rule=rule)
    assert tree(tmp_path / "blocks") == tree(tmp_path / "usual")


@pytest.mark.parametrize("block", [7, 64, 1 << 22])
def test_convert_dry_run_in_blocks_gives_the_same_records(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    done = convert(source, tmp_path / "target").manifest
    monkeypatch.setattr(shards, "BLOCK_BYTES", block)
    dry = convert(source, tmp_path / "dry", dry_run=True, workers=2).manifest
    assert done is not None
    assert dry == done.model_copy(update={"files": {}})


@pytest.mark.parametrize("block", BLOCKS)
def test_convert_progress_counts_every_byte_once_in_any_blocks(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(shards, "BLOCK_BYTES", block)
    told: list[tuple[int, int]] = []
    convert(source, tmp_path / "target", workers=2, progress=lambda done, total: told.append((done, total)))
    done = [count for count, _ in told]
    assert done == sorted(done)
    assert done[-1] == told[-1][1]
    assert len({total for _, total in told}) == 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block", [7, 64, 1 << 22])
def test_convert_in_torch_gives_the_bytes_of_the_compiled_loops(
    source: Path, tmp_path: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch, block: int, rule: Rule
) -> None:
    monkeypatch.setattr(shards, "BLOCK_BYTES", block)
    for name, requantizer in REQUANTIZERS.items():
        with_requantizer(monkeypatch, requantizer)
        convert(source, tmp_path / name, rule=rule)
    assert tree(tmp_path / "torch") == tree(tmp_path / "compiled")


@pytest.mark.parametrize("rule", RULES)
def test_convert_tiny_llama_in_torch_gives_the_bytes_of_the_compiled_loops(
    tiny_w8a8: Path, tmp_path: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    for name, requantizer in REQUANTIZERS.items():
        with_requantizer(monkeypatch, requantizer)
        convert(tiny_w8a8, tmp_path / name, rule=rule)
    assert tree(tmp_path / "torch") == tree(tmp_path / "compiled")
