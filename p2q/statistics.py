"""Statistics of what the int8 layers of a checkpoint multiply, collected once for `feedback`.

For each layer H = X^T X, where the rows of X are its inputs over a text: quantized per token, as the contract says, and
dequantized. Layers that read the same input (queries, keys and values; gate and up) share one H.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from p2q.checkpoint import Checkpoint, ShardWriter, bytes_of, digest_of_tensors, header_digest, lay_out, open_checkpoint
from p2q.contract import quantize_per_token
from p2q.errors import CheckpointError, P2QError, SchemeError, TargetError
from p2q.layers import Layer, check_not_fused
from p2q.manifest import digest_of_files, sha256_of
from p2q.scheme import quantized_layers
from p2q.signals import stoppable
from p2q.target import explained, real_path, sync

Progress = Callable[[int, int], None]
"""Called with (windows done, windows in all)."""

WINDOW = 512
_FORMAT = 1


@dataclass(frozen=True)
class Collected:
    """What was collected: windows and tokens that were read, layers, and how many different inputs they have."""

    windows: int
    tokens: int
    layers: int
    groups: int


def collect(
    source: Path,
    target: Path,
    text: Path,
    *,
    windows: int = 128,
    window: int = WINDOW,
    device: str = "cpu",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Collected:
    """Run a W8A8 checkpoint over a text and write its statistics to a file, which is afterwards complete or as it was.

    The model is run in float32 by transformers, its int8 layers on quantized activations.

    Args:
        source: a compressed-tensors int-quantized W8A8 checkpoint, with its tokenizer.
        target: the file to make.
        text: UTF-8.
        windows: how many pieces of the text to read, from its beginning and without overlap. Fewer where it is shorter.
        window: tokens of each, at most as many as the model has positions for.
        device: where the model runs: "cpu", or a device of torch such as "cuda".
        overwrite: replace an existing file.
        progress: told of windows done.

    Raises:
        CheckpointError: not a checkpoint that transformers runs, without a tokenizer, or its activations overflow.
        SchemeError: not a scheme that p2q converts, or int8 layers that are no modules of their own.
        P2QError: the text cannot be read, is too short, or does not reach every layer.
        TargetError: the target exists or cannot be written.
    """
    checkpoint = open_checkpoint(source)
    _check_file(target, source, overwrite)
    layers = quantized_layers(checkpoint)
    for layer in layers:
        check_not_fused(checkpoint, layer, "statistics of experts in one tensor are not collected")
    content = _read(text)
    model, tokenizer = _load(checkpoint, device)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or window
    ids, begin = _tokens(content, tokenizer)
    vocabulary = model.get_input_embeddings().num_embeddings
    if max(ids, default=0) >= vocabulary:
        expected, got = f"tokens below {vocabulary}", str(max(ids))
        raise CheckpointError("the tokenizer is not the model's", file=source, expected=expected, got=got)
    step = min(window, positions) - len(begin)
    if len(ids) < step or step < 1:
        raise P2QError("the text is too short", file=text, expected=f"{step} tokens or more", got=str(len(ids)))
    pieces = torch.tensor([begin + ids[at : at + step] for at in range(0, len(ids) - step + 1, step)[:windows]])
    inputs = _Inputs()
    for layer in layers:
        try:
            module = model.get_submodule(layer.name)
        except AttributeError as error:
            raise SchemeError(
                "transformers has no module of that name", file=checkpoint.file_of(layer.weight), tensor=layer.weight
            ) from error
        module.register_forward_pre_hook(inputs.hook(layer.name))
    with torch.no_grad():
        for done, piece in enumerate(pieces, 1):
            model(input_ids=piece.reshape(1, -1).to(device), use_cache=False)
            if progress is not None:
                progress(done, len(pieces))
    inputs.check(checkpoint, layers, text)
    about = {
        "format": _FORMAT,
        "layers": inputs.leader,
        "windows": len(pieces),
        "tokens": pieces.numel(),
        "source": _identity(checkpoint, layers),
    }
    _write(target, source, inputs.sums, about, overwrite)
    return Collected(len(pieces), pieces.numel(), len(layers), len(inputs.sums))


class Statistics:
    """A file of statistics, opened for a checkpoint. path: of the file. digest: SHA-256 of its bytes."""

    def __init__(self, path: Path, checkpoint: Checkpoint, layers: list[Layer]) -> None:
        """Check that the file was made from this checkpoint and has what each layer needs.

        Raises:
            CheckpointError: it cannot be read, or is not this checkpoint's.
        """
        self.path = path
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("p2q", "null"))
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                shapes = {name: (found.get_dtype(), found.get_shape()) for name, found in slices.items()}
            self.digest = sha256_of(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"not a file of statistics ({error})", file=path) from error
        if not isinstance(about, dict) or not isinstance(about.get("layers"), dict):
            raise CheckpointError("not a file of statistics", file=path, expected="one that `p2q calibrate` made")
        if about.get("format") != _FORMAT:
            expected, got = f"format {_FORMAT}", str(about.get("format"))
            raise CheckpointError("statistics of another version", file=path, expected=expected, got=got)
        digest = _identity(checkpoint, layers)
        if about.get("source") != digest:
            raise CheckpointError(
                "the statistics of another checkpoint",
                file=path,
                expected=f"those of {checkpoint.path} ({digest[:12]})",
                got=str(about.get("source"))[:12],
                hint="Collect them with `p2q calibrate`",
            )
        self._tensors: dict[str, str] = about["layers"]
        for layer in layers:
            k = checkpoint.tensors[layer.weight].shape[-1]
            found = shapes.get(self._tensors.get(layer.name, ""))
            if found != ("F32", [k, k]):
                got = f"{found[0]} of shape {found[1]}" if found else "none"
                expected = f"F32 of shape {[k, k]}"
                raise CheckpointError("no statistics", file=path, tensor=layer.name, expected=expected, got=got)

    def of(self, layer: Layer) -> torch.Tensor:
        """H of a layer's inputs: (K, K) float64."""
        with safe_open(self.path, framework="pt") as file:
            found: torch.Tensor = file.get_tensor(self._tensors[layer.name])
        return found.to(torch.float64)


