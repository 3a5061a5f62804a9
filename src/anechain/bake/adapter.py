"""The two files of a PEFT adapter, adapter_config.json and adapter_model.safetensors, read and checked on their own.

Whether they fit a model is for `adapter_fit.py` to say. The meaning of fields and keys is that of peft 0.21. Nothing is
assumed of a field that is not listed here, and a pickle is never opened.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from anechain.bake.hf import read_json
from anechain.bake.safetensors_file import Entry, SafetensorsFile
from anechain.errors import SourceError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

_READ = frozenset({
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "bias",
    "modules_to_save", "init_lora_weights", "layers_to_transform", "target_modules", "ensure_weight_tying",
    "base_model_name_or_path",
})  # fmt: skip
# Fields that change no merged weight. peft sets fan_in_fan_out to false for nn.Linear, the only kind of layer here, and
# reads the *_config of a way of initialising only when init_lora_weights names it.
_IGNORED = frozenset({
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "exclude_modules", "lora_dropout",
    "fan_in_fan_out", "layers_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "runtime_config",
})  # fmt: skip
# Fields with which the result is not W + s B A; anything but null, false or empty is refused.
_REFUSED = frozenset({
    "use_qalora", "alora_invocation_tokens", "alora_invocation_string", "megatron_config", "trainable_token_indices",
    "layer_replication", "target_parameters", "use_bdlora", "arrow_config", "kasa_config", "velora_config",
    "monteclora_config",
})  # fmt: skip
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")  # the others change the base's weights
_BIASES = ("none", "all", "lora_only")

_LORA_KEY = re.compile(r"(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)((?:\.[^.]+){0,2})")
_FULL_KEY = re.compile(r"(.+?)(\.base_layer|\.original_module|\.modules_to_save(?:\.[^.]+)?)?\.(weight|bias)")


@dataclass(frozen=True)
class LoraConfig:
    """What adapter_config.json says about the mathematics; raises SourceError, from `read`, for what is not understood.

    A pattern is a regular expression for the end of a module's path, from its beginning or from a dot on; the first
    that matches decides.
    """

    r: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    ensure_weight_tying: bool
    modules_to_save: tuple[str, ...]
    layers: frozenset[int] | None  # layers_to_transform; None for all
    targets: tuple[str, ...]  # target_modules, where it is a list
    base_model: str | None  # what the adapter calls its base

    @staticmethod
    def read(config: Mapping[str, Any], where: str) -> "LoraConfig":
        """`config` is the parsed file; `where` names it in the sentence."""
        kind = config.get("peft_type")
        if kind != "LORA":
            what = "no peft_type" if kind is None else f"peft_type {kind!r}"
            raise SourceError(f"{where} has {what}, and only LORA can be merged: merge it where it was made.")
        read = _Reader(config)
        result = LoraConfig(
            r=read.whole("r"),
            alpha=read.number("lora_alpha"),
            rank_pattern=read.pattern("rank_pattern", whole=True),
            alpha_pattern=read.pattern("alpha_pattern", whole=False),
            use_rslora=read.flag("use_rslora"),
            use_dora=read.flag("use_dora"),
            lora_bias=read.flag("lora_bias"),
            ensure_weight_tying=read.flag("ensure_weight_tying"),
            modules_to_save=read.names("modules_to_save"),
            layers=read.layers(),
            targets=() if isinstance(config.get("target_modules"), str) else read.names("target_modules"),
            base_model=str(config.get("base_model_name_or_path") or "") or None,
        )
        if result.use_dora and result.lora_bias:
            read.faults.append("lora_bias does not go together with use_dora")
        read.others()
        if read.faults:
            raise SourceError(f"{where} cannot be used: {'; '.join(read.faults)}.")
        return result

    def rank(self, path: str) -> int:
        """The rank that the module at `path` should have."""
        return int(_matching(self.rank_pattern, path, self.r))

    def scale(self, path: str) -> float:
        """What B A is multiplied by: alpha / r, or alpha / sqrt(r) with rsLoRA."""
        rank = self.rank(path)
        return _matching(self.alpha_pattern, path, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _matching(pattern: Mapping[str, float], path: str, default: float) -> float:
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", path)), default)


class _Reader:
    """Reads fields and collects what is wrong with them, so that one sentence can name everything."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.faults: list[str] = []

    def whole(self, name: str) -> int:
        value = self.config.get(name)
        if value is not None and _is_number(value) and value >= 1 and value == int(value):
            return int(value)
        self.faults.append(f"{name} = {value!r} (a whole number of at least 1 is needed)")
        return 1

    def number(self, name: str) -> float:
        value = self.config.get(name)
        if value is not None and _is_number(value):
            return float(value)
        self.faults.append(f"{name} = {value!r} (a number is needed)")
        return 1.0

    def flag(self, name: str) -> bool:
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            self.faults.append(f"{name} = {value!r} (use true or false)")
        return value is True

    def names(self, name: str) -> tuple[str, ...]:
        value = self.config.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            self.faults.append(f"{name} = {_short(value)} (a list of names is needed)")
            return ()
        return tuple(value or ())

    def pattern(self, name: str, whole: bool) -> dict[str, Any]:
        value = self.config.get(name) or {}
        if not isinstance(value, dict):
            self.faults.append(f"{name} = {_short(value)} (an object is needed)")
            return {}
        for key, item in value.items():
            if not _is_number(item) or (whole and (item < 1 or item != int(item))):
                self.faults.append(f"{name} has {item!r} for {key!r}")
            try:
                re.compile(rf"(.*\.)?({key})$")
            except re.error as error:
                self.faults.append(f"{name} has {key!r}, which is no regular expression ({error})")
        return value

    def layers(self) -> frozenset[int] | None:
        value = self.config.get("layers_to_transform")
        if value is None or value == []:
            return None
        layers = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in layers):
            self.faults.append(f"layers_to_transform = {_short(value)} (layer numbers are needed)")
            return None
        return frozenset(layers)

    def others(self) -> None:
        """The fields that are no number of the merge."""
        init = self.config.get("init_lora_weights")
        if not any(init is plain or (isinstance(plain, str) and init == plain) for plain in _PLAIN_INITS):
            self.faults.append(
                f"init_lora_weights = {init!r} (such an adapter belongs to weights that its initialisation changed: "
                "save it in peft with path_initial_model_for_weight_conversion, which makes an ordinary one of it)"
            )
        if self.config.get("bias", "none") not in _BIASES:
            self.faults.append(f"bias = {self.config['bias']!r} (use {', '.join(_BIASES)})")
        for name, value in self.config.items():
            if name in _READ or name in _IGNORED or value is None or value is False or value in ("", [], {}):
                continue
            state = (
                "is not supported" if name in _REFUSED else "is not understood (remove it if no weight depends on it)"
            )
            self.faults.append(f"{name} = {_short(value)} {state}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class Module:
    """What the adapter holds for one module of its base.

    `path` is the module's in the base; `keys` maps a role to the tensor's name in the file. Roles are `A`, `B`,
    `B.bias`, `embedding_A`, `embedding_B`, `magnitude_vector`, and for whole tensors `weight` and `bias`, alone or
    after `base_layer.`, `original_module.` (both: what the module was during training) or `modules_to_save.`.
    """

    path: str
    keys: Mapping[str, str]


class Adapter:
    """The adapter in a directory. Raises SourceError for a file that is missing, damaged or not understood.

    `modules` is what it holds, by path; `unknown` are tensors that no role fits.
    """

    def __init__(self, directory: Path) -> None:
        self.ref = str(directory)
        self.directory = directory
        self._check_files()
        self.config = LoraConfig.read(read_json(directory / CONFIG), str(directory / CONFIG))
        self._file = SafetensorsFile(directory / WEIGHTS)
        self.modules, self.unknown = _modules(self._file.entries, self.ref)

    def _check_files(self) -> None:
        folder = self.directory
        if not folder.is_dir():
            state = "is not a directory" if folder.exists() else "is not there"
            raise SourceError(f"adapter {folder} {state}: give the directory that holds {CONFIG} and {WEIGHTS}.")
        if not (folder / CONFIG).is_file():
            raise SourceError(f"adapter {folder} has no {CONFIG}: give a directory that peft's save_pretrained wrote.")
        if (folder / WEIGHTS).is_file():
            return
        if pickled := [name for name in _PICKLES if (folder / name).exists()]:
            raise SourceError(
                f"adapter {folder} has its weights in {pickled[0]} only, a pickle, which can run any code when it is "
                "opened and is therefore not opened: where you trust it, convert it with "
                "`PeftModel.from_pretrained(base, DIR).save_pretrained(DIR)`, which writes "
                f"{WEIGHTS}."
            )
        raise SourceError(f"adapter {folder} has no {WEIGHTS}: save it with peft's save_pretrained.")

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._file.entries

    def read(self, key: str) -> np.ndarray:
        """A tensor of the file, as float32."""
        return self._file.read(key)

    @cached_property
    def sha256(self) -> str:
        """Over the names and digests of both files."""
        total = hashlib.sha256()
        for name in (CONFIG, WEIGHTS):
            with (self.directory / name).open("rb") as file:
                total.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return total.hexdigest()

    @cached_property
    def text_files(self) -> dict[str, bytes]:
        """The tokenizer's files that lie beside the adapter."""
        found = (name for name in TOKENIZER_FILES if (self.directory / name).is_file())
        return {name: (self.directory / name).read_bytes() for name in found}


def _modules(keys: Mapping[str, Entry], ref: str) -> tuple[dict[str, Module], list[str]]:
    found: dict[str, dict[str, str]] = {}
    unknown, adapters = [], set()
    for key in keys:
        placed = _placed(key.removeprefix("base_model.model."))
        if placed is None or placed[1] in found.get(placed[0], {}):
            unknown.append(key)
            continue
        path, role, adapter = placed
        found.setdefault(path, {})[role] = key
        if adapter:
            adapters.add(adapter)
    if len(adapters) > 1:
        raise SourceError(
            f"adapter {ref} holds several adapters, {', '.join(sorted(adapters))}: save the one that is meant alone."
        )
    return {path: Module(path, roles) for path, roles in found.items()}, unknown


def _placed(key: str) -> tuple[str, str, str] | None:
    """A key without the prefix -> the module's path, the role, and the adapter's name if the key holds one."""
    if found := _LORA_KEY.fullmatch(key):
        path, role, rest = found[1], found[2], found[3].split(".")[1:]
        leaf = rest.pop() if rest and rest[-1] in ("weight", "bias") else ""
        allowed = {"A": ("weight",), "B": ("weight", "bias"), "magnitude_vector": ("", "weight")}.get(role, ("",))
        if leaf not in allowed or len(rest) > 1:
            return None
        return path, f"{role}.bias" if leaf == "bias" else role, "".join(rest)
    if (found := _FULL_KEY.fullmatch(key)) is None:
        return None
    wrapper, _, adapter = (found[2] or "").removeprefix(".").partition(".")
    return found[1], f"{wrapper}.{found[3]}" if wrapper else found[3], adapter
