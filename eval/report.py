"""Writing an evaluation's result as JSON and as one self-contained HTML file."""

from __future__ import annotations

import tempfile
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment
from p2q.eval.tokens import TokensReport

from p2q.errors import TargetError


def prepare_folder(folder: Path) -> None:
    """Make the report's folder and see that it can be written, before minutes of work.

    Raises:
        TargetError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise TargetError(f"the report cannot be written ({error.strerror})", file=folder) from error


def write_report(report: TokensReport, folder: Path) -> tuple[Path, Path]:
    """Write `report.html` and `report.json` to a folder that `prepare_folder` has made.

    Returns:
        their paths.

    Raises:
        TargetError: the folder cannot be written.
    """
    page, data = folder / "report.html", folder / "report.json"
    try:
        page.write_text(render_html(report), encoding="utf-8")
        data.write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise TargetError(f"the report cannot be written ({error.strerror})", file=folder) from error
    return page, data


def render_html(report: TokensReport) -> str:
    """The report's page. Whatever a model or a path says is escaped."""
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters["quoted"] = repr
    return environment.from_string(_template()).render(report=report)


def _template() -> str:
    return files("p2q.eval").joinpath("templates/tokens.html.j2").read_text(encoding="utf-8")
