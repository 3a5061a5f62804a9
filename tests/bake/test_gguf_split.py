"""One GGUF model in several files, as gguf's own writer splits it."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from anechain.bake.gguf import GgufSource
from anechain.bake.source import open_source
from anechain.bundle.spec import tensors_of
from anechain.errors import SourceError
from tests.tiny_gguf import add_metadata, gguf_metadata, gguf_tensors, tiny_vocabulary, write_tiny_gguf


def refusal(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        GgufSource(path)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and str(path) in message
    return message


def split(folder: Path, parts: int = 3) -> list[Path]:
    """The tiny llama as gguf's own writer splits it."""
    writer = GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=-(-len(gguf_tensors("llama")) // parts))
    for key, value in {**{f"llama.{k}": v for k, v in gguf_metadata("llama").items()}, **tiny_vocabulary()}.items():
        add_metadata(writer, key, value)
    for name, values in gguf_tensors("llama").items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(folder.glob("m-*.gguf"))
    assert [p.name for p in paths] == [f"m-{i:05d}-of-{parts:05d}.gguf" for i in range(1, parts + 1)]
    return paths


def test_a_split_model_is_the_whole_one(tmp_path: Path) -> None:
    whole = GgufSource(write_tiny_gguf(tmp_path / "x.gguf", "llama"))
    paths = split(tmp_path)
    sources = [GgufSource(path) for path in paths]
    for source in sources:  # whichever part was named
        assert source.spec == whole.spec and source.text_files == whole.text_files
        assert source.fingerprint == sources[0].fingerprint != whole.fingerprint
    for name in tensors_of(whole.spec):
        np.testing.assert_array_equal(sources[0].tensor(name), whole.tensor(name), err_msg=name)
    assert open_source(str(paths[1])).spec == whole.spec
    content = bytearray(paths[2].read_bytes())
    content[-40] ^= 1
    paths[2].write_bytes(content)
    assert GgufSource(paths[0]).fingerprint != sources[0].fingerprint


def test_parts_that_are_missing_are_named_before_any_is_read(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[0].write_bytes(b"damaged")
    paths[1].unlink()
    assert refusal(paths[2]) == f"{paths[2]} is one of 3 parts, and {paths[1].name} is not beside it: fetch all parts."
    paths[2].unlink()
    assert f"and {paths[1].name}, {paths[2].name} are not beside it" in refusal(paths[0])


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    paths = split(tmp_path)
    second = paths[1].read_bytes()
    for content in (paths[2].read_bytes(), paths[0].read_bytes()):
        paths[1].write_bytes(content)
        assert "and the parts beside it do not belong together: fetch all parts again" in refusal(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    paths[2].write_bytes(second)  # exchanged: every tensor is there once
    assert "do not belong together" in refusal(paths[0])
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(second)
    assert "is one of 3 parts: join them with `gguf-split --merge`" in refusal(alone)
