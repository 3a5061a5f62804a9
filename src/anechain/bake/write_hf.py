"""A merged checkpoint as a plain Hugging Face directory: what the adapter does not touch stays as it is, bit by bit."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anechain.bake.hf import WEIGHTS, HfSource, read_json
from anechain.bake.lora import Merged
from anechain.bake.safetensors_file import FLOATS
from anechain.bake.survival import Figures, compare, summary
from anechain.bundle.spec import matrices_of, tensors_of
from anechain.errors import RequestError, SourceError

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # config.json's names -> safetensors'
# What a checkpoint has beside its weights: tokenizers in all their forms, generation settings, the licence.
_BESIDE = (".json", ".jinja", ".model", ".txt")
_SPACE_MARGIN = 2**24  # bytes for everything that is no tensor

Progress = Callable[[int, int, str], None]  # done, in all, of what


@dataclass(frozen=True)
class Written:
    """What `write_hf` made; `survival` as in `bake.survival.summary`, for the dtypes that the file has."""

    tensors: int
    changed: int
    bytes: int
    survival: Mapping[str, Any] | None


def write_hf(source: Merged, out: Path, dtype: str | None = None, progress: Progress | None = None) -> Written:
    """Writes `source` as the new directory `out`, which must not exist; it is there as a whole or not at all.

    `dtype` is one of DTYPES for all tensors; None keeps that of each tensor of the base. Raises RequestError when `out`
    or `dtype` cannot be used, SourceError when the base is no Hugging Face directory or a value does not fit.
    """
    base = source.base
    if not isinstance(base, HfSource):
        raise SourceError(
            f"{base.ref} is a GGUF file, and a merged model is written as a Hugging Face directory: give the model as "
            "one, or use `anechain bake --lora`, which takes both."
        )
    if dtype is not None and dtype not in DTYPES:
        raise RequestError(f"--dtype {dtype} is not known: use {', '.join(DTYPES)}, or none to keep the base's.")
    if out.exists() or out.is_symlink():
        raise RequestError(f"{out} is there already, and nothing is overwritten: choose another folder with -o.")
    parts = _parts(source, base, dtype)
    with _new_directory(out, sum(part.bytes for part in parts) + _SPACE_MARGIN) as folder:
        _write_weights(source, base, parts, folder / WEIGHTS, progress)
        _write_beside(source, base, folder, dtype)
        if HfSource(folder).spec != source.spec:
            raise SourceError(f"{out} would not be read as the model that was merged: report this.")
    changed = sum(part.canonical in source.changes for part in parts)
    return Written(len(parts), changed, sum(part.bytes for part in parts), summary(_survival(source, parts)))


@dataclass(frozen=True)
class _Part:
    """One tensor of the file to be written: its name there, the canonical one, and the base's whose place it takes."""

    own: str
    canonical: str | None  # None for what no part of a language model is
    before: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def _parts(source: Merged, base: HfSource, dtype: str | None) -> list[_Part]:
    shapes = tensors_of(source.spec)
    names = {base.names.own(canonical): canonical for canonical in shapes}
    others = [own for own in base.files if base.names.canonical(own) is None]
    parts = []
    for own in [*names, *others]:
        canonical = names.get(own)
        before = own if own in base.files else base.names.own("embed")  # the head of a model that was tied
        entry = base.files[before].entries[before]
        kind = DTYPES[dtype] if dtype and entry.dtype in FLOATS else entry.dtype
        shape = shapes[canonical] if canonical else entry.shape
        n_bytes = math.prod(shape) * FLOATS[kind].itemsize if kind in FLOATS else entry.end - entry.begin
        parts.append(_Part(own, canonical, before, kind, shape, n_bytes))
    return parts


