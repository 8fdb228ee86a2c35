"""`p2q serve` with the real client."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import APIConnectionError, OpenAI

from .conftest import Demo

START_SECONDS = 240


@pytest.fixture(scope="module")
def server(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OpenAI, str]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    options = [
        "--port",
        str(port),
        "--max-model-len",
        "512",
        "--enforce-eager",
        "--dtype",
        "bfloat16",
        "--served-model-name",
        "smollm2",
    ]
    command = [
        sys.executable,
        "-c",
        "from p2q.cli import main; main()",
        "serve",
        str(demo.converted),
        "--kernel",
        "triton-order",
        *options,
    ]
    with (
        log.open("w") as out,
        subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
        ) as process,
    ):
        try:
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            wait_until_ready(client, process, log)
            yield client, log.read_text()
        finally:
            process.terminate()


def wait_until_ready(client: OpenAI, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            client.models.list()
            return
        except APIConnectionError:
            time.sleep(1)
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")


def test_server_answers_completions_with_the_capital(server: tuple[OpenAI, str], demo: Demo) -> None:
    client, _ = server
    expected = demo.report.checkpoints[1].comparisons[0].streams[0]
    answer = client.completions.create(model="smollm2", prompt=expected.prompt, max_tokens=8, temperature=0)
    assert answer.choices[0].text.startswith(" Paris")


def test_server_answers_chat_and_streams_the_same_text(server: tuple[OpenAI, str]) -> None:
    client, _ = server
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"model": "smollm2", "messages": messages, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**options, stream=True)]
    assert whole
    assert "".join(pieces) == whole


def test_server_listens_on_the_loopback_address_alone(server: tuple[OpenAI, str]) -> None:
    client, log = server
    assert f"http://127.0.0.1:{client.base_url.port}" in log
    others = [address[4][0] for address in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    for address in {a for a in others if not a.startswith("127.")}:
        with socket.socket() as s:
            assert s.connect_ex((address, client.base_url.port)) != 0
