"""Identical token streams: the same prompts through several kernels of the real engine.

Name: tokens. Version: 1 (greedy, all prompts in one batch, layers compared on the first kernel's own activations).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from p2q.eval.engine import RunResult, RunSpec, Stream, run_engine
from pydantic import BaseModel

import p2q
from p2q.contract import CONTRACT_VERSION
from p2q.errors import EngineError, P2QError
from p2q.kernels.probe import probe
from p2q.machine import default_device
from p2q.manifest import read_manifest

VERSION = 1


class Divergence(BaseModel):
    """Where two streams part: position, and the token of each (None where that stream had ended)."""

    position: int
    first: str | None
    second: str | None


class StreamVerdict(BaseModel):
    """One prompt: `divergence` is None where the streams are identical."""

    prompt: str
    text: str
    other_text: str
    tokens: int
    divergence: Divergence | None


class Comparison(BaseModel):
    """Two kernels on one checkpoint. `layers`: {layer: differing outputs}; `outputs`: compared in all layers."""

    first: str
    second: str
    streams: list[StreamVerdict]
    layers: dict[str, int]
    outputs: int

    @property
    def identical(self) -> int:
        return sum(stream.divergence is None for stream in self.streams)

    @property
    def agreeing(self) -> int:
        return sum(differing == 0 for differing in self.layers.values())

    @property
    def differing_outputs(self) -> int:
        return sum(self.layers.values())

    @property
    def passed(self) -> bool:
        return self.identical == len(self.streams) and self.agreeing == len(self.layers)


class CheckpointResult(BaseModel):
    """All comparisons of one checkpoint. `digest`: of its manifest, or None."""

    label: str
    path: str
    digest: str | None
    contract_layers: int
    layers: int
    comparisons: list[Comparison]

    @property
    def passed(self) -> bool:
        return all(comparison.passed for comparison in self.comparisons)


class TokensReport(BaseModel):
    """The evaluation's result, as its JSON file holds it."""

    evaluation: str = "tokens"
    version: int = VERSION
    p2q: str = p2q.__version__
    contract: int = CONTRACT_VERSION
    kernels: list[str]
    inexact_kernels: dict[str, str]
    max_tokens: int
    environment: dict[str, str]
    command: str
    checkpoints: list[CheckpointResult]


def evaluate_tokens(
    checkpoints: dict[str, Path],
    kernels: list[str],
    prompts: list[str],
    *,
    max_tokens: int,
    command: str,
    stage: Callable[[str], None] | None = None,
) -> TokensReport:
    """Run every checkpoint through every kernel and compare with the first kernel.

    Args:
        checkpoints: {label: directory}.
        kernels: two or more names of the registry. Kernels that are not exact here run as the thing under test.
        prompts: the prompts, submitted together.
        max_tokens: greedy tokens of each answer.
        command: the command that repeats this, for the report.
        stage: told what is being done.

    Raises:
        P2QError: fewer than two kernels, or one named twice.
        KernelError: an unknown kernel.
        EngineError: vLLM failed, or a layer was never compared.
    """
    if len(kernels) < 2 or len(set(kernels)) < len(kernels):
        raise P2QError("nothing to compare", expected="two or more different kernels", got=", ".join(kernels) or "none")
    inexact = {name: result.reason for name in kernels if not (result := probe(name, default_device())).exact}
    results, environment = [], {}
    for label, path in checkpoints.items():
        runs: dict[str, RunResult] = {}
        for kernel in kernels:
            others = [name for name in kernels if name != kernel] if kernel == kernels[0] else []
            spec = RunSpec(model=str(path), kernel=kernel, prompts=prompts, max_tokens=max_tokens, compare_with=others)
            runs[kernel] = run_engine(spec, stage=_prefixed(stage, f"{label}: {kernel}, "))
        base = runs[kernels[0]]
        environment = base.environment
        manifest = read_manifest(path)
        results.append(
            CheckpointResult(
                label=label,
                path=str(path),
                digest=manifest.checkpoint_digest if manifest else None,
                contract_layers=base.proved_layers,
                layers=base.layer_count,
                comparisons=[_compare(base, runs[name]) for name in kernels[1:]],
            )
        )
    return TokensReport(
        kernels=kernels,
        inexact_kernels=inexact,
        max_tokens=max_tokens,
        environment=environment,
        command=command,
        checkpoints=results,
    )


def _prefixed(stage: Callable[[str], None] | None, prefix: str) -> Callable[[str], None] | None:
    return None if stage is None else lambda text: stage(prefix + text)


def first_difference(first: Stream, second: Stream) -> Divergence | None:
    """Where two token streams part, or None where they are identical."""
    if first.tokens == second.tokens:
        return None
    position = next(
        (i for i, (a, b) in enumerate(zip(first.tokens, second.tokens, strict=False)) if a != b),
        min(len(first.tokens), len(second.tokens)),
    )
    return Divergence(
        position=position,
        first=first.pieces[position] if position < len(first.pieces) else None,
        second=second.pieces[position] if position < len(second.pieces) else None,
    )


def _compare(base: RunResult, other: RunResult) -> Comparison:
    agreement = base.layers[other.spec.kernel]
    idle = [name for name, record in agreement.items() if record.outputs == 0]
    if idle or not agreement or len(agreement) != base.layer_count:
        raise EngineError(
            "not every layer was compared",
            file=base.spec.model,
            tensor=idle[0] if idle else None,
            expected=f"outputs of all {base.layer_count} int8 layers",
            got=f"{len(agreement) - len(idle)} layers with outputs",
        )
    return Comparison(
        first=base.spec.kernel,
        second=other.spec.kernel,
        streams=[
            StreamVerdict(
                prompt=prompt, text=a.text, other_text=b.text, tokens=len(a.tokens), divergence=first_difference(a, b)
            )
            for prompt, a, b in zip(base.spec.prompts, base.streams, other.streams, strict=True)
        ],
        layers={name: record.differing for name, record in agreement.items()},
        outputs=sum(record.outputs for record in agreement.values()),
    )
