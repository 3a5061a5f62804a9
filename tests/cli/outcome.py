"""The command line in this process: what a verb prints and returns."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anechain import cli
from anechain.bake import jobs
from anechain.cli import bake as bake_module
from tests.in_process import InProcess, tree
from tests.tiny import write_tiny

VERBS = [command.callback.__name__ for command in cli.commands().registered_commands if command.callback]
SMALL = ("--context", "64", "--prefill", "32")
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"

Outcome = tuple[int, str, str]


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No worker processes, one folder for all baselines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "ProcessPoolExecutor", InProcess)
        patch.setenv("ANECHAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def anechain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """anechain("bake", ...) -> exit code, stdout, stderr."""

    def call(*arguments: Any) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["anechain", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert isinstance(caught.value.code, int)
        return caught.value.code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, whose fp16 chain passes m8 and whose int8 chain does not."""
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def bundle(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "fp16"
    bake_module.bake_bundle(str(model), path, context=64, prefill=32, jobs=1)
    return path


def subprocess_environment() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return os.environ | {"PYTHONPATH": f"{root / 'src'}:{root}"}


def refusal(anechain: Callable[..., Outcome], where: Path, *arguments: Any) -> str:
    """What stderr says, which is one line; and nothing below `where` has changed."""
    before = tree(where)
    code, out, err = anechain(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("anechain: ") and err.endswith(".\n") and err.count("\n") == 1
    assert "Traceback" not in err
    assert tree(where) == before
    return err.removeprefix("anechain: ").removesuffix("\n")
