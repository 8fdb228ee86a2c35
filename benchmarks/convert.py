"""Speed and memory of `p2q convert` against `cp` of the same bytes, on the same disk in the same run.

    python benchmarks/convert.py --gigabytes 8 --folder /some/disk

Makes a W8A8 checkpoint of Llama-like layers, copies it with `cp -r` and `sync`, converts it, and prints one table.
`convert` reads and writes every byte, computes the SHA-256 of both, and brings the result to the disk before it gives
it its name; `cp` alone does not, hence the two comparisons. Each is run `--repeat` times, in turn; the best counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

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


def make_checkpoint(folder: Path, gigabytes: float) -> int:
    """A checkpoint of about that size, in shards of about 1.5 GB. Returns its bytes."""
    folder.mkdir()
    per_layer = sum(n * k for n, k in SHAPES.values())
    layers = max(2, round(gigabytes * 1e9 / per_layer))
    shards = -(-layers // LAYERS_PER_SHARD)
    weight_map, total = {}, 0
    random = torch.Generator().manual_seed(1)
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        tensors = {}
        for layer in range(shard * LAYERS_PER_SHARD, min(layers, (shard + 1) * LAYERS_PER_SHARD)):
            for module, (n, k) in SHAPES.items():
                row = torch.randn(
                    n * k // 64, generator=random
                )  # repeated with a stride, which is all that speed asks for
                weight = (row.repeat(64) * 32).round_().clamp_(-127, 127).to(torch.int8).reshape(n, k)
                tensors[f"model.layers.{layer}.{module}.weight"] = weight
                scale = torch.rand(n, 1, generator=random) * 0.01 + 0.001
                tensors[f"model.layers.{layer}.{module}.weight_scale"] = scale.to(torch.bfloat16)
        if shard == 0:
            tensors["model.embed_tokens.weight"] = torch.randn(32_000, 4096, generator=random).to(torch.bfloat16)
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += (folder / name).stat().st_size
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "quantization_config": QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(config))
    return total


def largest_tensor() -> int:
    """Bytes of the largest tensor that `make_checkpoint` writes."""
    return max(32_000 * 4096 * 2, *(n * k for n, k in SHAPES.values()))


def timed(command: list[str], folder: Path, *, sync: bool) -> float:
    """Seconds of a command into a folder that is not there yet."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if sync:
        subprocess.run(["sync", *map(str, folder.iterdir()), str(folder)], check=True)
    return time.perf_counter() - start


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("options", nargs="*", help="options for p2q convert, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        source, copy, target = (Path(folder) / name for name in ("source", "copy", "target"))
        total = make_checkpoint(source, arguments.gigabytes)
        convert = [str(Path(sys.executable).with_name("p2q")), "convert", str(source), str(target), *arguments.options]
        plain, durable, converted = [], [], []
        for _ in range(arguments.repeat):
            plain.append(timed(["cp", "-r", str(source), str(copy)], copy, sync=False))
            durable.append(timed(["cp", "-r", str(source), str(copy)], copy, sync=True))
            shutil.rmtree(copy)
            converted.append(timed(convert, target, sync=False))
            shutil.rmtree(target)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    allowed = 3 * largest_tensor() + 600_000_000
    print(f"{total:,} bytes in shards; {os.cpu_count()} cores, {platform.machine()}; {' '.join(convert[:2])}")
    for name, seconds in (("cp", min(plain)), ("cp and sync", min(durable)), ("p2q convert", min(converted))):
        print(f"{name:12} {seconds:7.1f} s {total / seconds / 1e6:9.0f} MB/s")
    print(f"throughput of p2q convert / cp          {min(plain) / min(converted):5.2f}")
    print(f"throughput of p2q convert / cp and sync {min(durable) / min(converted):5.2f}")
    print(f"peak memory {peak / 1e6:.0f} MB; 3 x largest tensor + 600 MB = {allowed / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
