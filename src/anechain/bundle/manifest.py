"""The bundle on disk: a folder of packages with `manifest.json` at its root. A folder without one is not a bundle."""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anechain.bundle.form import STATE_UPDATES, TARGETS, Form, StateUpdate, form_of
from anechain.bundle.recipe import Recipe
from anechain.bundle.spec import ModelSpec
from anechain.errors import BundleError, RecipeError

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
HEAD = "head.mlpackage"


@dataclass(frozen=True)
class FileRecord:
    """What one file has to be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Block:
    """One package of consecutive layers: its folder's name and the layers `start` up to, not including, `stop`."""

    file: str
    start: int
    stop: int

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)


@dataclass(frozen=True)
class Bundle:
    """A complete chain. `files` maps every path below the root (posix, without the manifest) to its record."""

    path: Path
    spec: ModelSpec
    recipe: Recipe
    context: int
    prefill: int  # tokens of a prefill chunk, 0 for none
    target: str
    source_ref: str
    fingerprint: str
    blocks: tuple[Block, ...]
    embedding: str  # the table's file, or HEAD when the embedding is read from the head's weights
    tools: Mapping[str, str]
    key: str  # the hash of everything that decided these bytes
    files: Mapping[str, FileRecord]
    adapter: Mapping[str, Any] | None = None  # the LoRA that is merged into the weights: what it is, what is left of it
    stream_peak: float | None = None  # the largest absolute value seen in the original's residual stream, unscaled
    state_update: StateUpdate = "slice"
    boundary_scales: tuple[float, ...] = ()  # int8 between packages: a scale for each boundary; none for fp16
    calibration: Mapping[str, Any] | None = None  # what the weights were rounded by: hash and size of the text, a hash

    @property
    def block_paths(self) -> list[Path]:
        return [self.path / block.file for block in self.blocks]

    def form(self, number: int) -> Form:
        """The form of package `number` of the blocks."""
        return form_of(number, self.target, self.state_update, self.boundary_scales)

    @property
    def head_path(self) -> Path:
        return self.path / HEAD

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.spec.to_json(),
            "recipe": self.recipe.to_json(),
            "context": self.context,
            "prefill": self.prefill,
            "target": self.target,
            "state_update": self.state_update,
            "boundary_scales": list(self.boundary_scales),
            "source": {"ref": self.source_ref, "fingerprint": self.fingerprint},
            "blocks": [{"file": b.file, "layers": [b.start, b.stop]} for b in self.blocks],
            "head": HEAD,
            "embedding": self.embedding,
            "tools": dict(self.tools),
            "key": self.key,
            "adapter": None if self.adapter is None else dict(self.adapter),
            "stream_peak": self.stream_peak,
            "calibration": None if self.calibration is None else dict(self.calibration),
            "files": {name: {"bytes": r.bytes, "sha256": r.sha256} for name, r in sorted(self.files.items())},
        }


def open_bundle(path: Path, verify_hashes: bool = False) -> Bundle:
    """Reads the manifest and checks that every file is there with its size, and with its sha256 if `verify_hashes`.

    Raises BundleError that names all files at fault.
    """
    manifest = path / MANIFEST
    if not manifest.is_file():
        reason = (
            "has no manifest.json: it is not a bundle, or its bake did not finish" if path.is_dir() else "is not there"
        )
        raise BundleError(f"bundle {path} {reason}; make one with `anechain bake MODEL -o {path}`.")
    try:
        data = json.loads(manifest.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise TypeError("it is not a JSON object")
        if data.get("format") != FORMAT:
            raise BundleError(
                f"bundle {path} has format {data.get('format')!r} and this anechain reads {FORMAT}: bake it again."
            )
        bundle = Bundle(
            path=path,
            spec=ModelSpec.from_json(data["model"]),
            recipe=Recipe.from_json(data["recipe"]),
            context=data["context"],
            prefill=data["prefill"],
            target=data["target"],
            source_ref=data["source"]["ref"],
            fingerprint=data["source"]["fingerprint"],
            blocks=tuple(Block(b["file"], b["layers"][0], b["layers"][1]) for b in data["blocks"]),
            embedding=data["embedding"],
            tools=data["tools"],
            key=data["key"],
            files={name: FileRecord(r["bytes"], r["sha256"]) for name, r in data["files"].items()},
            state_update=data.get("state_update", "slice"),  # bundles from before there was a choice
            boundary_scales=tuple(data.get("boundary_scales", ())),
            adapter=data.get("adapter"),
            stream_peak=data.get("stream_peak"),
            calibration=data.get("calibration"),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecipeError) as error:
        raise BundleError(
            f"{manifest} cannot be read ({type(error).__name__}: {error}): bake the bundle again."
        ) from None
    faults = _gaps(bundle) + damaged(path, bundle.files, verify_hashes)
    if faults:
        raise BundleError(f"bundle {path} is damaged: {'; '.join(faults)}: bake it again.")
    return bundle


def _gaps(bundle: Bundle) -> list[str]:
    """What a manifest leaves out: a part that is not among its files, a layer that no package holds."""
    parts = [*(block.file for block in bundle.blocks), HEAD, bundle.embedding, TOKENIZER]
    tops = {name.partition("/")[0] for name in bundle.files}
    faults = [f"{part} is not among its files" for part in dict.fromkeys(parts) if part not in tops]
    if [i for block in bundle.blocks for i in block.layers] != list(range(bundle.spec.n_layers)):
        faults.append(f"its packages do not hold the layers 0 to {bundle.spec.n_layers - 1} in order")
    if bundle.target not in TARGETS:
        faults.append(f"its target {bundle.target!r} is none of {', '.join(TARGETS)}")
    if bundle.state_update not in STATE_UPDATES:
        faults.append(f"its state update {bundle.state_update!r} is none of {', '.join(STATE_UPDATES)}")
    if len(bundle.boundary_scales) not in (0, len(bundle.blocks) - 1):
        faults.append(f"it has {len(bundle.boundary_scales)} scales for {len(bundle.blocks) - 1} boundaries")
    return faults


def damaged(root: Path, files: Mapping[str, FileRecord], verify_hashes: bool) -> list[str]:
    """What is wrong with `files` below `root`, a phrase for each; empty when all are as recorded."""
    faults = []
    for name, record in files.items():
        file = root / name
        if not file.is_file():
            faults.append(f"{name} is missing")
        elif file.stat().st_size != record.bytes:
            faults.append(f"{name} has {file.stat().st_size} bytes instead of {record.bytes}")
        elif verify_hashes and sha256_of(file) != record.sha256:
            faults.append(f"{name} has another sha256 than recorded")
    return faults


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def record_files(root: Path, below: Path) -> dict[str, FileRecord]:
    """Size and hash of the file `below`, or of every file in that folder, by its path relative to `root`."""
    found = sorted(f for f in below.rglob("*") if f.is_file()) if below.is_dir() else [below]
    return {f.relative_to(root).as_posix(): FileRecord(f.stat().st_size, sha256_of(f)) for f in found}


def write_atomically(path: Path, content: bytes) -> None:
    """`path` holds either what it held before or all of `content`, whatever happens meanwhile."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def write_manifest(bundle: Bundle) -> None:
    """Completes a bundle: the manifest is written last, and atomically."""
    text = json.dumps(bundle.to_json(), indent=1, sort_keys=True) + "\n"
    write_atomically(bundle.path / MANIFEST, text.encode())
