"""A directory whose files are damaged, missing, unreadable or contradict each other: one sentence for each."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anechain.bake.hf import INDEX, WEIGHTS, HfSource
from anechain.errors import SourceError
from tests.tiny import shard, write_tiny

Q0 = "model.layers.0.self_attn.q_proj.weight"


def refusal(directory: Path) -> str:
    with pytest.raises(SourceError) as caught:
        HfSource(directory)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and str(directory) in message
    return message


def damaged_header(content: bytes, edit: Callable[[dict[str, Any]], Any]) -> bytes:
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    edit(header)
    new = json.dumps(header).encode()
    return struct.pack("<Q", len(new)) + new + content[8 + length :]


@pytest.mark.parametrize(
    "damage, words",
    [
        (
            lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "is a Git LFS pointer: fetch the",
        ),
        (lambda content: b"", "is empty or cut off (0 bytes)"),
        (lambda content: content[:5], "is empty or cut off (5 bytes)"),
        (lambda content: content[:40], "is cut off or not a safetensors file"),
        (lambda content: b"PK\x03\x04" + b"\xff" * 100, "is cut off or not a safetensors file"),
        (lambda content: content[:-4], "where its header says"),
        (lambda content: content + b"\0", "where its header says"),
        (lambda content: content[:8] + b"]" + content[9:], "has a damaged header"),
        (lambda content: struct.pack("<Q", 2) + b"[]", "has a damaged header"),
        (lambda content: damaged_header(content, lambda h: h[Q0].pop("shape")), "has a damaged header"),
        (lambda content: damaged_header(content, lambda h: h[Q0].update(shape=[64, 65])), "has a damaged header"),
        (lambda content: damaged_header(content, lambda h: h[Q0].update(shape=["64", 64])), "has a damaged header"),
        (lambda content: damaged_header(content, lambda h: h.update({Q0: None})), "has a damaged header"),
        (lambda content: damaged_header(content, lambda h: h.pop(Q0)), "has a damaged header"),
        (lambda content: damaged_header(content, lambda h: h[Q0].update(dtype="F16")), "has a damaged header"),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_damaged_tensor_files(tmp_path: Path, sharded: bool, damage: Callable[[bytes], bytes], words: str) -> None:
    write_tiny(tmp_path, "llama")
    if sharded:
        shard(tmp_path)
        place = json.loads((tmp_path / INDEX).read_text())["weight_map"]
        path = tmp_path / place[Q0]
    else:
        path = tmp_path / WEIGHTS
    path.write_bytes(damage(path.read_bytes()))
    message = refusal(tmp_path)
    assert words in message and str(path) in message


def test_index_and_files_that_disagree(tmp_path: Path) -> None:
    shard(write_tiny(tmp_path, "llama"))
    index = json.loads((tmp_path / INDEX).read_text())
    place = index["weight_map"]

    def with_map(weight_map: Any) -> str:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        return refusal(tmp_path)

    moved = "s-1.safetensors" if place[Q0] != "s-1.safetensors" else "s-3.safetensors"
    assert f"{moved} lacks {Q0}" in with_map(place | {Q0: moved})
    unlisted = with_map({own: name for own, name in place.items() if own != Q0})
    assert f"{place[Q0]} has {Q0}, which the index does not list" in unlisted
    assert "names files outside of its directory: ../s-1.safetensors" in with_map(place | {Q0: "../s-1.safetensors"})
    assert "has no weight_map from tensor names to file names" in with_map([1])
    assert "has no weight_map" in with_map({Q0: 3})
    (tmp_path / INDEX).write_text("{")
    assert f"{tmp_path / INDEX} is not valid JSON" in refusal(tmp_path)
    (tmp_path / "s-2.safetensors").unlink()
    assert "names files that are not there: gone.safetensors, s-2.safetensors" in with_map(
        place | {"x": "gone.safetensors"}
    )


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("config.json", b"{", "config.json is not valid JSON"),
        ("config.json", b"\xff\xfe\x00", "config.json is not valid JSON"),
        ("config.json", b"[]", "config.json holds no JSON object"),
        ("config.json", b"{}", "config.json has no model_type"),
        ("config.json", b"version https://git-lfs.github.com/spec/v1\n", "config.json is a Git LFS pointer"),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n", "tokenizer.json is a Git LFS pointer"),
        ("generation_config.json", b"{'", "generation_config.json is not valid JSON"),
        ("generation_config.json", b'{"eos_token_id": "</s>"}', "has eos_token_id = '</s>': use a token id"),
    ],
)
def test_bad_text_files(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    write_tiny(tmp_path, "llama")
    (tmp_path / name).write_bytes(content)
    assert words in refusal(tmp_path)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "tokenizer.json"])
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    write_tiny(tmp_path, "llama")
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    assert f"{tmp_path / name} cannot be read (Is a directory): check it and its permissions." in refusal(tmp_path)


def test_directory_without_safetensors(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    (tmp_path / WEIGHTS).unlink()
    assert refusal(tmp_path) == (f"{tmp_path} has no model.safetensors: give a directory with safetensors weights.")
    (tmp_path / "pytorch_model.bin").touch()
    assert "has no model.safetensors (only pytorch_model.bin)" in refusal(tmp_path)
