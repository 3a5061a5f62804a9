"""PEFT adapters made by hand: `write_adapter(tmp_path / "a", pair("model.layers.0.self_attn.q_proj", 64, 64, r=4))`."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny import REMOVED, save_safetensors

PREFIX = "base_model.model."
CONFIG: dict[str, Any] = {  # the fields of adapter_config.json as peft 0.21 writes them
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "auto_mapping": None, "peft_version": "0.21.2", "revision": None,
    "base_model_name_or_path": "tiny", "inference_mode": True, "r": 4, "lora_alpha": 6, "lora_dropout": 0.05,
    "target_modules": None, "exclude_modules": None, "fan_in_fan_out": False, "bias": "none", "lora_bias": False,
    "use_rslora": False, "use_dora": False, "modules_to_save": None, "init_lora_weights": True,
    "layers_to_transform": None, "layers_pattern": None, "rank_pattern": {}, "alpha_pattern": {},
    "megatron_config": None, "megatron_core": "megatron.core", "trainable_token_indices": None, "loftq_config": {},
    "eva_config": None, "corda_config": None, "lora_ga_config": None, "velora_config": None, "kasa_config": None,
    "monteclora_config": None, "arrow_config": None, "use_bdlora": None, "alora_invocation_tokens": None,
    "use_qalora": False, "qalora_group_size": 16, "layer_replication": None, "target_parameters": None,
    "ensure_weight_tying": False,
}  # fmt: skip


def random(name: str, shape: tuple[int, ...], size: float = 1.0) -> np.ndarray:
    """float32 values, other than the base's; the same name and shape always give the same ones."""
    return (size * np.random.default_rng([1, zlib.crc32(name.encode())]).standard_normal(shape)).astype(np.float32)


def pair(module: str, outputs: int, inputs: int, r: int = 4, size: float = 0.3) -> dict[str, np.ndarray]:
    """lora_A [r, inputs] and lora_B [outputs, r] of `module`, a path in the base model."""
    a, b = f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"
    return {a: random(a, (r, inputs), size), b: random(b, (outputs, r), size)}


def write_adapter(
    directory: Path, tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str] | str = "F32", **changes: Any
) -> Path:
    """Writes the adapter's two files to `directory`, which is made and returned; `changes` are fields of its config."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (CONFIG | changes).items() if value is not REMOVED}
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_safetensors(directory / "adapter_model.safetensors", tensors, dtypes)
    return directory
