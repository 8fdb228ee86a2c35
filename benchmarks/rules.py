"""What each scale rule costs: perplexity of a W8A8 model whose row scales become powers of two.

The bf16 model is quantized to W8A8 (absmax, round to nearest, one scale a row; every linear layer but the output head).
Each arm then chooses exponents and int8 values and nothing else. int8 layers are simulated in float32: weights
dequantized, activations quantized per token (absmax / 127, ties to even). Changes of perplexity get paired bootstrap
intervals over fixed windows of the text. Calibration takes X^T X in one pass of the W8A8 absmax model over another
text; X is what an int8 layer really multiplies, the quantized activations.

    python benchmarks/rules.py --model smollm2-bf16 --text wikitext2-test.txt --calibration wikitext2-valid.txt
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOW, RESAMPLES, SEED = 512, 10_000, 20261201
DAMPING = 0.01  # share of the Hessian's mean diagonal that is added to its diagonal before error feedback
BLOCK = 128  # columns of error feedback whose effect on later columns is applied in one product
BASELINE, DEFAULT = "w8a8", "mse"
START = time.monotonic()


def note(text: str) -> None:
    """Print a line of progress to stderr."""
    print(f"[{time.monotonic() - START:6.1f} s] {text}", file=sys.stderr, flush=True)


def power_of_two(exponents: Tensor) -> Tensor:
    """2^k as an (R, 1) float64 column, exact on every device: the bits are put together."""
    return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64).unsqueeze(1)


def absmax_scale(values: Tensor) -> Tensor:
    """absmax / 127 over the last dimension, kept, by a true division; 1 for zeros."""
    absmax = values.abs().amax(dim=-1, keepdim=True)
    return torch.where(absmax == 0, 1.0, absmax / torch.full_like(absmax, 127))


def to_levels(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Levels clamp(rne(values / scale), -128, 127) in the dtype of `values`, and where the clamp acted."""
    rounded = (values / scale).round()
    levels = rounded.clamp(-128, 127)
    return levels, rounded != levels


@dataclass(frozen=True)
class Coded:
    """Rows on a power-of-two grid: levels (R, K) float64 integers, exponents (R,) int64, clipped values (R,) int64."""

    levels: Tensor
    exponents: Tensor
    clipped: Tensor

    def values(self) -> Tensor:
        return self.levels * power_of_two(self.exponents)


@dataclass
class Group:
    """Linear layers that read the same input, rows stacked.

    original (R, K) float32, levels (R, K) int8, scale (R, 1) float32, hessian (K, K) float64: X^T X, empty without
    calibration. int8 and bf16 are the checkpoints' weights, exact in float64.
    """

    linears: list[nn.Linear]
    original: Tensor
    levels: Tensor
    scale: Tensor
    hessian: Tensor

    @property
    def int8(self) -> Tensor:
        return self.levels.to(torch.float64) * self.scale.to(torch.float64)

    @property
    def bf16(self) -> Tensor:
        return self.original.to(torch.float64)

    @cached_property
    def output_norms(self) -> tuple[float, float]:
        """tr(W H W^T) of the int8 and the bf16 weight."""
        return self.output_norm(self.int8), self.output_norm(self.bf16)

    def output_norm(self, weight: Tensor) -> float:
        """tr(W H W^T), the squares of the outputs on the calibration inputs, in float32."""
        return float(row_errors(weight.to(torch.float32), self.hessian.to(torch.float32)).sum())

    def exponents(self) -> tuple[Tensor, Tensor, Tensor]:
        """Floor, ceil and nearest integer of log2 s, (R,) int64."""
        mantissa, exponent = torch.frexp(self.scale.flatten().to(torch.float64))  # mantissa in [0.5, 1)
        floor = exponent.to(torch.int64) - 1
        ceil = floor + (mantissa != 0.5)
        # log2 s is nearer to the floor where (2 * mantissa)^2 < 2; the square of 24 bits is exact, and 2 never met.
        return floor, ceil, torch.where((2 * mantissa) ** 2 < 2, floor, ceil)


def on_grid(target: Tensor, exponents: Tensor) -> Coded:
    """Round a weight (R, K) float64 to the grid of given exponents."""
    levels, clipped = to_levels(target, power_of_two(exponents))
    return Coded(levels, exponents, clipped.sum(dim=1))


