"""A GGUF model in one file or in several (`name-00001-of-00003.gguf`), looked at as one."""

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np

from anechain.bake.gguf_file import GgufFile, GgufTensor
from anechain.errors import SourceError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


class GgufParts:
    """`metadata` of the first file, `tensors` of all; `path` is what the user named. See `GgufFile`.

    Raises SourceError, before any of them is read, unless all files of the model are there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        paths = _parts(path)
        if missing := [part.name for part in paths if len(paths) > 1 and not part.is_file()]:
            raise SourceError(
                f"{path} is one of {len(paths)} parts, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
                "not beside it: fetch all parts."
            )
        self._files = [GgufFile(part) for part in paths]
        self.metadata: dict[str, Any] = self._files[0].metadata
        stated = [file.metadata.get("split.count", 1) for file in self._files]
        if len(paths) == 1 and stated[0] not in (0, 1):
            raise SourceError(f"{path} is one of {stated[0]} parts: join them with `gguf-split --merge`.")
        numbers = [file.metadata.get("split.no", 0) for file in self._files]
        self._places = {name: file for file in self._files for name in file.tensors}
        total = sum(len(file.tensors) for file in self._files)
        wanted = self.metadata.get("split.tensors.count", total)
        if len(paths) > 1 and (
            stated != [len(paths)] * len(paths)
            or numbers != list(range(len(paths)))
            or not len(self._places) == total == wanted
        ):
            raise SourceError(f"{path} and the parts beside it do not belong together: fetch all parts again.")

    @property
    def tensors(self) -> dict[str, GgufTensor]:
        return {name: file.tensors[name] for name, file in self._places.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor, dequantised to float32; a read-only view of the file when it is stored so."""
        return self._places[name].read(name)

    def fingerprint(self) -> str:
        """sha256 of the file, or over those of all parts."""
        digests = []
        for part in self._files:
            with part.path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _parts(path: Path) -> list[Path]:
    found = _PART.fullmatch(path.name)
    if found is None or int(found["count"]) < 2:
        return [path]
    count = int(found["count"])
    return [
        path.with_name(f"{found['stem']}-{number:05d}-of-{found['count']}{found['suffix']}")
        for number in range(1, count + 1)
    ]
