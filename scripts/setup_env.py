"""Makes the virtual environment of this checkout: in .venv/, or in the folder that $P2Q_VENV names.

Uses the standard library only, and pip as the user has configured it. A stamp in the environment lets the next run
return at once. It reads "running" while packages are installed, so that a set-up which was killed is made anew.
"""

# Written in the syntax of Python 3.6, so that an old Python too gets as far as the line that says what is needed.
import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / (os.environ.get("P2Q_VENV") or ".venv")
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup.stamp"
LOG = VENV / "setup.log"
RUNNING = "running"

OLDEST, NEWEST = (3, 11), (3, 13)
GB_FRESH, GB_UPDATE = 5, 1

PIP = ["pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
STEPS = [
    ("requirements/cpu.txt", [*PIP, "-r", "requirements/cpu.txt"]),
    ("requirements/dev.txt", [*PIP, "-r", "requirements/dev.txt"]),
    ("requirements/nodeps.txt", [*PIP, "--no-deps", "-r", "requirements/nodeps.txt"]),
    # Built with the setuptools of cpu.txt: an isolated build would ask the index for another one.
    ("p2q (editable)", [*PIP, "--no-deps", "--no-build-isolation", "-e", "."]),
]

# What the log of a failed step says, most certain cause first; the group of a pattern fills its text.
CAUSES = [
    (r"No space left on device", "the disk is full: free some GB, in the folder for temporary files too"),
    (r"Permission denied|Read-only file system", "a folder may not be written to: the log names it"),
    (r"requirement (\S+) .*\(from versions: \d", "the package index has no {}: point pip at an index that has it"),
    (r"Retrying \(Retry|Max retries|timed out", "the package index does not answer: check network, proxy and pip.conf"),
    (r"distribution found for (\S+)", "no package index that pip may use has {}: check network, proxy and pip.conf"),
]


class SetupError(Exception):
    """One line: what failed and what to do."""


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"setup: {text}", flush=True)


def check_machine() -> None:
    """Refuse a Python or a machine that vLLM's CPU build does not run on."""
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        raise SetupError(
            f"Python {platform.python_version()} cannot be used: run it with Python 3.11 (tested), 3.12 or 3.13, "
            "for example `make setup PYTHON=python3.11`"
        )
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
        raise SetupError(
            f"{platform.system()} on {platform.machine()} cannot be used: vLLM's CPU build needs Linux on x86_64 or "
            "aarch64, use such a machine or the Dockerfile"
        )


def wanted_stamp() -> str:
    """Digest of all that the environment is made from."""
    digest = hashlib.sha256(f"{sys.version} {platform.machine()} {ROOT} {VENV}".encode())
    for path in [*sorted((ROOT / "requirements").glob("*.txt")), ROOT / "pyproject.toml", ROOT / "setup.py"]:
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


def read_stamp() -> str:
    """What the last set-up wrote; empty where there was none or its Python is gone."""
    return STAMP.read_text() if STAMP.exists() and PYTHON.exists() else ""


def take_lock() -> int:
    """Wait until no other set-up of this checkout runs; the lock ends with this process and its pip."""
    import fcntl

    folder = os.open(str(ROOT / "requirements"), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting for another set-up of this checkout")
        fcntl.flock(folder, fcntl.LOCK_EX)
    except OSError:
        pass  # some network file systems have no locks
    return folder


def check_folder() -> None:
    """Refuse a folder that cannot be written to, is too small, or holds something else."""
    if VENV.is_dir() and not (VENV / "pyvenv.cfg").exists() and any(VENV.iterdir()):
        raise SetupError(f"{VENV} holds no virtual environment: remove it, or name another folder in P2Q_VENV")
    VENV.mkdir(parents=True, exist_ok=True)
    for folder in (ROOT, VENV):
        if not os.access(str(folder), os.W_OK | os.X_OK):
            raise SetupError(f"no write permission for {folder}: give it, or copy the checkout to a folder of yours")
    free = shutil.disk_usage(str(VENV)).free / 1e9
    need = GB_UPDATE if (VENV / "bin" / "vllm").exists() else GB_FRESH
    if free < need:
        raise SetupError(f"{free:.1f} GB free at {VENV}, {need} GB needed: free some, or set P2Q_VENV to another disk")


def python_of_venv() -> str:
    """'3.11 pip', '3.11' where pip is missing, empty where nothing runs."""
    code = "import sys, importlib.util as u; print('%d.%d' % sys.version_info[:2], 'pip' * bool(u.find_spec('pip')))"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output([str(PYTHON), "-c", code], stderr=subprocess.DEVNULL).decode().strip()
    return ""


def make_venv(interrupted: bool) -> bool:
    """Create the environment unless a good one stands there; True where pip is still missing in it."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    found = "" if interrupted else python_of_venv()
    if found == f"{here} pip":
        return False
    try:
        import ensurepip  # noqa: F401
        import venv
    except ImportError:
        raise SetupError(f"this Python has no venv module: install it (on Debian: python{here}-venv)") from None
    say(f"making {VENV} with Python {platform.python_version()}")
    venv.create(str(VENV), clear=found != here, symlinks=True)
    return True


def run(title: str, arguments: "list[str]", lock: int) -> None:
    """Run a module of the environment's Python with its output in the log."""
    say(f"installing {title}")
    with open(str(LOG), "ab+") as log:
        log.write(f"== {title}\n".encode())
        log.flush()
        start = log.tell()
        command = [str(PYTHON), "-m", *arguments]
        code = subprocess.call(
            command, cwd=str(ROOT), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, pass_fds=(lock,)
        )
        if code == 0:
            return
        log.seek(start)
        output = log.read().decode(errors="replace")
    if code > 0 and "Installing collected packages" not in output:
        STAMP.write_text("failed")  # every package that is there is whole: the next run goes on from here
    matches = ((re.search(pattern, output), text) for pattern, text in CAUSES)
    causes = [text.format(*match.groups()) for match, text in matches if match]
    cause = causes[0] if causes else f"exit code {code}: see the end of the log"
    raise SetupError(f"installing {title} failed: {cause}; all output is in {LOG}")


def set_up() -> None:
    """Bring the environment to the state that the stamp stands for."""
    check_machine()
    stamp = wanted_stamp()
    if read_stamp() == stamp:
        return
    lock = take_lock()
    before = read_stamp()
    if before == stamp:  # the set-up that this one waited for
        return
    began = time.time()
    check_folder()
    no_pip = make_venv(before == RUNNING)
    STAMP.write_text(RUNNING)
    LOG.write_text("")
    for title, arguments in [("pip", ["ensurepip", "--default-pip"])] * no_pip + STEPS:
        run(title, arguments, lock)
    STAMP.write_text(stamp)
    say(f"done in {time.time() - began:.0f} s")


def main() -> int:
    """Return 0, or 2 after one line on stderr."""
    try:
        set_up()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"setup: {error}: check this path, its permissions and the free space", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("setup: interrupted: run it again and it starts anew", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
