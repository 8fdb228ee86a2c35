"""Error feedback, against GPTQ as its paper states it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from p2q.checkpoint import open_checkpoint
from p2q.errors import CheckpointError, SchemeError
from p2q.feedback import _ROWS, DAMPING, FeedbackRows, _add, _cholesky, factor, feedback
from p2q.originals import OriginalRows, Originals
from p2q.requantize import Rows, requantizer_on
from p2q.scheme import quantized_layers
from p2q.shards import Plan
from p2q.statistics import Statistics

Make = Callable[..., Path]
Threads = Callable[[int], contextlib.AbstractContextManager[None]]
UP = "model.layers.0.mlp.up_proj"


def correlated(k: int, seed: int = 1, tokens: int | None = None) -> torch.Tensor:
    """X^T X of random inputs whose columns depend on each other."""
    random = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=random, dtype=torch.float64) / k**0.5 + torch.eye(k, dtype=torch.float64)
    inputs: torch.Tensor = torch.randn(tokens or 4 * k, k, generator=random, dtype=torch.float64) @ mix
    return inputs.t() @ inputs


def weights(rows: int, k: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(-128, 128, (rows, k), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def scales(count: int, seed: int = 3) -> torch.Tensor:
    """(S,) float64 holding float32 values."""
    random = torch.Generator().manual_seed(seed)
    return (torch.rand(count, generator=random) * 0.01 + 0.001).to(torch.float64)


def naive(values: torch.Tensor, scale: torch.Tensor, hessian: torch.Tensor) -> tuple[torch.Tensor, int]:
    """GPTQ: after each column, the others move by the inverse of what is left of H."""
    k = values.shape[1]
    mean = hessian.diagonal().mean()
    damped = hessian + torch.eye(k, dtype=torch.float64) * (DAMPING * mean if mean else 1.0)
    left = sorted(range(k), key=lambda column: (-float(hessian[column, column]), column))
    work, levels, clipped = values.clone(), torch.zeros(values.shape, dtype=torch.int8), 0
    while left:
        first, *rest = left
        unclamped = (work[:, first] / scale[:, 0]).round()
        levels[:, first] = unclamped.clamp(-128, 127).to(torch.int8)
        clipped += int((unclamped != levels[:, first]).sum())
        inverse = torch.linalg.inv(damped[left][:, left])
        error = (work[:, first] - levels[:, first] * scale[:, 0]) / inverse[0, 0]
        work[:, rest] -= error.reshape(-1, 1) * inverse[0, 1:]
        left = rest
    return levels, clipped


def plain(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values / scale).round().clamp(-128, 127).to(torch.int8)


def output_error(values: torch.Tensor, scale: torch.Tensor, levels: torch.Tensor, hessian: torch.Tensor) -> float:
    error = levels.to(torch.float64) * scale - values
    return float(((error @ hessian) * error).sum())


def power(exponents: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones(exponents.numel(), dtype=torch.float64), exponents).reshape(-1, 1)


# The arithmetic


@pytest.mark.parametrize(("rows", "k", "tokens"), [(1, 1, 4), (5, 7, 28), (33, 24, 10), (40, 130, 400), (3, 257, 300)])
def test_feedback_equals_naive_gptq(rows: int, k: int, tokens: int) -> None:
    hessian = correlated(k, tokens=tokens)
    values = weights(rows, k).to(torch.float64) * scales(rows).reshape(-1, 1)
    scale = power(torch.floor(torch.log2(scales(rows))).to(torch.int32) + torch.arange(rows) % 2)
    levels, clipped = feedback(values, scale, *factor(hessian))
    expected, expected_clipped = naive(values, scale, hessian)
    assert torch.equal(levels, expected)
    assert clipped == expected_clipped
    assert levels.dtype == torch.int8


def test_feedback_with_independent_inputs_is_plain_rounding() -> None:
    values, scale = weights(20, 50).to(torch.float64) * 0.0071, power(torch.full((20,), -7))
    hessian = torch.diag(torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    levels, clipped = feedback(values, scale, *factor(hessian))
    assert torch.equal(levels, plain(values, scale))
    assert clipped == int(((values / scale).round() != levels).sum())


@pytest.mark.parametrize("seed", range(5))
def test_feedback_lowers_the_error_of_the_outputs(seed: int) -> None:
    hessian = correlated(64, seed)
    values, scale = weights(48, 64, seed).to(torch.float64) * 0.0061, power(torch.full((48,), -7))
    levels, _ = feedback(values, scale, *factor(hessian))
    fed = output_error(values, scale, levels, hessian)
    assert fed < 0.95 * output_error(values, scale, plain(values, scale), hessian)


def test_feedback_rounds_dead_columns_plainly_and_leaves_the_others_as_without_them() -> None:
    live = torch.tensor([column for column in range(40) if column % 4])
    hessian = torch.zeros(40, 40, dtype=torch.float64)
    small = correlated(30)
    hessian[live.reshape(-1, 1), live] = small
    values, scale = weights(9, 40).to(torch.float64) * 0.0061, power(torch.full((9,), -7))
    levels, _ = feedback(values, scale, *factor(hessian))
    assert torch.equal(levels[:, ::4], plain(values, scale)[:, ::4])
    assert torch.equal(levels, naive(values, scale, hessian)[0])
    assert not torch.equal(levels[:, live], plain(values, scale)[:, live])


def test_feedback_without_any_inputs_is_plain_rounding() -> None:
    values, scale = weights(3, 6).to(torch.float64) * 0.0061, power(torch.full((3,), -7))
    levels, _ = feedback(values, scale, *factor(torch.zeros(6, 6, dtype=torch.float64)))
    assert torch.equal(levels, plain(values, scale))


def test_feedback_of_values_on_the_grid_changes_nothing() -> None:
    levels, scale = weights(7, 70), power(torch.arange(7) - 9)
    assert torch.equal(feedback(levels.to(torch.float64) * scale, scale, *factor(correlated(70)))[0], levels)


def test_feedback_of_one_row_does_not_depend_on_the_others(threads: Threads) -> None:
    found = factor(correlated(200))
    values, scale = weights(100, 200).to(torch.float64) * 0.0061, power(torch.full((100,), -7))
    together, _ = feedback(values, scale, *found)
    for step in (1, 7, 32, 45):
        pieces = [feedback(values[at : at + step], scale[at : at + step], *found)[0] for at in range(0, 100, step)]
        assert torch.equal(torch.cat(pieces), together)
    for number in (1, 2, 5):
        with threads(number):
            assert torch.equal(feedback(values, scale, *found)[0], together)


def test_factor_does_not_depend_on_threads_and_leaves_its_argument(threads: Threads) -> None:
    hessian = correlated(300)
    before = hessian.clone()
    found = factor(hessian)
    assert torch.equal(hessian, before)
    for number in (1, 2, 5):
        with threads(number):
            assert all(torch.equal(one, other) for one, other in zip(factor(hessian), found, strict=True))


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_factor_of_what_is_no_sum_of_squares_is_refused(bad: float) -> None:
    hessian = torch.eye(4, dtype=torch.float64)
    hessian[0, 1] = hessian[1, 0] = 3 * bad
    with pytest.raises(ArithmeticError):
        factor(hessian)


def test_compiled_loops_round_each_product_on_its_own() -> None:
    """A fused multiply-add would give other bits on machines that have none."""
    a = 1.0 + 3 * 2.0**-28
    square = a * a  # rounded up
    matrix = np.full((40, 40), square)
    matrix[0] = matrix[:, 0] = a
    matrix[0, 0] = 1.0
    assert not _cholesky(matrix)  # the second pivot is zero, and positive if the product is not rounded
    target = np.full(_ROWS, -square)
    _add(target, a, np.full(_ROWS, a))
    assert not target.any()


# Rows


class Case(SimpleNamespace):
    """A layer of a hand-made checkpoint and its statistics."""

    def rows(self, originals: Originals | None = None) -> FeedbackRows:
        inner: Rows | OriginalRows = self.plan.rows(self.layer)
        if originals is not None:
            inner = OriginalRows(originals, self.layer, "mse")
        return FeedbackRows(inner, self.checkpoint, self.layer, cast(Statistics, self), originals)

    def of(self, _layer: Any) -> torch.Tensor:
        hessian: torch.Tensor = self.hessian
        return hessian


def case(path: Path, hessian: torch.Tensor) -> Case:
    checkpoint = open_checkpoint(path)
    layers = quantized_layers(checkpoint)
    layer = next(layer for layer in layers if layer.name == UP)
    plan = Plan(checkpoint, layers, "mse", requantizer_on("cpu"))
    return Case(checkpoint=checkpoint, layer=layer, plan=plan, hessian=hessian, path=Path("STATS"))


def per_row(make: Make, w8a8: dict[str, torch.Tensor]) -> Path:
    w8a8[f"{UP}.weight"] = weights(12, 16)
    w8a8[f"{UP}.weight_scale"] = scales(12).to(torch.float32).reshape(-1, 1)
    return make(w8a8)


def run(found: Case, step: int, originals: Originals | None = None) -> tuple[torch.Tensor, Any]:
    rows, weight, scale = (
        found.rows(originals),
        found.checkpoint.read(found.layer.weight),
        found.plan.scale_of(found.layer),
    )
    made = []
    for at in range(0, len(weight), step):
        block, part = weight[at : at + step], scale[at : at + step]
        start = at * weight.shape[1]
        made.append(rows.apply(block, start, rows.choose(rows.tally(block, start, part), part)))
    return torch.cat(made), rows.figures()


@pytest.mark.parametrize("step", [1, 5, 12])
def test_rows_keep_the_exponents_and_feed_errors_back(make_checkpoint: Make, w8a8: Any, step: int) -> None:
    found = case(per_row(make_checkpoint, w8a8), correlated(16))
    weight, scale = found.checkpoint.read(found.layer.weight), found.plan.scale_of(found.layer)
    inner = found.plan.rows(found.layer)
    inner.choose(inner.tally(weight, 0, scale), scale)
    exponents = inner.figures().exponents
    values = weight.to(torch.float64) * scale.reshape(-1, 1)
    expected, clipped = naive(values, power(exponents), found.hessian)
    made, figures = run(found, step)
    assert torch.equal(made, expected)
    assert torch.equal(figures.exponents, exponents)
    assert figures.clipped == clipped
    error = expected.to(torch.float64) * power(exponents) - values
    assert figures.squared_error == pytest.approx(float((error**2).sum()), rel=1e-6)
    assert figures.squared_norm == pytest.approx(float((values**2).sum()), rel=1e-6)
    assert dataclasses.asdict(figures).keys() == dataclasses.asdict(run(found, 12)[1]).keys()
    assert figures.squared_error == run(found, 12)[1].squared_error


@pytest.mark.parametrize("rows", [1, 3, 4, 12])
def test_rows_with_one_scale_in_all_come_in_pieces(make_checkpoint: Make, w8a8: Any, rows: int) -> None:
    w8a8[f"{UP}.weight"] = weights(12, 16)
    w8a8[f"{UP}.weight_scale"] = scales(1).to(torch.float32)
    found = case(make_checkpoint(w8a8), correlated(16))
    feeding, weight, scale = found.rows(), w8a8[f"{UP}.weight"], found.plan.scale_of(found.layer)
    pieces = [(at * 16, weight[at : at + rows].reshape(1, -1)) for at in range(0, 12, rows)]
    tally = sum(feeding.tally(piece, start, scale).to(torch.int64) for start, piece in pieces)
    chosen = feeding.choose(cast(torch.Tensor, tally), scale)
    made = torch.cat([feeding.apply(piece, start, chosen).reshape(-1, 16) for start, piece in pieces])
    exponents = feeding.figures().exponents
    values = weight.to(torch.float64) * scale
    assert torch.equal(made, naive(values, power(exponents).expand(12, 1), found.hessian)[0])
    assert exponents.shape == (1,)


def test_rows_from_original_weights(make_checkpoint: Make, w8a8: Any) -> None:
    source = per_row(make_checkpoint, w8a8)
    exact = w8a8[f"{UP}.weight"].to(torch.float64) * w8a8[f"{UP}.weight_scale"].to(torch.float64)
    noise = torch.rand(12, 16, generator=torch.Generator().manual_seed(9)) - 0.5
    original = (exact + noise * w8a8[f"{UP}.weight_scale"]).to(torch.bfloat16)
    others = {name: tensor for name, tensor in w8a8.items() if not name.startswith("model.layers")}
    weights_at = make_checkpoint({**others, f"{UP}.weight": original}, "original", quantization=False)
    found = case(source, correlated(16))
    made, figures = run(found, 5, Originals(weights_at, found.checkpoint, [found.layer]))
    expected, clipped = naive(original.to(torch.float64), power(figures.exponents), found.hessian)
    assert torch.equal(made, expected)
    assert figures.clipped == clipped


def test_rows_refuse_pieces_of_rows(make_checkpoint: Make, w8a8: Any) -> None:
    found = case(per_row(make_checkpoint, w8a8), correlated(16))
    for start, size in ((0, 24), (8, 16)):
        with pytest.raises(ValueError, match=f"{UP}.weight: a block at {start} of {size} is not rows of 16"):
            found.rows().apply(torch.zeros(1, size, dtype=torch.int8), start, torch.ones(1, 2, dtype=torch.float64))


def test_rows_refuse_experts_in_one_tensor(make_checkpoint: Make, w8a8: Any) -> None:
    source = per_row(make_checkpoint, w8a8)
    tensors = load_file(source / "model.safetensors")
    tensors[f"{UP}.weight"] = weights(24, 16).reshape(2, 12, 16)
    tensors[f"{UP}.weight_scale"] = torch.ones(2, 12, 1)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(SchemeError, match=f"{UP}.weight: error feedback does not work on experts in one tensor"):
        case(source, correlated(16)).rows()


def test_rows_say_which_statistics_are_wrong(make_checkpoint: Make, w8a8: Any) -> None:
    hessian = torch.eye(16, dtype=torch.float64)
    hessian[0, 1] = hessian[1, 0] = 3.0
    with pytest.raises(CheckpointError, match=f"STATS, {UP}: .*not positive definite"):
        run(case(per_row(make_checkpoint, w8a8), hessian), 12)
