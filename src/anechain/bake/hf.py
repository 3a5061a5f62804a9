"""HfSource: a Hugging Face directory, config.json and safetensors, opened but not loaded."""

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from anechain.bake.family import family_of, spec_of
from anechain.bake.names import check_tensors, folded
from anechain.bake.safetensors_file import FLOATS, SafetensorsFile
from anechain.bake.wrapper import unwrapped
from anechain.bundle.spec import ModelSpec
from anechain.errors import SourceError

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
_BUFFER = "rotary_emb.inv_freq"  # old checkpoints carry it; it follows from the config


class HfSource:
    """The checkpoint in a directory, checked from its headers alone; see `bake.source.Source`.

    `files` maps the checkpoint's own tensor names to the file that holds each, `names` translates them; `notes` says
    what of the checkpoint is left out. `ref` is what the user named, where that is not the directory.
    Raises SourceError for a file that is missing, damaged or not understood, and for tensors that are missing, unused,
    of another shape than config.json says, or of a dtype other than float32, float16 and bfloat16.
    """

    def __init__(self, directory: Path, ref: str | None = None) -> None:
        self.ref = str(directory) if ref is None else ref
        self.directory = directory
        config_path = directory / "config.json"
        config, wrapper, faults = unwrapped(read_json(config_path), str(config_path))
        family = self._family = family_of(config, str(config_path))
        self.files = {own: file for own, file in _tensor_files(directory).items() if not own.endswith(_BUFFER)}
        self.names = family.names if wrapper is None else wrapper.names(family, self.files)
        canonical = {own: self.names.canonical(own) for own in self.files}
        shapes = {name: self.files[own].entries[own].shape for own, name in canonical.items() if name is not None}
        others = [own for own, name in canonical.items() if name is None]
        skipped = [own for own in others if wrapper is not None and own.startswith(wrapper.skipped)]
        unknown = [own for own in others if own not in skipped]
        read = {own: file for own, file in self.files.items() if own not in skipped}
        self.spec: ModelSpec = spec_of(config, shapes, str(config_path), also=faults)
        check_tensors(self.spec, shapes, unknown, self.names, str(directory), also=_dtype_faults(read))
        if self.spec.tied and "head" in shapes and not self._same("head", "embed"):
            raise SourceError(
                f"{directory} has tie_word_embeddings true and a {self.names.own('head')} that is not the embedding: "
                "set it to false if the tensor is the head, or remove the tensor."
            )
        self.text_files: dict[str, bytes] = _text_files(directory, config)
        left_out = f"{len(skipped)} tensors of other than the text model are skipped: what is baked reads text only"
        self.notes: tuple[str, ...] = (left_out,) if skipped else ()

    def tensor(self, name: str) -> np.ndarray:
        own = self.names.own(name)
        return self._family.gain(name, self.files[own].read(own))

    def rows(self, name: str) -> Callable[[int, int], np.ndarray]:
        own = self.names.own(name)
        file = self.files[own]
        return lambda start, stop: file.read(own, slice(start, stop))

    def _same(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same values."""
        first, second = self.names.own(name), self.names.own(other)
        if self.files[first].entries[first].dtype != self.files[second].entries[second].dtype:
            return np.array_equal(self.tensor(name), self.tensor(other))
        return np.array_equal(self.files[first].stored(first), self.files[second].stored(second))

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the names and digests of config.json, the index if there is one, and every tensor file."""
        paths = {self.directory / "config.json", *(file.path for file in self.files.values())}
        if (self.directory / INDEX).exists():
            paths.add(self.directory / INDEX)
        total = hashlib.sha256()
        for path in sorted(paths):
            with path.open("rb") as file:
                total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return total.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; raises SourceError."""
    try:
        parsed = json.loads(_read(path))
    except ValueError as error:
        raise SourceError(f"{path} is not valid JSON ({error}): correct it or fetch it again.") from None
    if not isinstance(parsed, dict):
        raise SourceError(f"{path} holds no JSON object: correct it or fetch it again.")
    return parsed


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path} cannot be read ({error.strerror}): check it and its permissions.") from None
    if content.startswith(b"version https://git-lfs"):
        raise SourceError(f"{path} is a Git LFS pointer: fetch the real file with `git lfs pull`.")
    return content


def _tensor_files(directory: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> the file that holds it: by the index if there is one, else model.safetensors or the only file."""
    if (directory / INDEX).exists():
        return _indexed(directory)
    if (directory / WEIGHTS).exists():
        candidates = [WEIGHTS]
    else:
        candidates = sorted(p.name for p in directory.glob("*.safetensors") if not p.name.startswith("adapter_"))
    if not candidates:
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
        found = f" (only {', '.join(folded(pickled))})" if pickled else ""
        raise SourceError(f"{directory} has no {WEIGHTS}{found}: give a directory with safetensors weights.")
    if len(candidates) > 1:
        raise SourceError(
            f"{directory} has {' and '.join(candidates)} but neither {INDEX} nor {WEIGHTS}: remove what is not the "
            "model, or add the index."
        )
    file = SafetensorsFile(directory / candidates[0])
    return {own: file for own in file.entries}


def _indexed(directory: Path) -> dict[str, SafetensorsFile]:
    index = directory / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise SourceError(f"{index} has no weight_map from tensor names to file names: fetch it again.")
    shards = sorted(set(weight_map.values()))
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        raise SourceError(f"{index} names files outside of its directory: {', '.join(outside)}; correct the index.")
    if missing := [shard for shard in shards if not (directory / shard).is_file()]:
        raise SourceError(f"{index} names files that are not there: {', '.join(missing)}; fetch them.")
    files = {shard: SafetensorsFile(directory / shard) for shard in shards}
    faults = []
    for shard, file in files.items():
        if absent := [own for own, place in weight_map.items() if place == shard and own not in file.entries]:
            faults.append(f"{shard} lacks {', '.join(folded(absent))}")
        if unlisted := [own for own in file.entries if own not in weight_map and not own.endswith(_BUFFER)]:
            faults.append(f"{shard} has {', '.join(folded(unlisted))}, which the index does not list")
    if faults:
        raise SourceError(f"{index} and its files disagree: {'; '.join(faults)}; fetch both again.")
    return {own: files[shard] for own, shard in weight_map.items()}


def _dtype_faults(files: Mapping[str, SafetensorsFile]) -> list[str]:
    by_dtype: dict[str, list[str]] = {}
    for own, file in files.items():
        if (dtype := file.entries[own].dtype) not in FLOATS:
            by_dtype.setdefault(dtype, []).append(own)
    return [
        f"{', '.join(folded(owns))} stored as {dtype} (use a checkpoint in F32, F16 or BF16)"
        for dtype, owns in by_dtype.items()
    ]


def _text_files(directory: Path, config: Mapping[str, Any]) -> dict[str, bytes]:
    files = {name: _read(directory / name) for name in TEXT_FILES if (directory / name).exists()}
    name = "generation_config.json"
    stated = read_json(directory / name) if name in files else {}
    merged = generation_config(stated, config, str(directory / "config.json"), str(directory / name))
    if merged != stated:
        files[name] = json.dumps(merged, indent=2).encode()
    return files


def generation_config(
    stated: Mapping[str, Any], config: Mapping[str, Any], config_where: str, stated_where: str
) -> dict[str, Any]:
    """`stated` with the end tokens of `config` among its own: whoever generates has to stop at either.

    Where `stated` is empty it also takes the `bos_token_id` and `pad_token_id` of `config`. Raises SourceError.
    """
    own, others = _ids(stated, stated_where), _ids(config, config_where)
    merged = dict(stated)
    if not set(others) <= set(own):
        ids = list(dict.fromkeys((*own, *others)))
        merged["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    if not stated:
        merged |= {name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None}
    return merged


def _ids(source: Mapping[str, Any], where: str) -> list[int]:
    value = source.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise SourceError(f"{where} has eos_token_id = {value!r}: use a token id or a list of them.")
    return ids
