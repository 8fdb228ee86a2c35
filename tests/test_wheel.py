"""The package is whole: as a wheel, and as the editable install that the tests run from."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK = """
import importlib, importlib.metadata, pathlib, p2q
for name in "serve serve.launch eval eval.tokens eval.report patches kernels cli".split():
    importlib.import_module(f"p2q.{name}")
from p2q.eval.report import _template
assert "<!doctype html>" in _template()
points = importlib.metadata.distribution("p2q").entry_points
assert points.select(group="console_scripts", name="p2q")
assert points.select(group="vllm.general_plugins", name="p2q")[0].value == "p2q.plugin:register"
print(pathlib.Path(p2q.__file__).resolve())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (found,) = out.glob("*.whl")
    return found


def test_wheel_holds_all_parts_and_imports_without_the_source(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    # -P and another folder: nothing of the source tree is on the path before the unpacked wheel.
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHECK],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "site")


def test_wheel_has_no_top_level_packages_but_p2q(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"p2q"}


def test_editable_install_imports_from_the_source(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-P", "-c", CHECK], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert Path(done.stdout.strip()).is_relative_to(ROOT)