class _Inputs:
    """Quantizes what goes into layers and adds it up.

    sums: {layer: (K, K) float64}, of the first layer of each group. leader: which that is of each layer.
    """

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.leader: dict[str, str] = {}
        self._calls: dict[str, int] = {}
        self._last: tuple[torch.Tensor, torch.Tensor, str] | None = None

    def hook(self, name: str) -> Callable[[torch.nn.Module, tuple[Any, ...]], tuple[torch.Tensor] | None]:
        """A hook that is called before a layer, and replaces its input."""

        def before(_module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[torch.Tensor] | None:
            if len(args) != 1 or not args[0].numel():  # an expert without a token
                return None
            if self._last is None or self._last[0] is not args[0]:
                self._last = args[0], self._add(name, args[0]), name
            _, values, leader = self._last
            if self.leader.setdefault(name, leader) != leader:
                raise SchemeError("the layer shares its input with different ones at different times", tensor=name)
            self._calls[name] = self._calls.get(name, 0) + 1
            return (values,)

        return before

    def _add(self, name: str, x: torch.Tensor) -> torch.Tensor:
        levels, scale = quantize_per_token(x.reshape(-1, x.shape[-1]))
        values = levels.to(torch.float32) * scale
        rows = values.to(torch.float64)
        if name in self.sums:
            self.sums[name].addmm_(rows.t(), rows)
        else:
            self.sums[name] = rows.t() @ rows
        return values.reshape(x.shape).to(x.dtype)

    def check(self, checkpoint: Checkpoint, layers: list[Layer], text: Path) -> None:
        """Refuse sums that are not there, not all of a layer's inputs, or not finite in float32."""
        missing = [layer.name for layer in layers if layer.name not in self.leader]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise P2QError(
                "no token of the text reached the layer",
                file=text,
                tensor=", ".join(missing[:3]) + more,
                hint="Give a longer text, or more windows",
            )
        for name, leader in self.leader.items():
            if self._calls[name] != self._calls[leader]:
                raise SchemeError(f"the layer shares only some inputs with {leader}", tensor=name)
        for name, total in self.sums.items():
            if not torch.isfinite(total.to(torch.float32)).all():
                raise CheckpointError(
                    "bad inputs of the layer", file=checkpoint.path, tensor=name, expected="finite sums of squares"
                )


def _identity(checkpoint: Checkpoint, layers: list[Layer]) -> str:
    """A digest that differs between checkpoints, also of one architecture: their scales do. No weight is read."""
    scales = digest_of_tensors(checkpoint, [layer.scale for layer in layers])
    return digest_of_files({"headers": header_digest(checkpoint), "scales": scales})


def _load(checkpoint: Checkpoint, device: str) -> tuple[Any, Any]:
    """The model, decompressed, and the tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False, local_files_only=True)
        if not tokenizer("a b c").get("input_ids"):  # what some classes are without files
            raise ValueError("it knows no words")
    except Exception as error:  # each class of tokenizer fails in its own way
        raise CheckpointError(f"no tokenizer that can be loaded ({error})", file=checkpoint.path) from error
    try:
        # compressed-tensors draws its own progress bars, here and in the first call, which decompresses the weights.
        with contextlib.redirect_stderr(io.StringIO()), torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(
                checkpoint.path, dtype=torch.float32, trust_remote_code=False, local_files_only=True
            )
            model.to(device).eval()
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
    except Exception as error:
        raise CheckpointError(f"transformers cannot run the model ({error})", file=checkpoint.path) from error
    return model, tokenizer


def _read(text: Path) -> str:
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise P2QError(f"the text cannot be read ({error})", file=text, expected="a file in UTF-8") from error


def _tokens(content: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens of a text, and the one that the tokenizer begins texts with, if any."""
    bos = tokenizer.bos_token_id
    begin = [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []
    return tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"], begin


def _check_file(target: Path, source: Path, overwrite: bool) -> None:
    if target.is_dir():
        raise TargetError("the target is a directory", file=target, expected="the name of a file")
    if os.path.lexists(target) and not overwrite:
        raise TargetError("the target exists", file=target, hint="Give --overwrite to replace it")
    final = real_path(target)
    if final.is_relative_to(real_path(source)):  # whose weights it would be taken for
        raise TargetError("the target lies inside the source", file=target)
    if not final.parent.is_dir():
        raise TargetError("the target's folder is not there", file=final.parent)


def _write(target: Path, source: Path, sums: dict[str, torch.Tensor], about: dict[str, Any], overwrite: bool) -> None:
    sizes = {name: tuple(total.shape) for name, total in sums.items()}
    layout = lay_out(
        {name: ("F32", shape, 4 * shape[0] * shape[1]) for name, shape in sizes.items()},
        {"p2q": json.dumps(about, sort_keys=True)},
    )
    with _new_file(target, source, overwrite) as path, ShardWriter(path, layout.header, layout.size) as writer:
        for name, total in sums.items():
            writer.write(layout.offsets[name], bytes_of(total.to(torch.float32).cpu()))


@contextlib.contextmanager
def _new_file(target: Path, source: Path, overwrite: bool) -> Iterator[Path]:
    """A file beside the target that becomes the target when the block ends well, and is removed otherwise."""
    final = real_path(target)
    work = final.with_name(f".{final.name[:50]}.p2q-{secrets.token_hex(6)}")
    with stoppable() as signals:
        try:
            yield work
            sync(work)
            _check_file(target, source, overwrite)  # it may have appeared meanwhile
            os.replace(work, final)
            with contextlib.suppress(OSError):
                sync(final.parent)
        except OSError as error:
            raise explained(error, target, source) from error
        finally:
            signals.unwind = False
            work.unlink(missing_ok=True)
