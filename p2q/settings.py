"""What the plug-in is told: by the engine option `additional_config={"p2q": {...}}`, else by P2Q_* variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from p2q.errors import P2QError
from p2q.kernels import DEFAULT_KERNEL
from p2q.kernels.choice import KernelChoice


class Settings(BaseModel):
    """`kernel`: one kernel, or a mix that `KernelChoice` reads.

    `evaluate`: load what is not proved (scales, kernels) as the thing under test.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kernel: str = DEFAULT_KERNEL
    evaluate: bool = False


def read_settings(options: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from the engine option, each missing one from P2Q_KERNEL or P2Q_EVALUATE.

    Raises:
        P2QError: an unknown option or value.
        KernelError: an unknown kernel.
    """
    found = {
        name: environment[variable]
        for name in Settings.model_fields
        if environment.get(variable := f"P2Q_{name.upper()}")  # an empty one counts as not set
    }
    try:
        settings = Settings.model_validate({**found, **options})
    except ValidationError as error:
        problem = error.errors()[0]
        raise P2QError(
            f"bad p2q option {'.'.join(map(str, problem['loc']))}: {problem['msg']}",
            expected=f"options {', '.join(Settings.model_fields)}",
        ) from error
    KernelChoice.parse(settings.kernel)
    return settings
