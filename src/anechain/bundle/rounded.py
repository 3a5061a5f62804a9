"""Rounding that was done beforehand: tensors in the form in which they are stored, as one file that a bake reads."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from anechain.bundle.palette import Palettized
from anechain.bundle.quant import Quantized
from anechain.bundle.stored import Corrected, Stored
from anechain.errors import BundleError

_FORMAT, _ABOUT = 1, "about"


def save_rounded(path: Path, tensors: Mapping[str, Stored], about: Mapping[str, Any]) -> None:
    """Writes `tensors` by canonical name under a temporary name beside `path` and renames it.

    The same tensors give the same bytes. Raises OSError when the disk does not take it.
    """
    arrays: dict[str, Any] = {}
    forms: dict[str, Any] = {}
    for name, stored in sorted(tensors.items()):
        base = stored.base if isinstance(stored, Corrected) else stored
        forms[name] = [_form(base), getattr(base, "bits", 16), isinstance(stored, Corrected)]
        arrays |= {f"{name}|{part}": value for part, value in _arrays(stored).items()}
    head = json.dumps({"format": _FORMAT, "forms": forms, **about}, sort_keys=True).encode()
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with part.open("wb") as file:
            np.savez(file, **{_ABOUT: np.frombuffer(head, np.uint8), **arrays})
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _form(base: Stored) -> str:
    return "linear" if isinstance(base, Quantized) else "palette" if isinstance(base, Palettized) else "plain"


def _arrays(stored: Stored) -> dict[str, np.ndarray]:
    if isinstance(stored, Corrected):
        return {**_arrays(stored.base), "up": stored.up, "down": stored.down}
    if isinstance(stored, Quantized):
        return {"data": stored.data, "scale": stored.scale}
    if isinstance(stored, Palettized):
        return {"indices": stored.indices, "table": stored.table}
    return {"plain": stored}


class Rounded:
    """What `save_rounded` wrote, by name; a tensor is read when it is asked for.

    Raises BundleError for a file that is not there or is something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = np.load(path, allow_pickle=False)
            self.about: dict[str, Any] = json.loads(self._file[_ABOUT].tobytes())
            self._forms: dict[str, Any] = self.about["forms"]
            if self.about["format"] != _FORMAT:
                raise ValueError(f"its format is {self.about['format']}, this version reads {_FORMAT}")
        except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, BadZipFile) as error:
            raise BundleError(
                f"the rounded weights {path} cannot be read ({error}): delete the file and bake again."
            ) from None

    def __contains__(self, name: str) -> bool:
        return name in self._forms

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._forms)

    def tensor(self, name: str) -> Stored:
        form, bits, is_corrected = self._forms[name]
        try:
            if form == "plain":
                plain: np.ndarray = self._file[f"{name}|plain"]
                return plain
            base: Quantized | Palettized
            if form == "linear":
                base = Quantized(self._file[f"{name}|data"], self._file[f"{name}|scale"], bits)
            else:
                base = Palettized(self._file[f"{name}|indices"], self._file[f"{name}|table"], bits)
            if is_corrected:
                return Corrected(base, self._file[f"{name}|up"], self._file[f"{name}|down"])
            return base
        except (OSError, ValueError, LookupError, EOFError, BadZipFile) as error:
            raise BundleError(
                f"the rounded weights {self._path} are damaged ({error}): delete the file and bake again."
            ) from None
