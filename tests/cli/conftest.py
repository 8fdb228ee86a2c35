"""What the tests of the command line share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Tree = Callable[[Path], dict[str, str]]
P2Q = Callable[..., Any]


@pytest.fixture
def refused(p2q: P2Q, tmp_path: Path, tree: Tree) -> Callable[..., str]:
    """Run a command that must be refused; gives its one line. The whole of tmp_path must stay as it was."""

    def run(*arguments: object) -> str:
        before = tree(tmp_path)
        found = p2q(*arguments)
        assert found.code == 2, found
        assert found.out == ""
        assert found.err.startswith("error: ")
        assert found.err.count("\n") == 1
        assert "Traceback" not in found.err
        assert tree(tmp_path) == before
        return str(found.err.removeprefix("error: ").rstrip("\n"))

    return run
