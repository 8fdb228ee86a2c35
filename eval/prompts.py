"""The built-in prompts: prose, arithmetic, code, a list, other languages, dialogue. Eight, as the demo uses them."""

from __future__ import annotations

from pathlib import Path

from p2q.errors import P2QError

PROMPTS = [
    "The capital of France is",
    "The lighthouse keeper climbed the stairs every evening, and",
    "Question: A baker sells 12 loaves an hour. How many loaves does she sell in 5 hours?\nAnswer:",
    'def is_prime(n):\n    """Return True if n is a prime number."""\n',
    "Here are three reasons why people keep bees:\n1.",
    "La mer est calme ce matin et les bateaux",
    "User: What is the difference between weather and climate?\nAssistant:",
    "In 1969, two astronauts walked on the Moon. The first thing they",
]


def read_prompts(path: Path) -> list[str]:
    """Prompts from a UTF-8 text file, one a line; empty lines are skipped.

    Raises:
        P2QError: the file cannot be read, or holds no prompt.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise P2QError(f"not a readable text file ({error})", file=path) from error
    # Not splitlines, which breaks at form feeds and at separators within a prompt too.
    prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise P2QError("no prompts", file=path, expected="one prompt a line", got="only empty lines")
    return prompts
