"""`p2q_manifest.json`: what a converted checkpoint says of itself, and the digests that prove it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from p2q.contract import CONTRACT_VERSION
from p2q.errors import CheckpointError, ContractError

MANIFEST_NAME = "p2q_manifest.json"
MANIFEST_FORMAT = 1


class TensorRecord(BaseModel):
    """One requantized weight.

    `exponents`: how many scales have each exponent k. `clipped`: values that left [-128, 127] before the clamp.
    `relative_error`: ||w' - w|| / ||w||.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: tuple[int, ...]
    exponents: dict[int, int]
    clipped: int
    relative_error: float


class ShardRecord(BaseModel):
    """What converting one shard gave.

    `source`, `target`: SHA-256 of the two files. `others`: of tensors elsewhere that went into it. `tensors`: its
    weights. `input_scales`: exponents of the activation scales in it that were rewritten.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    target: str
    others: str
    tensors: dict[str, TensorRecord]
    input_scales: dict[str, int]


class Manifest(BaseModel):
    """The manifest. It holds no time, host or path, so that the same source and options give the same bytes.

    `source_digest`: of the source's files. `weights_digest`: of the original weights, where they were requantized.
    `statistics_digest`: of the file of statistics, where there was error feedback.
    `input_scales`: {tensor: exponent} of static activation scales that were rewritten.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = MANIFEST_FORMAT
    contract: int
    made_by: str
    rule: str
    source_digest: str
    weights_digest: str | None = None
    statistics_digest: str | None = None
    tensors: dict[str, TensorRecord]
    input_scales: dict[str, int] = {}
    files: dict[str, str]

    def dump(self) -> str:
        """Canonical JSON text."""
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @property
    def checkpoint_digest(self) -> str:
        """One SHA-256 for the whole converted checkpoint."""
        return digest_of_files(self.files)


def digest_of_files(files: dict[str, str]) -> str:
    """SHA-256 of the canonical JSON of {file name: SHA-256}."""
    return hashlib.sha256(
        json.dumps(files, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    ).hexdigest()


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, read in blocks."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a checkpoint directory, or None where there is none.

    Raises:
        CheckpointError: the file is there and is not a manifest that this version reads.
    """
    path = directory / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        problem = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        field = ".".join(str(part) for part in problem["loc"])
        raise CheckpointError(f"not a p2q manifest: {field} {problem['msg']}".strip(), file=path) from error
    if manifest.format != MANIFEST_FORMAT:
        raise CheckpointError(
            "manifest of another version", file=path, expected=f"format {MANIFEST_FORMAT}", got=str(manifest.format)
        )
    return manifest


def check_contract(manifest: Manifest, directory: Path) -> None:
    """Refuse a checkpoint that was converted for another version of the contract.

    Raises:
        ContractError: naming both versions.
    """
    if manifest.contract != CONTRACT_VERSION:
        raise ContractError(
            "converted for another version of the contract",
            file=directory / MANIFEST_NAME,
            expected=f"version {CONTRACT_VERSION}",
            got=f"version {manifest.contract}",
            hint="Convert it again",
        )


def changed_files(directory: Path, manifest: Manifest) -> dict[str, str]:
    """Files whose bytes are not what the manifest says: {name: "missing" | "changed" | "not in the manifest"}.

    A file that was added counts, because a loader may read it (a chat template changes answers). Hidden files and
    Markdown, which none reads, do not.
    """
    problems = {}
    for name, digest in sorted(manifest.files.items()):
        path = directory / name
        if not path.is_file():
            problems[name] = "missing"
        elif sha256_of(path) != digest:
            problems[name] = "changed"
    for added in sorted(directory.rglob("*")):
        relative = added.relative_to(directory)
        unread = added.suffix == ".md" or any(part.startswith(".") for part in relative.parts)
        if added.is_file() and not unread and relative.as_posix() not in {*manifest.files, MANIFEST_NAME}:
            problems[relative.as_posix()] = "not in the manifest"
    return problems
