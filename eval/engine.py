"""One run of the real vLLM engine in a process of its own: token streams, and kernels compared layer by layer.

`python -m p2q.eval.engine SPEC RESULT` is that process. Engines do not share one, so that nothing of a run (thread
pools, caches, a chosen kernel) can reach the next.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from p2q.errors import EngineError, P2QError
from p2q.machine import device_name, one_openmp
from p2q.signals import stoppable

_ERROR_MARK = "p2q-error: "
_STAGE_MARK = "p2q-stage: "
_LARGEST_BATCH = 256


class RunSpec(BaseModel):
    """What to run.

    `compare_with`: kernels to compare with `kernel` in every linear layer, on the run's own activations.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    kernel: str
    prompts: list[str]
    max_tokens: int
    compare_with: list[str] = []


class LayerAgreement(BaseModel):
    """Outputs of one linear layer (a shard of a fused one counts as a layer) that two kernels computed differently."""

    outputs: int = 0
    differing: int = 0


class Stream(BaseModel):
    """One answer. `pieces`: each token decoded by itself."""

    tokens: list[int]
    pieces: list[str]
    text: str
    finish_reason: str | None


class RunResult(BaseModel):
    """A run: its streams in the order of the prompts, and {kernel: {layer: agreement}} for each compared kernel."""

    spec: RunSpec
    streams: list[Stream]
    layers: dict[str, dict[str, LayerAgreement]]
    layer_count: int
    proved_layers: int
    environment: dict[str, str]


