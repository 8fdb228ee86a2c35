from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from p2q.checkpoint import open_checkpoint
from p2q.errors import CheckpointError, P2QError, ScaleError, SchemeError
from p2q.layers import Layer, check_length
from p2q.scheme import SUPPORTED, quantized_layers, read_quantization_config

Make = Callable[..., Path]
Config = Callable[..., dict[str, Any]]
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def changed(config: dict[str, Any], part: str, **changes: Any) -> dict[str, Any]:
    """The configuration with its group's weights or input_activations changed, or without them."""
    scheme = config["config_groups"]["group_0"]
    args = {**scheme[part], **changes} if changes else None
    return {**config, "config_groups": {"group_0": {**scheme, part: args}}}


def read(raw: object) -> object:
    return read_quantization_config({"quantization_config": raw}, "config.json")


def test_layers_are_the_int8_weights_in_the_order_of_their_names(make_checkpoint: Make) -> None:
    assert [layer.name for layer in quantized_layers(open_checkpoint(make_checkpoint()))] == [DOWN, UP]


# The configuration


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_config_under_either_key_is_read(make_config: Config, key: str) -> None:
    assert read_quantization_config({key: make_config()}, "config.json").ignore == ["lm_head"]


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_config_weights_per_channel_or_tensor_are_supported(make_config: Config, strategy: str) -> None:
    read(changed(make_config(), "weights", strategy=strategy))


@pytest.mark.parametrize(
    "targets", [["Linear"], [f"re:{UP}", f"re:.*{DOWN}"], [UP, DOWN], ["re:.*up_proj", "Linear"]], ids=str
)
def test_config_group_with_several_targets_is_supported(
    make_checkpoint: Make, make_config: Config, targets: list[str]
) -> None:
    config = make_config()
    config["config_groups"]["group_0"]["targets"] = targets
    assert len(quantized_layers(open_checkpoint(make_checkpoint(quantization=config)))) == 2


def test_config_with_several_groups_is_supported(make_checkpoint: Make, make_config: Config) -> None:
    config = make_config()
    group = config["config_groups"].pop("group_0")
    config["config_groups"] = {
        "up": {**group, "targets": ["re:.*up_proj"]},
        "down": {**group, "targets": ["re:.*down_proj"]},
    }
    assert len(quantized_layers(open_checkpoint(make_checkpoint(quantization=config)))) == 2


def test_config_that_names_a_preset_is_supported(make_config: Config) -> None:
    read(make_config(config_groups={"W8A8": ["Linear"]}))


@pytest.mark.parametrize("empty", [{}, None, {"format": "dense"}], ids=str)
def test_config_with_empty_sparsity_and_transform_is_supported(make_config: Config, empty: object) -> None:
    read(make_config(sparsity_config=empty, transform_config={}))


