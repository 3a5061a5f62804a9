"""GgufFile against gguf's own reader; every type of tensor, and every way in which a file can be damaged."""

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUFReader
from gguf import GGMLQuantizationType as Type

from anechain.bake.gguf import GgufSource
from anechain.bake.gguf_file import GgufFile
from anechain.errors import SourceError
from tests.tiny_gguf import gguf_metadata, gguf_tensors, write_gguf, write_tiny_gguf


def refusal(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        GgufSource(path)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and str(path) in message
    return message


def test_header_is_what_gguf_reads(tmp_path: Path) -> None:
    """Names, shapes, types, offsets and every metadata value, with an alignment other than the default."""
    general = {
        "general.alignment": 64,
        "general.tags": ["a", "é"],
        "x.numbers": [1, 2],
        "x.halves": [0.5],
        "x.no": False,
    }
    path = write_tiny_gguf(tmp_path / "x.gguf", "llama", general)
    ours, theirs = GgufFile(path), GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields and len(fields) > 20
    assert theirs.alignment == 64 != GGUF_DEFAULT_ALIGNMENT
    assert len(theirs.tensors) == len(ours.tensors) == 21
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.begin, mine.end) == (tensor.data_offset, tensor.data_offset + tensor.n_bytes)
        assert mine.shape == tuple(reversed(tensor.shape.tolist())) and mine.kind == tensor.tensor_type


QUANTISED = [
    "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS",
    "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4",
]  # fmt: skip
REFUSED = ["Q8_1", "Q8_K", "I8", "I32", "F64"]


def typed(path: Path, *kinds: Type) -> Path:
    """A tiny llama with hidden 256 whose first matrices are of zero bytes in `kinds`."""
    changes = {"hidden_size": 256, "head_dim": 16, "intermediate_size": 256}
    tensors = gguf_tensors("llama", **changes)
    matrices = [name for name in tensors if "ffn_" in name and "norm" not in name][: len(kinds)]
    for name, kind in zip(matrices, kinds, strict=True):
        block, block_bytes = GGML_QUANT_SIZES[kind]
        tensors[name] = np.zeros((256, 256 // block * block_bytes), np.uint8)
    return write_gguf(
        path, "llama", tensors, gguf_metadata("llama", **changes), kinds=dict(zip(matrices, kinds, strict=True))
    )


@pytest.mark.parametrize("name", QUANTISED)
def test_types_that_are_dequantised(tmp_path: Path, name: str) -> None:
    values = GgufSource(typed(tmp_path / "x.gguf", Type[name])).tensor("layers.0.gate")
    assert values.shape == (256, 256) and values.dtype == np.float32 and np.isfinite(values).all()


def test_types_that_are_not_are_refused_by_name(tmp_path: Path) -> None:
    for name in REFUSED:
        assert f"of a type that is not supported: {name} (first in blk.0.ffn_gate.weight); use another" in refusal(
            typed(tmp_path / f"{name}.gguf", Type[name])
        )
    message = refusal(typed(tmp_path / "x.gguf", Type.Q8_1, Type.Q8_1, Type.Q8_K))
    assert "Q8_1 (first in blk.0.ffn_gate.weight), Q8_K (first in blk.0.ffn_down.weight)" in message


def test_type_number_that_nobody_knows(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", "llama")
    name = b"blk.1.ffn_up.weight"
    edited(path, name, len(name) + 4 + 2 * 8, struct.pack("<I", 250))
    assert "is not supported: number 250 (first in blk.1.ffn_up.weight)" in refusal(path)


def edited(path: Path, name: bytes, at: int, new: bytes) -> Path:
    """Write `new` over the entry of tensor `name` in the table, `at` bytes after the begin of its name."""
    content = bytearray(path.read_bytes())
    place = content.index(struct.pack("<Q", len(name)) + name) + 8 + at
    content[place : place + len(new)] = new
    path.write_bytes(content)
    return path


def test_damaged_entries_of_the_table(tmp_path: Path) -> None:
    entry, path = b"blk.1.ffn_up.weight", tmp_path / "x.gguf"
    write_tiny_gguf(path, "llama")
    twice = refusal(edited(path, entry, 0, b"blk.0.ffn_up.weight"))
    assert "has a damaged entry for tensor blk.0.ffn_up.weight: copy or download it again." in twice
    write_tiny_gguf(path, "llama")
    no_block = refusal(edited(path, entry, len(entry) + 4 + 2 * 8, struct.pack("<I", Type.Q4_K)))  # 64 columns, not 256
    assert "has a damaged entry for tensor blk.1.ffn_up.weight" in no_block
    write_tiny_gguf(path, "llama")
    assert "has a damaged entry" in refusal(edited(path, entry, len(entry) + 4, struct.pack("<Q", 0)))


def test_damaged_files(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", "llama")
    content = path.read_bytes()
    header_end = GgufFile(path).tensors["token_embd.weight"].begin

    def of(changed: bytes) -> str:
        path.write_bytes(changed)
        return refusal(path)

    assert "is empty" in of(b"")
    assert "is not a GGUF file" in of(b"GG")
    assert "is not a GGUF file" in of(b"GGML" + content[4:])
    assert "is a Git LFS pointer" in of(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "has GGUF version 1:" in of(content[:4] + struct.pack("<I", 1) + content[8:])
    assert "has GGUF version 50331648:" in of(content[:4] + struct.pack(">I", 3) + content[8:])  # big endian
    assert "ends after" in of(content[:-1]) and "within the data of" in of(content[:-1])
    cuts = sorted({*range(8, 200, 7), *np.linspace(200, header_end - 300, 40).astype(int).tolist()})
    assert len(cuts) > 60
    for cut in cuts:
        assert "is cut off or damaged within its header" in of(content[:cut]), cut
    assert "is cut off or damaged" in of(content[:16] + struct.pack("<Q", 2**62) + content[24:])
    bad_text = content.replace(b"general.architecture", b"general.\xff\xferchitecture"[:20], 1)
    assert "is cut off or damaged" in of(bad_text)
    (tmp_path / "d.gguf").mkdir()
    with pytest.raises(SourceError, match="Is a directory"):
        GgufSource(tmp_path / "d.gguf")
