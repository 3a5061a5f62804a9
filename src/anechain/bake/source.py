"""Source: where weights come from. One protocol, whatever the file format."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from anechain.bake.demo import open_demo
from anechain.bake.gguf import GgufSource
from anechain.bake.hf import HfSource
from anechain.bake.hub import ID, open_hub
from anechain.bundle.spec import ModelSpec
from anechain.errors import SourceError


class Source(Protocol):
    """A checkpoint, opened but not loaded.

    `tensor(name)` takes a canonical name (`bundle.spec.tensors_of`), reads that tensor alone and returns it as a fresh
    or read-only float32 array of the shape that `tensors_of` gives. `fingerprint` is the sha256 (hex) over all content
    that decides the model's mathematics. `text_files` are what tokenizing and chatting need, by file name
    (`tokenizer.json`, `tokenizer_config.json`, `generation_config.json`, `chat_template.jinja`), possibly empty.
    A source may have `notes`, sentences about what of the checkpoint is left out.
    """

    @property
    def ref(self) -> str: ...  # what the user named: "demo", a path
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def text_files(self) -> dict[str, bytes]: ...
    def tensor(self, name: str) -> np.ndarray: ...


@runtime_checkable
class InRows(Protocol):
    """A Source that can read some rows of a matrix: `rows(name)` is what reads them, None where it cannot after all."""

    def rows(self, name: str) -> "Rows | None": ...


Rows = Callable[[int, int], np.ndarray]  # first row and end -> float32 [rows, I]


def rows_of(source: Source, name: str) -> Rows:
    """Reads parts of a matrix: those rows alone where the source can, else from the whole, which is read once."""
    reader = source.rows(name) if isinstance(source, InRows) else None
    if reader is None:
        whole = source.tensor(name)
        return lambda start, stop: whole[start:stop]
    return reader


def open_source(ref: str) -> Source:
    """Open what the user named: `demo`, a .gguf file, a Hugging Face directory or hub id; raises SourceError."""
    if ref == "demo":
        return open_demo()
    path = Path(ref)
    if path.is_dir():
        if not (path / "config.json").exists():
            inside = sorted(p.name for p in path.glob("*.gguf"))
            wanted = f"one of its .gguf files, {', '.join(inside)}" if inside else "a Hugging Face model directory"
            raise SourceError(f"{ref} has no config.json: give {wanted}.")
        return HfSource(path)
    if path.suffix.lower() == ".gguf":
        return GgufSource(path)
    if path.exists():
        raise SourceError(f"{ref} is neither a .gguf file nor a directory: give the directory that holds config.json.")
    if ID.fullmatch(ref) and not path.parent.is_dir():  # the first part of an id is no folder here
        return open_hub(ref)
    raise SourceError(f"there is no {ref}: give `demo`, a .gguf file, a Hugging Face model directory or a hub id.")
