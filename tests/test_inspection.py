import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from p2q.errors import SchemeError
from p2q.inspection import Inspection, inspect
from p2q.manifest import read_manifest

Make = Callable[..., Path]
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def layer(found: Inspection, name: str) -> dict[str, object]:
    return next(each.model_dump() for each in found.layers if each.name == name)


def test_inspect_quantized_checkpoint_says_that_the_contract_does_not_hold(tiny_w8a8: Path) -> None:
    found = inspect(tiny_w8a8)
    assert found.scheme == [
        "W8A8 (weights symmetric int8 per channel; activations symmetric dynamic int8 per token; format int-quantized)"
    ]
    assert len(found.layers) == 14
    assert not found.contract_holds
    assert found.manifest is None
    assert found.changed is None
    for each in found.layers:
        assert each.power_of_two < each.scales
        assert each.problem == f"{each.scales - each.power_of_two} of {each.scales} scales are not powers of two"


def test_inspect_converted_checkpoint_says_that_it_holds(tiny_p2q: Path) -> None:
    found = inspect(tiny_p2q)
    manifest = read_manifest(tiny_p2q)
    assert manifest is not None
    assert found.contract_holds
    assert found.manifest == manifest
    assert found.changed == {}
    assert {f"{each.name}.weight": each.exponents for each in found.layers} == {
        name: record.exponents for name, record in manifest.tensors.items()
    }
    assert sum(found.exponents.values()) == sum(each.scales for each in found.layers) == 2 * (4 * 64 + 2 * 96)


def test_inspect_counts_are_those_of_the_tensors(tiny_p2q: Path) -> None:
    tensors = load_file(tiny_p2q / "model.safetensors")
    for each in inspect(tiny_p2q).layers:
        weight, scale = tensors[f"{each.name}.weight"], tensors[f"{each.name}.weight_scale"]
        assert each.shape == tuple(weight.shape)
        assert (each.scale_shape, each.scale_dtype) == (tuple(scale.shape), "float32")
        assert each.at_limit == sum(value in (-128, -127, 127) for value in weight.flatten().tolist())
        assert each.power_of_two == each.scales == scale.numel()


def test_inspect_summary_is_json_with_the_histogram_of_all_layers(tiny_p2q: Path) -> None:
    summary = json.loads(json.dumps(inspect(tiny_p2q).summary()))
    assert sum(summary["exponents"].values()) == sum(each["scales"] for each in summary["layers"])


@pytest.mark.parametrize(
    ("scale", "problem", "powers"),
    [
        (torch.full((6, 1), 0.25), None, 6),
        (torch.tensor([0.25] * 5 + [0.3]).reshape(6, 1), "1 of 6 scales are not powers of two", 5),
        (torch.tensor(2.0), None, 1),
        (torch.tensor([3.0]), "1 of 1 scales are not powers of two", 0),
        (torch.full((6, 1), torch.nan), "got nan at row 0", 0),
        (torch.full((6, 1), -1.0), "got -1.0 at row 0", 0),
        (torch.full((6, 1), 0.0), "got 0.0 at row 0", 0),
        (torch.ones(5, 1), "got float32 of shape [5, 1]", 0),
        (torch.ones(6, 1, dtype=torch.float64), "got float64 of shape [6, 1]", 0),
        (torch.full((6, 1), 2.0**-80), "got 2^-80 at row 0", 6),
        (torch.full((6, 1), 2.0**60), "got 2^60 at row 0", 6),
    ],
)
def test_inspect_layer_tells_why_the_contract_does_not_hold(
    make_checkpoint: Make, w8a8: dict[str, torch.Tensor], scale: torch.Tensor, problem: str | None, powers: int
) -> None:
    w8a8[f"{DOWN}.weight_scale"] = torch.ones(8, 1)
    w8a8[f"{UP}.weight_scale"] = scale
    found = inspect(make_checkpoint(w8a8))
    assert layer(found, DOWN)["problem"] is None
    told = layer(found, UP)["problem"]
    assert told is None if problem is None else problem.replace("0.0", "0") in str(told).replace("0.0", "0")
    assert layer(found, UP)["power_of_two"] == powers
    assert found.contract_holds == (problem is None)


def test_inspect_layer_past_the_bound_of_int32_does_not_hold(
    make_checkpoint: Make, w8a8: dict[str, torch.Tensor]
) -> None:
    w8a8["long.weight"], w8a8["long.weight_scale"] = torch.ones(1, 132_105, dtype=torch.int8), torch.ones(1, 1)
    assert layer(inspect(make_checkpoint(w8a8)), "long")["problem"] == "K = 132105 is past 132104"


def test_inspect_changed_file_is_named(tiny_p2q: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_p2q, copy)
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert inspect(copy).changed == {"model.safetensors": "changed"}


def test_inspect_checkpoint_that_is_not_w8a8_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(SchemeError, match="not quantized"):
        inspect(tiny_llama)