def row_errors(error: Tensor, weight: Tensor | None) -> Tensor:
    """Error of each row of an (R, K) difference: squares, weighted by (K,), or as the form e^T H e of a (K, K)."""
    if weight is None:
        return (error**2).sum(dim=1)
    return error**2 @ weight if weight.dim() == 1 else ((error @ weight) * error).sum(dim=1)


def best_of(candidates: Iterator[Coded], target: Tensor, weight: Tensor | None) -> Coded:
    """Row by row the candidate with the smallest error against `target`, ties to the first."""
    best = next(candidates)
    smallest = row_errors(target - best.values(), weight)
    for candidate in candidates:
        error = row_errors(target - candidate.values(), weight)
        better = error < smallest
        smallest = torch.where(better, error, smallest)
        best = Coded(
            torch.where(better.unsqueeze(1), candidate.levels, best.levels),
            torch.where(better, candidate.exponents, best.exponents),
            torch.where(better, candidate.clipped, best.clipped),
        )
    return best


def search(group: Group, target: Tensor, weight: Tensor | None = None, *, wide: bool = False) -> Coded:
    """Of ceil and floor (wide: of ceil + 1 down to floor - 2) the exponent with the smallest error after rounding."""
    floor, ceil, _ = group.exponents()
    choices = [ceil + 1, ceil, floor, floor - 1, floor - 2] if wide else [ceil, floor]
    return best_of((on_grid(target, exponents) for exponents in choices), target, weight)


def feedback(target: Tensor, exponents: Tensor, hessian: Tensor) -> Coded:
    """Round column by column, spreading each column's error over the columns still to come (GPTQ).

    Columns with the largest inputs go first. Column i's error, divided by U[i, i], is subtracted times U[i, j] from
    every later column j, with U^T U = H^-1: the least-squares correction. It works on the transpose, so that a column
    lies together in memory, and in blocks: columns past the block are corrected by one product at its end.
    """
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    damped = hessian[order][:, order]
    mean = damped.diagonal().mean()
    damped.diagonal().add_(DAMPING * mean + (mean == 0))
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    work = target.t()[order].contiguous()  # (K, R)
    scale = power_of_two(exponents).squeeze(1)
    levels, clipped = torch.empty_like(work), torch.zeros_like(exponents)
    for start in range(0, len(work), BLOCK):
        stop = min(start + BLOCK, len(work))
        errors = torch.empty_like(work[start:stop])
        for column in range(start, stop):
            levels[column], outside = to_levels(work[column], scale)
            clipped += outside
            error = errors[column - start] = (work[column] - levels[column] * scale) / upper[column, column]
            work[column + 1 : stop].addr_(upper[column, column + 1 : stop], error, alpha=-1)
        work[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)
    result = torch.empty_like(target)
    result[:, order] = levels.t()
    return Coded(result, exponents, clipped)


def feedback_both(group: Group, target: Tensor) -> Coded:
    """Error feedback under ceil and under floor, and row by row the one with the smaller error of the outputs."""
    floor, ceil, _ = group.exponents()
    return best_of((feedback(target, k, group.hessian) for k in (ceil, floor)), target, group.hessian)


ARMS: dict[str, Callable[[Group], Coded]] = {
    "mse": lambda g: search(g, g.int8),
    "nearest": lambda g: on_grid(g.int8, g.exponents()[2]),
    "ceil": lambda g: on_grid(g.int8, g.exponents()[1]),
    "floor": lambda g: on_grid(g.int8, g.exponents()[0]),
    "mse-wide": lambda g: search(g, g.int8, wide=True),
    "act-mse": lambda g: search(g, g.int8, g.hessian.diagonal()),
    "act-mse-wide": lambda g: search(g, g.int8, g.hessian.diagonal(), wide=True),
    "hessian-mse": lambda g: search(g, g.int8, g.hessian),
    "gptq": lambda g: feedback(g.int8, search(g, g.int8).exponents, g.hessian),
    "gptq-act-mse": lambda g: feedback(g.int8, search(g, g.int8, g.hessian.diagonal()).exponents, g.hessian),
    "gptq-both": lambda g: feedback_both(g, g.int8),
    "mse-from-bf16": lambda g: search(g, g.bf16),
    "gptq-from-bf16": lambda g: feedback(g.bf16, search(g, g.bf16).exponents, g.hessian),
    "gptq-both-from-bf16": lambda g: feedback_both(g, g.bf16),
    "stale": lambda g: Coded(g.levels.to(torch.float64), g.exponents()[2], torch.zeros_like(g.exponents()[2])),
}
"""Power-of-two arms. gptq-both tries floor and ceil with feedback; stale leaves the weights under nearest's scales."""