def run_engine(spec: RunSpec, *, stage: Callable[[str], None] | None = None) -> RunResult:
    """Run an engine in a process of its own.

    Args:
        stage: told what the engine is doing.

    Raises:
        EngineError: the engine failed; the message holds its reason and the file with its whole output.
    """
    with tempfile.TemporaryDirectory(prefix="p2q-engine-") as folder:
        spec_path, result_path = Path(folder) / "spec.json", Path(folder) / "result.json"
        spec_path.write_text(spec.model_dump_json(), encoding="utf-8")
        lines = []
        with (
            stoppable(),
            subprocess.Popen(
                [sys.executable, "-m", "p2q.eval.engine", str(spec_path), str(result_path)],
                env=engine_environment(),
                stdin=subprocess.PIPE,  # its end tells the engine that this process is gone
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as process,
        ):
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    lines.append(line)
                    if stage is not None and line.startswith(_STAGE_MARK):
                        stage(line.removeprefix(_STAGE_MARK).strip())
            except BaseException:
                process.terminate()
                raise
        if process.returncode or not result_path.is_file():
            raise _failure(spec, lines, process.returncode)
        return RunResult.model_validate_json(result_path.read_text(encoding="utf-8"))


def engine_environment() -> dict[str, str]:
    """The variables of an engine's process: one process, no telemetry, a small cache unless told otherwise."""
    defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false"}
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    # The kernel and the mode come with the run's specification alone.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("P2Q_")}
    return {**defaults, **inherited, **fixed, **one_openmp()}


def _failure(spec: RunSpec, lines: list[str], code: int) -> EngineError:
    known = next(
        (line.removeprefix(_ERROR_MARK).strip() for line in reversed(lines) if line.startswith(_ERROR_MARK)), None
    )
    handle, log = tempfile.mkstemp(prefix="p2q-engine-", suffix=".log")
    with os.fdopen(handle, "w", encoding="utf-8") as f:
        f.writelines(lines)
    reason = known or (
        f"killed by signal {-code}; out of memory?"
        if code < 0
        else next((x.strip() for x in reversed(lines) if x.strip()), "")
    )
    return EngineError(
        f"vLLM failed with kernel {spec.kernel}: {reason}", file=spec.model, hint=f"Its output is in {log}"
    )


def main(spec_path: str, result_path: str) -> None:
    """The engine's process. It ends with the one that started it, however that ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    spec = RunSpec.model_validate_json(Path(spec_path).read_text(encoding="utf-8"))
    try:
        result = _run(spec)
    except P2QError as error:
        print(f"{_ERROR_MARK}{error}", flush=True)
        sys.exit(error.exit_code)
    except Exception as error:
        # vLLM may wrap an error of p2q: the first cause says most.
        cause: BaseException = error
        while cause.__cause__ is not None or cause.__context__ is not None:
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        known = cause if isinstance(cause, P2QError) else error
        print(f"{_ERROR_MARK}{' '.join(str(known).split()) or type(known).__name__}", flush=True)
        raise
    Path(result_path).write_text(result.model_dump_json(), encoding="utf-8")


def _end_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
        pass
    os._exit(1)


def _run(spec: RunSpec) -> RunResult:
    _say("starting")
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    from p2q import vllm_api

    tokenizer = AutoTokenizer.from_pretrained(spec.model)
    longest = max(len(tokenizer(prompt).input_ids) for prompt in spec.prompts)
    llm = LLM(
        spec.model,
        quantization="p2q",
        additional_config={"p2q": {"kernel": spec.kernel, "evaluate": True}},
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
        # Room for the longest prompt, its answer, and the one token more when layers are compared.
        max_model_len=longest + spec.max_tokens + 1,
        max_num_seqs=min(len(spec.prompts), _LARGEST_BATCH),
        seed=0,
        disable_log_stats=True,
    )
    _say("generating")
    sampling = SamplingParams(temperature=0, max_tokens=spec.max_tokens)
    outputs = llm.generate(spec.prompts, sampling, use_tqdm=False)
    streams = [
        Stream(
            tokens=list(answer.token_ids),
            pieces=[tokenizer.decode([token]) for token in answer.token_ids],
            text=answer.text,
            finish_reason=answer.finish_reason,
        )
        for answer in (output.outputs[0] for output in outputs)
    ]
    layers: dict[str, dict[str, LayerAgreement]] = {}
    if spec.compare_with:
        _say("comparing layers")
        found: list[dict[str, dict[str, LayerAgreement]]] = llm.apply_model(
            lambda model: _watch(model, spec.compare_with)
        )
        layers = found[0]
        # The prompts and their answers once more, as prefill: real activations, and each token counted once.
        requests = [
            {"prompt_token_ids": [*(output.prompt_token_ids or []), *stream.tokens]}
            for output, stream in zip(outputs, streams, strict=True)
        ]
        llm.generate(requests, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    loaded = llm.apply_model(_loaded_layers)[0]
    return RunResult(
        spec=spec,
        streams=streams,
        layers=layers,
        layer_count=sum(len(layer.shards) for layer in loaded),
        proved_layers=sum(len(layer.shards) for layer in loaded if layer.proved),
        environment={
            "vllm": vllm_api.vllm_version(),
            "torch": torch.__version__,
            "device": device_name(),
            "dtype": "bfloat16",
        },
    )


def _say(stage: str) -> None:
    print(f"{_STAGE_MARK}{stage}", flush=True)


def _loaded_layers(model: torch.nn.Module) -> list[Any]:
    found = [module.p2q for module in model.modules() if hasattr(module, "p2q")]
    return found + [product for module in model.modules() for product in getattr(module, "p2q_experts", [])]


def _watch(model: torch.nn.Module, kernels: list[str]) -> dict[str, dict[str, LayerAgreement]]:
    """Compare, from now on, every p2q layer's output with what other kernels make of the same input."""
    agreement: dict[str, dict[str, LayerAgreement]] = {name: {} for name in kernels}
    for loaded in _loaded_layers(model):
        for records in agreement.values():
            records.update({shard: LayerAgreement() for shard, _ in loaded.shards})
    for module in model.modules():
        if hasattr(module, "p2q"):
            _watch_linear(module, agreement)
        elif hasattr(module, "p2q_experts"):
            _watch_experts(module, agreement)
    return agreement


def _watch_linear(module: Any, agreement: dict[str, dict[str, LayerAgreement]]) -> None:
    from p2q.kernels import get_kernel
    from p2q.ops import int8_linear

    loaded = module.p2q
    weight, scale = module.weight.data, module.weight_scale.data.reshape(-1)
    prepared = {name: get_kernel(name).prepare(weight, scale, module.p2q_dtype) for name in agreement}

    def hook(_module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        got = output[0] if isinstance(output, tuple) else output
        bias = getattr(module, "bias", None) if not getattr(module, "skip_bias_add", False) else None
        for name, records in agreement.items():
            other = int8_linear(
                inputs[0], prepared[name], bias, name, contract_bias=loaded.proved, input_scale=loaded.input_scale
            )
            _record(records, loaded.shards, got, other)

    module.register_forward_hook(hook)


def _watch_experts(module: Any, agreement: dict[str, dict[str, LayerAgreement]]) -> None:
    """vLLM calls the method and not the module. Both products are compared on the inputs that the served one gets."""
    from p2q import contract
    from p2q.kernels import get_kernel
    from p2q.ops import gated

    method = module.quant_method
    served = method.apply
    weights = [(module.w13_weight, module.w13_weight_scale), (module.w2_weight, module.w2_weight_scale)]
    prepared = {
        name: [
            get_kernel(name).prepare_grouped(weight.data, scale.data[..., 0].contiguous(), module.p2q_dtype)
            for weight, scale in weights
        ]
        for name in agreement
    }

    def apply(*, layer: Any, x: torch.Tensor, topk_ids: torch.Tensor, **others: Any) -> torch.Tensor:
        group = topk_ids.reshape(-1).to(torch.int64)
        rows = x.repeat_interleave(topk_ids.shape[1], dim=0)
        for i, loaded in enumerate(module.p2q_experts):
            q_x, s_x = contract.quantize_per_token(rows)

            operands = (q_x, s_x, group, loaded.experts, module.p2q_dtype)
            rows = get_kernel(loaded.kernel).apply_grouped(loaded.prepared, *operands)
            for name, records in agreement.items():
                other = get_kernel(name).apply_grouped(prepared[name][i], *operands)
                each = len(loaded.shards) // loaded.experts
                for expert in range(loaded.experts):
                    chosen = group == expert
                    shards = loaded.shards[expert * each : (expert + 1) * each]
                    _record(records, shards, rows[chosen], other[chosen])
            rows = gated(rows) if i == 0 else rows
        result: torch.Tensor = served(layer=layer, x=x, topk_ids=topk_ids, **others)
        return result

    method.apply = apply


def _record(
    records: dict[str, LayerAgreement], shards: list[tuple[str, int]], got: torch.Tensor, other: torch.Tensor
) -> None:
    """Count the outputs of each shard, side by side in the last dimension, that differ."""
    start = 0
    for shard, width in shards:
        part = slice(start, start + width)
        records[shard].outputs += got[..., part].numel()
        records[shard].differing += _count_different(got[..., part], other[..., part])
        start += width


def _count_different(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements whose bits differ."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return int((a.contiguous().view(integer) != b.contiguous().view(integer)).sum())


if __name__ == "__main__":
    main(*sys.argv[1:])
