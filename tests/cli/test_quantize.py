from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Tree = Callable[[Path], dict[str, str]]
P2Q = Callable[..., Any]


def test_quantize_says_what_it_did(p2q: P2Q, tiny_llama: Path, tiny_w8a8: Path, tmp_path: Path, tree: Tree) -> None:
    found = p2q("quantize", tiny_llama, tmp_path / "target")
    assert (found.code, found.err) == (0, "")
    assert found.out == f"quantized: 14 linear layers, absmax scales\n{tmp_path / 'target'}\n"
    assert tree(tmp_path / "target") == tree(tiny_w8a8)


@pytest.mark.parametrize("scales", ["absmax", "power-of-two"])
def test_quantize_json_is_one_object(p2q: P2Q, tiny_llama: Path, tmp_path: Path, scales: str) -> None:
    found = p2q("quantize", tiny_llama, tmp_path / "target", "--scales", scales, "--json")
    assert (found.code, found.err) == (0, "")
    summary = found.json()
    assert len(summary.pop("layers")) == 14
    assert summary == {"target": str(tmp_path / "target"), "scales": scales, "skipped": []}


def test_quantize_target_that_exists_is_refused_and_replaced_with_overwrite(
    p2q: P2Q, tiny_llama: Path, tiny_w8a8: Path, tmp_path: Path, tree: Tree
) -> None:
    target = tmp_path / "target"
    assert p2q("quantize", tiny_llama, target, "--scales", "power-of-two").code == 0
    before = tree(target)
    refused = p2q("quantize", tiny_llama, target)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == f"error: {target}: the target exists. Give --overwrite to replace it\n"
    assert tree(target) == before
    assert p2q("quantize", tiny_llama, target, "--overwrite").code == 0
    assert tree(target) == tree(tiny_w8a8)


def test_quantize_quantized_source_is_bad_input(p2q: P2Q, tiny_w8a8: Path, tmp_path: Path) -> None:
    found = p2q("quantize", tiny_w8a8, tmp_path / "target")
    assert (found.code, found.out) == (2, "")
    assert found.err == (
        f"error: {tiny_w8a8 / 'config.json'}: already quantized; "
        "expected bf16, fp16 or fp32 weights, got compressed-tensors\n"
    )
    assert list(tmp_path.iterdir()) == []
