"""Speed and memory of `p2q convert` against `cp` of the same bytes, on the same disk in the same run.

    python benchmarks/convert.py --gigabytes 8 --folder /some/disk

Makes a W8A8 checkpoint of Llama-like layers, copies it with `cp -r` and `sync`, converts it, and prints one table.
`convert` reads and writes every byte, computes the SHA-256 of both, and brings the result to the disk before it gives
it its name; `cp` alone does not, hence the two comparisons. Each is run `--repeat` times, in turn; the best counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SHAPES = {  # (N, K) of an 8B model's layer
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}
LAYERS_PER_SHARD = 7
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def make_checkpoint(folder: Path, gigabytes: float, shapes: dict[str, tuple[int, int]] = SHAPES) -> int:
    """A checkpoint of about that size, in shards of about 1.5 GB. Returns its bytes."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    per_layer = sum(n * k for n, k in shapes.values())
    layers = max(2, round(gigabytes * 1e9 / per_layer))
    shards = -(-layers // LAYERS_PER_SHARD)
    weight_map, total = {}, 0
    random = torch.Generator().manual_seed(1)
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        tensors = {}
        for layer in range(shard * LAYERS_PER_SHARD, min(layers, (shard + 1) * LAYERS_PER_SHARD)):
            for module, (n, k) in shapes.items():
                row = torch.randn(
                    n * k // 64, generator=random
                )  # repeated with a stride, which is all that speed asks for
                weight = (row.repeat(64) * 32).round_().clamp_(-127, 127).to(torch.int8).reshape(n, k)
                tensors[f"model.layers.{layer}.{module}.weight"] = weight
                scale = torch.rand(n, 1, generator=random) * 0.01 + 0.001
                tensors[f"model.layers.{layer}.{module}.weight_scale"] = scale.to(torch.bfloat16)
        if shard == 0:
            width = min(k for _, k in shapes.values())
            tensors["model.embed_tokens.weight"] = torch.randn(8 * width, width, generator=random).to(torch.bfloat16)
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += (folder / name).stat().st_size
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "quantization_config": QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(config))
    return total


def largest_tensor() -> int:
    """Bytes of the largest tensor that `make_checkpoint` writes but the embeddings."""
    return max(n * k for n, k in SHAPES.values())


@dataclass(frozen=True)
class Took:
    """What a command took. peak: bytes of memory, of the one process."""

    seconds: float
    peak: int


def timed(command: list[str], folder: Path, *, sync: bool = False) -> Took:
    """Run a command that makes a folder, and remove that folder again."""
    os.sync()
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    if sync:
        subprocess.run(["sync", *map(str, folder.iterdir()), str(folder)], check=True)
    took = Took(time.perf_counter() - start, usage.ru_maxrss * 1024)
    shutil.rmtree(folder)
    return took


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("options", nargs="*", help="options for p2q convert, after --")
    arguments = parser.parse_args()
    p2q = str(Path(sys.executable).with_name("p2q"))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        source, tiny, copy, target = (Path(folder) / name for name in ("source", "tiny", "copy", "target"))
        # In a process of its own, so that this one stays small: its children's memory counts from its own.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            total = pool.apply(make_checkpoint, (source, arguments.gigabytes))
            pool.apply(make_checkpoint, (tiny, 0, {"self_attn.q_proj": (64, 64)}))
        commands = {
            "cp": ["cp", "-r", str(source), str(copy)],
            "cp and sync": ["cp", "-r", str(source), str(copy)],
            "p2q convert": [p2q, "convert", str(source), str(target), *arguments.options],
            "  of two layers of 64 x 64": [p2q, "convert", str(tiny), str(target)],
        }
        runs: dict[str, list[Took]] = {name: [] for name in commands}
        for _ in range(arguments.repeat):
            for name, command in commands.items():
                runs[name].append(timed(command, Path(command[3]), sync=name == "cp and sync"))
    best = {name: min(took.seconds for took in runs[name]) for name in runs}
    print(f"{total:,} bytes; {os.cpu_count()} cores, {platform.machine()}")
    for name, seconds in best.items():
        rate = "" if name.startswith(" ") else f"{total / seconds / 1e6:9.0f} MB/s"
        print(f"{name:28} {seconds:7.1f} s {rate}")
    *_, converted, start_up = best.values()
    for name in ("cp", "cp and sync"):
        without = best[name] / (converted - start_up)
        print(f"throughput of p2q convert / {name:12} {best[name] / converted:5.2f}, start-up taken off {without:5.2f}")
    peak = max(took.peak for took in runs["p2q convert"])
    allowed = 3 * largest_tensor() + 600_000_000
    print(f"peak memory {peak / 1e6:.0f} MB; 3 x largest tensor + 600 MB = {allowed / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