class Activations:
    """Forward pre-hook of the linear layers: quantizes their inputs, and collects X^T X while `collecting`.

    Layers called one after another with the same tensor share its quantization and its statistics (`leader`).
    """

    def __init__(self) -> None:
        self.enabled, self.collecting = True, False
        self.sums: dict[nn.Module, Tensor] = {}
        self.leader: dict[nn.Module, nn.Module] = {}
        self._last: tuple[Tensor, Tensor, nn.Module] | None = None

    def __call__(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        """Replace the layer's input x (..., K) float32 by its quantized values, dequantized."""
        if not self.enabled:
            return None
        (x,) = args
        if self._last is None or x is not self._last[0]:
            scale = absmax_scale(x)
            self._last = (x, to_levels(x, scale)[0] * scale, module)
            if self.collecting:
                rows = self._last[1].flatten(0, -2).to(torch.float64)
                self.sums[module] = self.sums.get(module, 0) + rows.t() @ rows
        if self.collecting:
            self.leader[module] = self._last[2]
        return (self._last[1],)


def read_windows(path: Path, tokenizer: Any, count: int | None) -> Tensor:
    """The text's first windows without overlap, (n, 512) int64; each begins with a BOS where the tokenizer adds one."""
    bos = tokenizer.bos_token_id
    prefix = [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []
    ids = tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    step = WINDOW - len(prefix)
    if len(ids) // step < (count or 1):
        raise SystemExit(f"{path}: expected {count or 1} windows of {WINDOW} tokens, got {len(ids) // step}")
    return torch.tensor([prefix + ids[i * step : (i + 1) * step] for i in range(count or len(ids) // step)])


@torch.no_grad()
def window_losses(model: nn.Module, windows: Tensor, batch: int, device: str) -> np.ndarray:
    """Sum of the negative log-likelihoods of each window's 511 predicted tokens, nats, (n,) float64."""
    sums = []
    for part in windows.split(batch):
        ids = part.to(device)
        logits = model(input_ids=ids, use_cache=False).logits
        following = ids.roll(-1, dims=1)  # the last column predicts nothing, and is dropped below
        chunks = zip(logits.flatten(0, 1).split(WINDOW), following.flatten().split(WINDOW), strict=True)
        losses = torch.cat([nn.functional.cross_entropy(x.float(), y, reduction="none") for x, y in chunks])
        sums.append(losses.view(ids.shape)[:, :-1].to(torch.float64).sum(dim=1).cpu())
    return torch.cat(sums).numpy()


@torch.no_grad()
def build_groups(model: Any, activations: Activations, calibration: Tensor | None, **where: Any) -> list[Group]:
    """Quantize the model in place to W8A8 absmax, run the calibration, and group the layers by their input."""
    head = model.get_output_embeddings()
    kept: dict[nn.Linear, tuple[Tensor, Tensor, Tensor]] = {}
    for linear in model.modules():
        if isinstance(linear, nn.Linear) and linear is not head:
            original = linear.weight.detach().clone()
            scale = absmax_scale(original)
            levels = to_levels(original, scale)[0]
            kept[linear] = (original, levels.to(torch.int8), scale)
            linear.weight.copy_(levels * scale)
            linear.register_forward_pre_hook(activations)
    if calibration is not None:
        activations.collecting = True
        window_losses(model, calibration, **where)
        activations.collecting = False
    members: dict[nn.Module, list[nn.Linear]] = {}
    for linear in kept:
        members.setdefault(activations.leader.get(linear, linear), []).append(linear)
    groups = []
    for leader, linears in members.items():
        original, levels, scale = (torch.cat(parts) for parts in zip(*(kept.pop(m) for m in linears), strict=True))
        groups.append(Group(linears, original, levels, scale, activations.sums.get(leader, original.new_empty(0, 0))))
    return groups


@torch.no_grad()
def install(groups: list[Group], arm: str) -> dict[str, Any]:
    """Give the model an arm's weights. Returns the clipped values and relative errors (root of a ratio of squares).

    weight_error is over all weights together. output_error is that of the layers' outputs on the calibration inputs:
    sqrt(tr(E H E^T) / tr(W H W^T)), the ratio averaged over groups; None without calibration.
    """
    clipped = 0
    squares, ratios = np.zeros((2, 2)), np.zeros(2)
    for group in groups:
        references = (group.int8, group.bf16)
        if arm in ("original", BASELINE):
            weight = references[1 if arm == "original" else 0]
        else:
            coded = ARMS[arm](group)
            weight = coded.values()
            clipped += int(coded.clipped.sum())
        parts = weight.to(torch.float32).split([linear.out_features for linear in group.linears])
        for linear, part in zip(group.linears, parts, strict=True):
            linear.weight.copy_(part)
        for i, reference in enumerate(references):
            error = weight - reference
            squares[i] += [float((error**2).sum()), float((reference**2).sum())]
            if group.hessian.numel() and group.output_norms[i] > 0:
                ratios[i] += max(0.0, group.output_norm(error)) / group.output_norms[i] / len(groups)
    figures: dict[str, Any] = {"clipped": clipped}
    for i, name in enumerate(("int8", "bf16")):
        figures[f"weight_error_{name}"] = math.sqrt(squares[i, 0] / squares[i, 1])
        figures[f"output_error_{name}"] = math.sqrt(ratios[i]) if groups[0].hessian.numel() else None
    return figures


@torch.no_grad()
def install_checkpoint(model: nn.Module, folder: Path) -> dict[str, Any]:
    """Give the model the int8 weights of a checkpoint that `p2q convert` made, times their scales."""
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if f"{name}.weight_scale" in tensors:
            weight = tensors[f"{name}.weight"].to(torch.float32) * tensors[f"{name}.weight_scale"].to(torch.float32)
            module.get_parameter("weight").copy_(weight)
    records = json.loads((folder / "p2q_manifest.json").read_text(encoding="utf-8"))["tensors"].values()
    errors = [f"{kind}_error_{of}" for kind in ("weight", "output") for of in ("int8", "bf16")]
    return {**dict.fromkeys(errors), "clipped": sum(record["clipped"] for record in records)}


def compare(losses: dict[str, np.ndarray], reference: str) -> dict[str, dict[str, Any]]:
    """Change of each arm's perplexity against a reference, percent, with paired bootstrap intervals over windows.

    interval_90, interval_95: percentiles. simultaneous_95: holds for all power-of-two arms but `stale` at once, by the
    bootstrap distribution of the largest studentized deviation: what to go by when the best of many arms is picked.
    """
    windows = len(losses[reference])
    counts = np.random.default_rng(SEED).multinomial(windows, np.full(windows, 1 / windows), size=RESAMPLES)
    # Windows all have the same number of tokens, so that the ratio of perplexities is exp of the mean difference.
    differences = {arm: (losses[arm] - losses[reference]) / (WINDOW - 1) for arm in losses if arm != reference}
    samples = {arm: counts @ values / windows for arm, values in differences.items()}
    spread = {arm: float(values.std()) for arm, values in samples.items()}
    family = [arm for arm in differences if arm in ARMS and arm != "stale" and spread[arm] > 0]
    deviations = [np.abs(samples[arm] - differences[arm].mean()) / spread[arm] for arm in family]
    factor = float(np.quantile(np.max(deviations, axis=0), 0.95)) if family else 0.0
    result: dict[str, dict[str, Any]] = {}
    for arm, values in differences.items():
        mean = float(values.mean())
        quantiles = np.quantile(100 * np.expm1(samples[arm]), [0.05, 0.95, 0.025, 0.975]).tolist()
        intervals = {"interval_90": quantiles[:2], "interval_95": quantiles[2:]}
        if arm in family:
            width = factor * spread[arm]
            intervals["simultaneous_95"] = [100 * math.expm1(mean - width), 100 * math.expm1(mean + width)]
        excludes = {name: low > 0 or high < 0 for name, (low, high) in intervals.items()}
        result[arm] = {"change_percent": 100 * math.expm1(mean), **intervals, "excludes_zero": excludes}
    return result


def table(arms: dict[str, dict[str, Any]]) -> str:
    """The figures of all arms, aligned; errors, changes and intervals in percent."""
    rows = [["arm", "clipped", "weight error int8", "bf16", "output error int8", "bf16", "perplexity"]]
    rows[0] += ["vs w8a8", "90%", "95%", "vs mse", "90%", "95%", "excludes zero"]
    for name, arm in arms.items():
        errors = [arm[f"{kind}_error_{of}"] for kind in ("weight", "output") for of in ("int8", "bf16")]
        row = [name, f"{arm['clipped']:,}", *("-" if error is None else f"{100 * error:.3f}" for error in errors)]
        row.append(f"{arm['perplexity']:.4f}")
        for reference in (BASELINE, DEFAULT):
            figures = arm.get(f"against_{reference}")
            row.append(f"{figures['change_percent']:+.3f}" if figures else "-")
            for level in ("interval_90", "interval_95"):
                row.append("{:+.3f} to {:+.3f}".format(*figures[level]) if figures else "-")
        excludes = arm.get(f"against_{DEFAULT}", {}).get("excludes_zero", {})
        levels = {"interval_95": "95%", "simultaneous_95": "simultaneous"}
        rows.append([*row, ", ".join(text for key, text in levels.items() if excludes.get(key)) or "-"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join([line[0].strip().ljust(widths[0]), *line[1:]]) for line in lines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="bf16 checkpoint folder with its tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="text whose perplexity is taken")
    parser.add_argument("--calibration", type=Path, help="another text; without it, arms that need one are left out")
    parser.add_argument("--windows", type=int, help=f"windows of {WINDOW} tokens of the text (default: all)")
    parser.add_argument("--calibration-windows", type=int, default=128)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="windows in one forward pass (default: 16 on cuda, 2 on a CPU)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help=f"{DEFAULT} always runs")
    parser.add_argument("--checkpoint", type=Path, nargs="+", default=[], help="made by p2q convert: arms of their own")
    parser.add_argument("--out", type=Path, default=Path("rules.json"))
    return parser.parse_args()


def main() -> None:
    """Run the arms, write the JSON, print the table."""
    args = parse()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True, warn_only=True)
    where = {"batch": args.batch or (16 if args.device == "cuda" else 2), "device": args.device}
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    windows = read_windows(args.text, tokenizer, args.windows)
    calibration = read_windows(args.calibration, tokenizer, args.calibration_windows) if args.calibration else None
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, local_files_only=True)
    model = model.to(args.device).eval()
    activations = Activations()
    note(f"{len(windows)} windows, {args.device}")
    groups = build_groups(model, activations, calibration, **where)
    note(f"{sum(len(g.linears) for g in groups)} linear layers in {len(groups)} groups")
    chosen = [name for name in ARMS if name in args.arms or name == DEFAULT]
    if calibration is None:
        chosen = [name for name in chosen if not name.startswith(("act", "hessian", "gptq"))]
    arms: dict[str, dict[str, Any]] = {}
    losses: dict[str, np.ndarray] = {}
    try:
        for arm in ["original", BASELINE, *chosen, *args.checkpoint]:
            if isinstance(arm, Path):
                figures, arm = install_checkpoint(model, arm), arm.name
            else:
                figures = install(groups, arm)
            note(f"{arm}: weights made")
            activations.enabled = arm != "original"
            sums = window_losses(model, windows, **where)
            losses[arm], arms[arm] = sums, {**figures, "perplexity": math.exp(sums.mean() / (WINDOW - 1))}
            note(f"{arm}: perplexity {arms[arm]['perplexity']:.4f}")
    except KeyboardInterrupt:
        note("interrupted: the report holds the arms done so far")
        if DEFAULT not in arms:
            raise
    for reference in (BASELINE, DEFAULT):
        for arm, figures in compare(losses, reference).items():
            arms[arm][f"against_{reference}"] = figures
    for arm, sums in losses.items():
        arms[arm]["window_nll"] = sums.tolist()
    report = {
        "settings": {key: value if isinstance(value, int | None) else str(value) for key, value in vars(args).items()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "calibration": "W8A8 absmax model, quantized activations" if args.calibration else None,
        "windows": {"number": len(windows), "predicted_tokens": WINDOW - 1},
        "bootstrap": {"resamples": RESAMPLES, "seed": SEED},
        "seconds": round(time.monotonic() - START, 1),
        "arms": arms,
    }
    args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(arms))


if __name__ == "__main__":
    main()
