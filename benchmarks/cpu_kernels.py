"""Speed of the exact int8 kernels of a CPU, as ratios to oneDNN where it saturates, in the same run.

    python benchmarks/cpu_kernels.py --threads 1 --isa avx2

The baseline is vLLM's oneDNN held to instructions without VNNI, where its product is fast and not exact; the probe has
to find it so. With `--isa avx2` every kernel is held to AVX2. With `--isa native` the exact kernels have the whole CPU,
and the baseline AVX-512 where the CPU has it: oneDNN's fastest that saturates. Each kernel runs in a process of its
own; they take turns, and a ratio is the median over the rounds. Shapes are those of SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}  # (N, K)
LAYERS = 30
TOKENS = (1, 8, 64, 512)
CASES = [((name,), m, 1) for m in TOKENS for name in SHAPES] + [(tuple(SHAPES), 1, LAYERS)]
"""Which products, M, and over how many sets of weights."""

AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+movbe",
}
BASELINE = {"avx2": AVX2, "native": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}}
SECONDS = 0.03


def serve(connection: Connection, kernel_name: str, threads: int) -> None:
    """In a process of its own: say what the probe finds, then time the cases asked for, in seconds a pass."""
    import torch

    from p2q.kernels import get_kernel
    from p2q.kernels.probe import probe

    torch.set_num_threads(threads)
    found = probe(kernel_name)
    connection.send((found.runs, found.exact, found.reason))
    kernel = get_kernel(kernel_name)
    random = torch.Generator().manual_seed(1)
    weights = {
        name: [
            kernel.prepare(
                torch.randint(-127, 128, shape, generator=random).to(torch.int8),
                torch.full((shape[0],), 2.0**-10),
                torch.bfloat16,
            )
            for _ in range(LAYERS)
        ]
        for name, shape in SHAPES.items()
    }
    while (case := connection.recv()) is not None:
        names, m, layers = case
        products = []
        for layer in range(layers):
            for name in names:
                q_x = torch.randint(-127, 128, (m, SHAPES[name][1]), generator=random).to(torch.int8)
                products.append((weights[name][layer], q_x, torch.rand(m, 1, generator=random)))

        def run(products: list[Any] = products) -> None:
            for prepared, q_x, s_x in products:
                kernel.apply(prepared, q_x, s_x, None, torch.bfloat16)

        run()
        passes, start = 0, time.perf_counter()
        while (took := time.perf_counter() - start) < SECONDS or passes < 3:
            run()
            passes += 1
        connection.send(took / passes)


class Arm:
    """A kernel in a process with its own environment."""

    def __init__(self, kernel: str, threads: int, environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, kernel, threads), daemon=True)
        before = dict(os.environ)
        os.environ.update({"OMP_NUM_THREADS": str(threads), **environment})
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        other.close()
        self.runs, self.exact, self.reason = self._connection.recv()

    def time(self, case: Any) -> float:
        """Seconds of one pass over a case."""
        self._connection.send(case)
        return float(self._connection.recv())

    def stop(self) -> None:
        """End the process."""
        self._connection.send(None)
        self._process.join()


def label(case: Any) -> str:
    """A case in words."""
    names, m, layers = case
    if layers > 1:
        return f"{layers} layers, M = {m}"
    n, k = SHAPES[names[0]]
    return f"{names[0]} {n} x {k}, M = {m}"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--isa", choices=list(BASELINE), default="avx2")
    parser.add_argument("--json", type=Path, help="write the ratios here as well")
    arguments = parser.parse_args()
    limits = AVX2 if arguments.isa == "avx2" else {}
    baseline = Arm("onednn", arguments.threads, BASELINE[arguments.isa])
    if not baseline.runs or baseline.exact:
        raise SystemExit(f"no baseline, oneDNN does not saturate: {baseline.reason}")
    print(f"baseline: oneDNN under {BASELINE[arguments.isa]['ONEDNN_MAX_CPU_ISA']}, not exact: {baseline.reason}")
    arms: dict[str, Arm] = {}
    for name in ("p2q", "onednn"):
        arm = Arm(name, arguments.threads, limits)
        if arm.exact:
            arms[name] = arm
        else:
            print(f"{name} is left out: {arm.reason}")
            arm.stop()
    ratios: dict[str, dict[str, list[float]]] = {label(case): {name: [] for name in arms} for case in CASES}
    for _ in range(arguments.rounds):
        for case in CASES:
            reference = baseline.time(case)
            for name, arm in arms.items():
                ratios[label(case)][name].append(reference / arm.time(case))
    for arm in (baseline, *arms.values()):
        arm.stop()
    print(f"\nspeed / speed of that oneDNN; {arguments.threads} threads, {arguments.isa}; median (lowest to highest)")
    print(" " * 30 + "".join(f"{name:>26}" for name in arms))
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for case_label, of_arms in ratios.items():
        figures[case_label] = {
            name: {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
            for name, values in of_arms.items()
        }
        cells = [f"{f['median']:.2f} ({f['lowest']:.2f} to {f['highest']:.2f})" for f in figures[case_label].values()]
        print(f"{case_label:30}" + "".join(f"{cell:>26}" for cell in cells))
    if arguments.json:
        report = {"threads": arguments.threads, "isa": arguments.isa, "rounds": arguments.rounds, "ratios": figures}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