def weights(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return changed(config, "weights", **changes)


def inputs(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return changed(config, "input_activations", **changes)


def group(config: dict[str, Any]) -> dict[str, Any]:
    return dict(config["config_groups"]["group_0"])


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "none": (lambda _: None, "not quantized; .*got bfloat16 weights.*p2q quantize"),
    "empty": (lambda _: {}, "got a quantization_config without quant_method"),
    "list": (lambda _: [1], r"got a quantization_config that is \[1\]"),
    "text": (lambda _: "int8", "got a quantization_config that is 'int8'"),
    "gptq": (lambda _: {"quant_method": "gptq", "bits": 8}, "got gptq with 8 bits"),
    "awq": (lambda _: {"quant_method": "awq", "w_bit": 4}, "got awq with 4 bits"),
    "fp8": (lambda _: {"quant_method": "fp8", "activation_scheme": "dynamic"}, "got fp8"),
    "bitsandbytes": (lambda _: {"quant_method": "bitsandbytes", "load_in_8bit": True}, "got bitsandbytes"),
    "no groups": (lambda c: {**c, "config_groups": {}}, "got a quantization_config without config_groups"),
    "groups missing": (lambda c: {"quant_method": "compressed-tensors"}, "config_groups: Field required"),
    "groups a list": (lambda c: {**c, "config_groups": [1]}, "bad quantization_config"),
    "unknown preset": (lambda c: {**c, "config_groups": {"W9A9": ["Linear"]}}, "bad quantization_config; .*W9A9"),
    "another preset": (lambda c: {**c, "config_groups": {"W4A16": ["Linear"]}}, "W4A16"),
    "unknown field": (lambda c: weights(c, bits=8), "bad quantization_config"),
    "ignore a text": (lambda c: {**c, "ignore": "lm_head"}, "bad quantization_config; .*ignore"),
    "float-quantized": (
        lambda c: {**weights(inputs(c, type="float"), type="float"), "format": "float-quantized"},
        "got group_0: W8A8 .*symmetric float8 per channel.*format float-quantized",
    ),
    "W4A16 pack-quantized": (
        lambda c: {**weights(inputs(c), num_bits=4, strategy="group", group_size=128), "format": "pack-quantized"},
        "got group_0: W4A16 .*int4 per group; activations not quantized; format pack-quantized",
    ),
    "W8A16": (lambda c: {**inputs(c), "format": "pack-quantized"}, "got group_0: W8A16"),
    "W4A8": (lambda c: weights(c, num_bits=4), "got group_0: W4A8"),
    "W16A8": (weights, "got group_0: W16A8"),
    "asymmetric weights": (lambda c: weights(c, symmetric=False), "weights asymmetric int8 per channel"),
    "static per token": (lambda c: inputs(c, dynamic=False), "config_groups.group_0.input_activations: .*static token"),
    "dynamic per tensor": (lambda c: inputs(c, strategy="tensor"), "symmetric dynamic int8 per tensor"),
    "group strategy": (lambda c: weights(c, strategy="group", group_size=128), "symmetric int8 per group"),
    "dynamic weights": (lambda c: weights(c, dynamic=True, strategy="tensor"), "weights symmetric dynamic int8"),
    "quantized outputs": (
        lambda c: {**c, "config_groups": {"g": {**group(c), "output_activations": group(c)["input_activations"]}}},
        "outputs symmetric dynamic int8",
    ),
    "block activations": (lambda c: inputs(c, strategy="block"), "bad quantization_config"),
    "naive-quantized": (lambda c: {**c, "format": "naive-quantized"}, "got format naive-quantized"),
    "format missing": (lambda c: {k: v for k, v in c.items() if k != "format"}, "got format fakequant"),
    "format of the group": (
        lambda c: {**c, "config_groups": {"group_0": {**group(c), "format": "pack-quantized"}}},
        "format pack-quantized",
    ),
    "one group of two": (
        lambda c: {**c, "config_groups": {"int8": group(c), "fp8": group(weights(c, type="float"))}},
        "got fp8: W8A8 .*float8",
    ),
    "sparse": (lambda c: {**c, "sparsity_config": {"format": "sparse-24-bitmask"}}, "got sparse weights"),
    "transformed": (lambda c: {**c, "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_config_of_another_scheme_is_refused_by_name(make_config: Config, case: str) -> None:
    change, reason = REFUSED[case]
    with pytest.raises(SchemeError, match=reason) as caught:
        read_quantization_config({"dtype": "bfloat16", "quantization_config": change(make_config())}, "dir/config.json")
    assert str(caught.value).startswith("dir/config.json: ")
    assert f"expected {SUPPORTED}, got " in str(caught.value)


# The tensors


def test_layers_ignore_pattern_is_a_regular_expression_and_no_substring(
    make_checkpoint: Make, make_config: Config
) -> None:
    # As substrings, "mlp" and "up_proj" would match; as expressions from the start of the name, none does.
    config = make_config(ignore=["mlp", "up_proj", "re:mlp.*", f"re:{UP}x", "re:.*gate$", "lm_head"])
    assert len(quantized_layers(open_checkpoint(make_checkpoint(quantization=config)))) == 2


@pytest.mark.parametrize("pattern", [UP, "re:.*up_proj", "re:model", r"re:model\.layers\.\d+\.mlp\.up_proj$"])
def test_layers_int8_weight_that_is_ignored_is_refused(
    make_checkpoint: Make, make_config: Config, pattern: str
) -> None:
    source = make_checkpoint(quantization=make_config(ignore=["lm_head", pattern]))
    with pytest.raises(
        CheckpointError, match="int8 weights in a layer that the quantization configuration ignores"
    ) as caught:
        quantized_layers(open_checkpoint(source))
    assert f'expected a floating dtype, got I8, and "{pattern}" in ignore' in str(caught.value)


@pytest.mark.parametrize("targets", [["re:.*up_proj"], [UP], []], ids=str)
def test_layers_int8_weight_that_is_not_targeted_is_refused(
    make_checkpoint: Make, make_config: Config, targets: list[str]
) -> None:
    config = make_config()
    config["config_groups"]["group_0"]["targets"] = targets
    with pytest.raises(CheckpointError, match=rf"{DOWN}\.weight: .*does not target"):
        quantized_layers(open_checkpoint(make_checkpoint(quantization=config)))


@pytest.mark.parametrize("where", ["ignore", "targets"])
def test_layers_broken_regular_expression_is_refused(make_checkpoint: Make, make_config: Config, where: str) -> None:
    config = make_config()
    (config if where == "ignore" else config["config_groups"]["group_0"])[where] = ["re:("]
    with pytest.raises(SchemeError, match=r"config\.json: .*expected a regular expression, got re:\("):
        quantized_layers(open_checkpoint(make_checkpoint(quantization=config)))


def scale_missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{UP}.weight_scale"]


def scale_alone(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{UP}.weight"]


def scale_of_floating_weight(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].half()


def four_dimensions(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].reshape(1, 2, 3, 8)


def no_rows(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{UP}.weight"] = torch.empty(0, 8, dtype=torch.int8)


def no_columns(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{UP}.weight"] = torch.empty(6, 0, dtype=torch.int8)


def zero_point(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{UP}.weight_zero_point"] = torch.tensor([[0], [0], [0], [1], [0], [0]], dtype=torch.int8)


def unnamed_weight(tensors: dict[str, torch.Tensor]) -> None:
    tensors["mlp.table"] = torch.ones(3, 4, dtype=torch.int8)
    tensors["mlp.table_scale"] = torch.ones(3, 1)


def nothing_int8(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if "proj" in name]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        (scale_missing, ScaleError, rf"{UP}\.weight: missing scale; expected a tensor {UP}\.weight_scale, got none"),
        (scale_alone, CheckpointError, rf"{UP}\.weight_scale: .*expected {UP}\.weight in I8, got none"),
        (scale_of_floating_weight, CheckpointError, rf"{UP}\.weight_scale: .*expected {UP}\.weight in I8, got F16"),
        (
            four_dimensions,
            SchemeError,
            rf"{UP}\.weight: not a linear layer; expected a shape \[N, K\] or \[experts, N, K\], got \[1, 2, 3, 8\]",
        ),
        (no_rows, SchemeError, r"got \[0, 8\]"),
        (no_columns, SchemeError, r"got \[6, 0\]"),
        (zero_point, SchemeError, rf"{UP}\.weight_zero_point: asymmetric weights"),
        (unnamed_weight, SchemeError, r"mlp\.table: int8 weights that are not a linear layer's"),
        (nothing_int8, SchemeError, "no int8 weights in a checkpoint whose configuration says W8A8"),
    ],
)
def test_layers_tensors_that_do_not_fit_are_refused(
    make_checkpoint: Make,
    w8a8: dict[str, torch.Tensor],
    change: Callable[..., None],
    error: type[P2QError],
    reason: str,
) -> None:
    change(w8a8)
    source = make_checkpoint(w8a8)
    with pytest.raises(error, match=reason) as caught:
        quantized_layers(open_checkpoint(source))
    assert str(caught.value).startswith(str(source))


def test_layers_zero_points_of_zero_and_other_int8_tensors_are_accepted(
    make_checkpoint: Make, w8a8: dict[str, torch.Tensor]
) -> None:
    w8a8[f"{UP}.weight_zero_point"] = torch.zeros(6, 1, dtype=torch.int8)
    w8a8["model.table"] = torch.ones(3, dtype=torch.int8)
    assert len(quantized_layers(open_checkpoint(make_checkpoint(w8a8)))) == 2


@pytest.mark.parametrize("k", [132_104, 132_105])
def test_length_past_the_bound_of_int32_is_refused(
    make_checkpoint: Make, w8a8: dict[str, torch.Tensor], k: int
) -> None:
    w8a8["long.weight"], w8a8["long.weight_scale"] = torch.ones(1, k, dtype=torch.int8), torch.ones(1, 1)
    checkpoint = open_checkpoint(make_checkpoint(w8a8))
    if k == 132_104:
        check_length(checkpoint, Layer.linear("long"))
    else:
        with pytest.raises(SchemeError, match=r"long\.weight: .*expected K of at most 132104, got K = 132105"):
            check_length(checkpoint, Layer.linear("long"))