def _write_weights(source: Merged, base: HfSource, parts: list[_Part], path: Path, progress: Progress | None) -> None:
    """The safetensors file, a tensor at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for part in parts:
        header[part.own] = {
            "dtype": part.dtype, "shape": list(part.shape), "data_offsets": [position, position + part.bytes],
        }  # fmt: skip
        position += part.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for done, part in enumerate(parts, 1):
            file.write(np.ascontiguousarray(_stored(source, base, part)).data)
            if progress:
                progress(done, len(parts), "tensors")
        file.flush()
        os.fsync(file.fileno())


def _survival(source: Merged, parts: list[_Part]) -> Figures:
    """What the dtypes leave of the adapter."""
    figures, matrices = {}, matrices_of(source.spec)
    for name, dtype in ((part.canonical, part.dtype) for part in parts):
        if name is not None and name in matrices and name in source.changes:
            found = compare(source, name, partial(_as_stored, dtype=dtype))
            if found is not None:
                figures[name] = found
    return figures


def _stored(source: Merged, base: HfSource, part: _Part) -> np.ndarray:
    file = base.files[part.before]
    if part.canonical is not None and part.canonical in source.changes:
        values = source.as_checkpoint(part.canonical)
    elif part.dtype == file.entries[part.before].dtype:
        return np.fromfile(file.path, np.uint8, part.bytes, offset=file.entries[part.before].begin)
    else:
        values = file.read(part.before)
    narrow = _narrowed(values, part.dtype)
    if not np.isfinite(_widened(narrow)).all():
        raise SourceError(
            f"{part.own} holds values that are not finite as {part.dtype}: use --dtype bfloat16 or float32, or correct "
            "the checkpoint or its adapter."
        )
    return narrow


def _narrowed(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 -> the nearest values of `dtype`, ties to even; of BF16 the bits, as uint16."""
    if dtype != "BF16":
        with np.errstate(over="ignore"):
            return values.astype(FLOATS[dtype])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))


def _as_stored(values: np.ndarray, dtype: str) -> np.ndarray:
    return _widened(_narrowed(values, dtype))


def _widened(stored: np.ndarray) -> np.ndarray:
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def _write_beside(source: Merged, base: HfSource, folder: Path, dtype: str | None) -> None:
    """config.json, and everything beside the weights, the adapter's tokenizer before the base's."""
    config = read_json(base.directory / "config.json")
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    if source.spec.vocab_size != base.spec.vocab_size:
        for level in (text, *([config] if "vocab_size" in config else [])):
            level["vocab_size"] = source.spec.vocab_size
    if source.spec.tied != base.spec.tied:
        for level in (config, *([text] if "tie_word_embeddings" in text else [])):
            level["tie_word_embeddings"] = source.spec.tied
    if dtype is not None:
        for level in (config, text):
            for name in [name for name in ("dtype", "torch_dtype") if name in level] or ["dtype"]:
                level[name] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in sorted(base.directory.iterdir()):
        wanted = file.suffix in _BESIDE or file.stem.upper().startswith(("LICENSE", "LICENCE", "NOTICE"))
        if not file.is_file() or file.name.startswith("adapter_") or file.name.endswith(".index.json"):
            continue
        if wanted and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
    own = source.adapter.text_files
    for name in own:
        (folder / name).write_bytes(source.text_files[name])
    if own and "chat_template.jinja" not in source.text_files:
        (folder / "chat_template.jinja").unlink(missing_ok=True)


@contextmanager
def _new_directory(out: Path, n_bytes: int) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` at the end. If anything fails, nothing is left of it; what a killed
    merge left is removed first.
    """
    missing = [folder for folder in out.parents if not folder.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for left in out.parent.glob(f".{out.name}.merge-*"):
            if not _runs(int(left.name.rpartition("-")[2])):
                shutil.rmtree(left)
        if (free := shutil.disk_usage(out.parent).free) < n_bytes:
            raise RequestError(
                f"{out} would take {n_bytes / 1e6:.0f} MB and its disk has {free / 1e6:.0f} MB left: make room, or "
                "choose another folder with -o."
            )
        folder = out.parent / f".{out.name}.merge-{os.getpid()}"
        folder.mkdir()
        try:
            yield folder
            folder.rename(out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise RequestError(
            f"{out} could not be written ({error.strerror or error}): make room or choose another folder with -o."
        ) from None
    finally:
        if not out.exists():
            for folder in missing:
                with suppress(OSError):  # not there, or no longer empty
                    folder.rmdir()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
