"""The demo, run once as the README says, and engines started in processes of their own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from p2q.eval.engine import engine_environment
from p2q.eval.tokens import TokensReport

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("run_llm.py")


@dataclass(frozen=True)
class Demo:
    """What `make demo` left: its checkpoints, its report and what it printed."""

    quantized: Path
    converted: Path
    report: TokensReport
    page: Path
    output: str


@pytest.fixture(scope="session")
def demo() -> Demo:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("P2Q_") or name == "P2Q_VENV"
    }
    done = subprocess.run(["make", "demo"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    out = ROOT / "build" / "demo"
    return Demo(
        out / "SmolLM2-135M-Instruct-W8A8",
        out / "SmolLM2-135M-Instruct-W8A8-p2q",
        TokensReport.model_validate_json((out / "report.json").read_text()),
        out / "report.html",
        done.stdout,
    )


def run_llm(
    model: Path, prompts: list[str], *, max_tokens: int = 16, env: dict[str, str] | None = None, **options: Any
) -> Any:
    """Load a model in vLLM and answer: (what `run_llm.py` printed as JSON or None, all output)."""
    request = json.dumps({"model": str(model), "prompts": prompts, "max_tokens": max_tokens, "options": options})
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        input=request,
        env={**engine_environment(), **(env or {})},
        capture_output=True,
        text=True,
    )
    lines = [line.removeprefix("result: ") for line in done.stdout.splitlines() if line.startswith("result: ")]
    return (json.loads(lines[0]) if lines else None), done.stdout + done.stderr
