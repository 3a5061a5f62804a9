"""`anechain` in this process, with adapters of the tests' own."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anechain.bake import jobs
from anechain.cli import main
from tests.in_process import InProcess
from tests.tiny_lora import pair, write_adapter

Q0, UP1 = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
BAKE = ("--context", "64", "--prefill", "32", "--layers-per-package", "1", "--jobs", "1")
PROMPT = np.array([3, 250, 17, 99, 0, 299, 64, 128, 5, 5, 201, 77])


class Run:
    """The command line, called here: its exit code, and what it wrote."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str | Path, code: int = 0) -> tuple[str, str]:
        self._patch.setattr(sys, "argv", ["anechain", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        assert ended.value.code == code, err
        return out, err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Bakes in this process, and baselines that are computed once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANECHAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(jobs, "ProcessPoolExecutor", InProcess)
        yield


def adapter_for(family: str, folder: Path, **config: Any) -> Path:
    """A LoRA on two matrices, large enough to change what the model says."""
    q = pair(Q0, 64 if family == "llama" else 128, 64, size=0.4)
    return write_adapter(folder / "adapter", q | pair(UP1, 96, 64, size=0.4), **config)


def refused(run: Run, *arguments: str | Path) -> str:
    """The one line on stderr of a refusal."""
    out, err = run(*arguments, code=2)
    line = err.splitlines()[-1]
    assert out == "" and line.startswith("anechain: ") and line.endswith(".")
    return line.removeprefix("anechain: ")
