"""Checkpoints that tests share: a tiny Llama in three states, and small ones made by hand for odd cases."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from p2q.convert import convert
from p2q.quantize import quantize

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"

Tensors = dict[str, torch.Tensor]


def pytest_configure() -> None:
    """Let signals do what they do in a terminal: shells start background jobs with SIGINT (nohup: SIGHUP) ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 Llama with random weights, one shard, and a few files beside the weights."""
    return save_llama(tmp_path_factory.mktemp("llama") / "bf16")


@pytest.fixture(scope="session")
def tiny_w8a8(tiny_llama: Path) -> Path:
    """The same, quantized with absmax scales."""
    target = tiny_llama.with_name("w8a8")
    quantize(tiny_llama, target)
    return target


@pytest.fixture(scope="session")
def tiny_p2q(tiny_w8a8: Path) -> Path:
    """The same, converted by the default rule."""
    target = tiny_w8a8.with_name("p2q")
    convert(tiny_w8a8, target)
    return target


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., Path]:
    """`save_llama`, for tests that want another one."""
    return save_llama


def save_llama(path: Path, *, shard_size: str = "1GB", dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
    """Save a Llama of two layers and hidden size 64 with seeded random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng():
        torch.manual_seed(17)
        model = LlamaForCausalLM(LlamaConfig(**{**sizes, **config})).to(dtype)
    model.save_pretrained(path, max_shard_size=shard_size)
    (path / "chat_template.jinja").write_text("{{ messages }} ünïcode\n")
    (path / "extra").mkdir()
    (path / "extra" / "notes.txt").write_text("carried over\n")
    return path


def w8a8_config(**changes: Any) -> dict[str, Any]:
    """A quantization_config as compressed-tensors writes it for W8A8."""
    scheme = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }
    return {**config, **changes}


def w8a8_tensors() -> Tensors:
    """Two int8 layers of 6 x 8 and 8 x 6, and three tensors that are not quantized."""
    random = torch.Generator().manual_seed(5)

    def int8(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)

    return {
        "model.embed_tokens.weight": torch.randn(16, 8, generator=random).to(torch.bfloat16),
        f"{UP}.weight": int8(6, 8),
        f"{UP}.weight_scale": torch.rand(6, 1, generator=random) * 0.01 + 0.001,
        f"{DOWN}.weight": int8(8, 6),
        f"{DOWN}.weight_scale": torch.rand(8, 1, generator=random) * 0.01 + 0.001,
        "model.norm.weight": torch.randn(8, generator=random).to(torch.float16),
        "lm_head.weight": torch.randn(16, 8, generator=random),
    }


def save_checkpoint(
    path: Path,
    tensors: Tensors,
    *,
    quantization: Any = None,
    config: dict[str, Any] | None = None,
    shards: dict[str, list[str]] | None = None,
    name: str = "model.safetensors",
    metadata: dict[str, str] | None = None,
) -> Path:
    """Save tensors as a checkpoint: one file, or `shards` ({file name: tensors}) with an index.

    `quantization` None gives the W8A8 configuration, False none at all.
    """
    path.mkdir(parents=True)
    settings: dict[str, Any] = {"model_type": "llama", "dtype": "bfloat16", **(config or {})}
    if quantization is not False:
        settings["quantization_config"] = w8a8_config() if quantization is None else quantization
    (path / "config.json").write_text(json.dumps(settings, indent=1))
    (path / "tokenizer.json").write_text("{}")
    metadata = {"format": "pt"} if metadata is None else metadata
    if shards is None:
        save_file(tensors, path / name, metadata)
        return path
    for shard, names in shards.items():
        save_file({tensor: tensors[tensor] for tensor in names}, path / shard, metadata)
    weight_map = {tensor: shard for shard, names in shards.items() for tensor in names}
    index = {"metadata": {"total_size": 1, "note": "kept"}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.fixture
def w8a8() -> Tensors:
    """The tensors of a hand-made W8A8 checkpoint, to change and to save with `make_checkpoint`."""
    return w8a8_tensors()


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """`save_checkpoint` below the test's own folder: make_checkpoint(tensors, "name", ...)."""

    def make(tensors: Tensors | None = None, where: str = "source", **options: Any) -> Path:
        return save_checkpoint(tmp_path / where, w8a8_tensors() if tensors is None else tensors, **options)

    return make


@pytest.fixture
def make_config() -> Callable[..., dict[str, Any]]:
    """`w8a8_config`."""
    return w8a8_config


@dataclass(frozen=True)
class Outcome:
    """What a command line gave."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The one JSON object on standard output."""
        return json.loads(self.out)


@pytest.fixture
def p2q(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """The real entry point in this process: p2q("convert", source, target)."""
    from p2q.cli import main

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["p2q", *map(str, arguments)])
        capfd.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return run


@pytest.fixture
def fork() -> Callable[[Callable[[], object]], int]:
    """Call something in a forked process (torch is loaded there already) and give its process id.

    The process ends with code 0, that of SystemExit, or 99 for another exception.
    """

    def start(call: Callable[[], object]) -> int:
        child = os.fork()
        if child:
            return child
        code = 99
        try:
            torch.set_num_threads(1)  # OpenMP's threads do not outlive a fork
            call()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            os._exit(code)

    return start


@pytest.fixture
def tree() -> Callable[[Path], dict[str, str]]:
    """{relative path: SHA-256, "folder" or "link to ..."} of all below a folder, to compare two of them."""

    def digest(path: Path) -> str:
        if path.is_symlink():
            return f"link to {path.readlink()}"
        return "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()

    return lambda folder: {str(path.relative_to(folder)): digest(path) for path in sorted(folder.rglob("*"))}


@pytest.fixture
def threads() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """A number of torch threads while a block runs."""

    @contextlib.contextmanager
    def use(number: int) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(number)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    return use
