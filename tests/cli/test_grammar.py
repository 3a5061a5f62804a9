"""`--schema`, `--regex` and `--grammar` of run and chat, and what serve refuses before it listens."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.outcome import Outcome, refusal

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"enum": [True, False]}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "s.json").write_text(json.dumps(SCHEMA))
    (folder / "g.lark").write_text('start: "yes" | "no"')
    (folder / "bad.json").write_text('{"type": "array", "uniqueItems": true}')
    (folder / "bytes").write_bytes(b"\xff\xfe")
    return folder


def test_run_keeps_to_a_grammar(bundle: Path, files: Path, anechain: Callable[..., Outcome]) -> None:
    run = ("run", bundle, "x", "--engine", "reference")
    record = json.loads(anechain(*run, "--schema", files / "s.json", "--json")[1])
    assert json.loads(record["text"])["ok"] in (True, False) and record["finish"] == "stop"
    assert anechain(*run, "--regex", "[0-9]{3}")[1].strip().isdigit()
    assert anechain(*run, "--grammar", files / "g.lark")[1].strip() in ("yes", "no")


def test_chat_keeps_every_answer_to_it(
    bundle: Path, files: Path, anechain: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    record = json.loads(anechain("chat", bundle, "--engine", "reference", "--regex", "(a|b)c", "--json")[1])
    assert [turn["assistant"] for turn in record["turns"]] in (["ac"], ["bc"])


def test_refusals(bundle: Path, files: Path, anechain: Callable[..., Outcome], tmp_path: Path) -> None:
    for verb in (("run", bundle, "x"), ("chat", bundle)):
        message = refusal(anechain, tmp_path, *verb, "--schema", files / "bad.json")
        assert (
            message == "this JSON schema cannot be used: constrained decoding does not support uniqueItems; change it."
        )
        message = refusal(anechain, tmp_path, *verb, "--schema", files / "s.json", "--regex", "a")
        assert message == "--schema and --regex exclude each other: give one of them."
        message = refusal(anechain, tmp_path, *verb, "--grammar", files / "none")
        assert (
            message == f"--grammar {files / 'none'} cannot be read (No such file or directory): name a file with one."
        )
        message = refusal(anechain, tmp_path, *verb, "--schema", files / "bytes")
        assert message == f"--schema {files / 'bytes'} cannot be read (it is not UTF-8 text): name a file with one."


def test_serve_refuses_before_it_listens(bundle: Path, anechain: Callable[..., Outcome], tmp_path: Path) -> None:
    message = refusal(anechain, tmp_path, "serve", bundle, "--api-key", "schlüssel")
    assert message == "--api-key holds characters that no HTTP header can carry: use ASCII alone."
    message = refusal(anechain, tmp_path, "serve", tmp_path / "nothing")
    assert message.startswith(f"bundle {tmp_path / 'nothing'} is not there")
    message = refusal(
        anechain, tmp_path, "serve", bundle, "--host", "203.0.113.1", "--port", "1", "--engine", "reference"
    )
    assert message.startswith("cannot listen at 203.0.113.1 port 1 (")
