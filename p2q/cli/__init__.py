"""The command `p2q`: one module a command, each thin.

Exit codes: 0 it worked, 1 a check failed, 2 bad input.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper

import typer

from p2q.cli import calibrate, convert, demo, doctor, evaluate, inspect, quantize, serve
from p2q.cli.console import errors, say_error
from p2q.errors import P2QError

INTERRUPTED = 130

app = typer.Typer(
    name="p2q",
    help="INT8 language-model serving, reproducible to the byte.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("convert")(convert.command)
app.command("calibrate")(calibrate.command)
app.command("quantize")(quantize.command)
app.command("inspect")(inspect.command)
app.command("doctor")(doctor.command)
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve.command)
app.command("demo")(demo.command)
app.add_typer(evaluate.app, name="eval")


def main() -> None:
    """Run the command line; errors become one message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may hold bytes that are no text
    try:
        app(prog_name="p2q")
    except P2QError as error:
        say_error(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        say_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        sys.exit(P2QError.exit_code)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # typer's answer to Ctrl-C
            errors.print("interrupted; nothing was left half-written", highlight=False)
        raise
