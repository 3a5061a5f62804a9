"""Every refusal of the command line is one line, exit code 2, and makes nothing."""

import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anechain.bundle.manifest import MANIFEST
from tests.cli.outcome import SMALL, WEIGHTS, Outcome, refusal
from tests.in_process import tree
from tests.tiny import write_tiny


def config(directory: Path, **fields: Any) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))


CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda p: None, "there is no {p}: give `demo`, a .gguf file"),
    "file": (lambda p: p.write_text("x"), "{p} is neither a .gguf file nor a directory: give the directory that holds"),
    "empty": (lambda p: p.mkdir(), "{p} has no config.json: give a Hugging Face model directory."),
    "weights alone": (lambda p: (p.mkdir(), (p / "model.safetensors").touch()), "{p} has no config.json: give a Hugg"),
    "no model_type": (lambda p: config(p, hidden_size=64), "{p}/config.json has no model_type"),
    "unknown model_type": (lambda p: config(p, model_type="mamba"), "{p}/config.json has model_type 'mamba'"),
    "no JSON": (lambda p: (p.mkdir(), (p / "config.json").write_text("{")), "{p}/config.json is not valid JSON ("),
    "no object": (lambda p: (p.mkdir(), (p / "config.json").write_text("[]")), "{p}/config.json holds no JSON object"),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints_that_cannot_be_baked(kind: str, anechain: Callable[..., Outcome], tmp_path: Path) -> None:
    make, reason = CHECKPOINTS[kind]
    path = tmp_path / "é model"
    make(path)
    assert refusal(anechain, tmp_path, "bake", path, "-o", tmp_path / "b").startswith(reason.format(p=path))


def test_a_hub_id_without_a_network(anechain: Callable[..., Outcome], tmp_path: Path) -> None:
    message = refusal(anechain, tmp_path, "bake", "Qwen/Qwen3-0.6B", "-o", tmp_path / "b")
    assert message.startswith("the model Qwen/Qwen3-0.6B of the Hugging Face hub is not in the local cache")


BAKE_FLAGS: list[tuple[list[str], str]] = [
    (["--recipe", "int3"], "recipe 'int3' is not known: use one of "),
    (["--recipe", "nope.toml"], "recipe nope.toml cannot be read ("),
    (["--recipe", "{t}/bad.toml"], "{t}/bad.toml cannot be used: unknown key 'colour'; unknown key 'bits' in rule 1."),
    (
        ["--recipe", "{t}/far.toml"],
        "recipe 'far' cannot be applied to this model: pattern 'layers.7.*' matches no matr",
    ),
    (["--context", "100"], "this cannot be baked: --context 100 is not a multiple of 64 (use 128)."),
    (
        ["--context", "100000"],
        "this cannot be baked: --context 100000 is not a multiple of 64 (use 100032); --context 1",
    ),
    (["--context", "many"], "Invalid value for '--context': "),
    (["--prefill", "7"], "this cannot be baked: --prefill 7 is not 0 or a multiple of 32 (use 64)"),
    (["--layers-per-package", "some"], "--layers-per-package some is neither a whole number nor `auto` or `all`."),
    (["--layers-per-package", "²"], "--layers-per-package ² is neither a whole number nor `auto` or `all`."),
    (["--layers-per-package", "-1"], "--layers-per-package -1 is neither a whole number nor `auto` or `all`."),
    (["--layers-per-package", "0"], "this cannot be baked: --layers-per-package 0 is not a whole number of at least 1"),
    (["--jobs", "0"], "--jobs 0 is not a whole number of at least 1."),
    (
        ["--target", "iOS12"],
        "this cannot be baked: --target iOS12 is not known (use macOS15, iOS18, macOS26, iOS26).",
    ),
    (
        ["--state-update", "cat", "--activations", "int4"],
        "this cannot be baked: --state-update cat is not known (use slice or blend); --activations int4 is not known "
        "(use fp16 or int8).",
    ),
    (
        ["--activations", "int8"],
        "this cannot be baked: --activations int8 needs inputs and outputs of int8, which no system before macOS 26 "
        "and iOS 26 has (use --target macOS26, or leave it out for macOS15).",
    ),
    (
        ["--activations", "int8", "--target", "iOS26"],
        "this cannot be baked: --activations int8 is for what packages hand on to each other, and all layers are in "
        "one package (use --layers-per-package with a smaller number).",
    ),
    (["--bits", "8"], "No such option: --bits ("),
    (["more"], "Got unexpected extra argument(s) (more) (see `anechain --help`)."),
]


@pytest.mark.parametrize(("flags", "reason"), BAKE_FLAGS)
def test_flags_that_cannot_be_baked_with(
    flags: list[str], reason: str, model: Path, anechain: Callable[..., Outcome], tmp_path: Path
) -> None:
    (tmp_path / "bad.toml").write_text('colour = "red"\n[[rule]]\nmatch = "head"\nscheme = "int8"\nbits = 8\n')
    (tmp_path / "far.toml").write_text('[[rule]]\nmatch = "layers.7.*"\nscheme = "int8"\n')
    context = [] if "--context" in flags else ["--context", "128"]
    arguments = [flag.format(t=tmp_path) for flag in (*context, *flags)]
    message = refusal(anechain, tmp_path, "bake", model, "-o", tmp_path / "b", *arguments)
    assert message.startswith(reason.format(t=tmp_path))


def test_places_that_cannot_be_baked_to(model: Path, anechain: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/notes.txt").write_text("x")
    for path, reason in {
        tmp_path / "file": "is a file",
        tmp_path / "file/b": "cannot be made, because",
        tmp_path / "theirs": "holds files that anechain did not make",
        model: "is what is baked",
        model / "b": "lies inside what is baked",
    }.items():
        before = tree(model)
        message = refusal(anechain, tmp_path, "bake", model, "-o", path, *SMALL)
        assert message.startswith(f"{path} {reason}") and "choose another folder with -o." in message
        assert tree(model) == before


def test_a_broken_tokenizer_is_found_before_anything_is_made(
    model: Path, anechain: Callable[..., Outcome], tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(model, tmp_path / "model"))
    (broken / "tokenizer.json").write_text("{}")
    message = refusal(anechain, tmp_path, "bake", broken, "-o", tmp_path / "b", *SMALL)
    assert message.startswith(f"{broken}/tokenizer.json is not a tokenizer (")
    (broken / "tokenizer.json").unlink()
    assert "cannot be read" in refusal(anechain, tmp_path, "bake", broken, "-o", tmp_path / "b", *SMALL)


BUNDLES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda p: None, "bundle {p} is not there; make one with `anechain bake MODEL -o {p}`."),
    "file": (lambda p: p.write_text("x"), "bundle {p} is not there; make one with"),
    "empty": (lambda p: p.mkdir(), "bundle {p} has no manifest.json: it is not a bundle, or its bake did not finish"),
    "checkpoint": (lambda p: write_tiny(p, "llama"), "bundle {p} has no manifest.json"),
    "no JSON": (lambda p: (p.mkdir(), (p / MANIFEST).write_text("{")), "{p}/manifest.json cannot be read (JSONDecodeE"),
    "another's": (lambda p: (p.mkdir(), (p / MANIFEST).write_text("{}")), "bundle {p} has format None and this anech"),
    "a very long name": (lambda p: None, "{p}/manifest.json: File name too long."),
}


@pytest.mark.parametrize("kind", BUNDLES)
@pytest.mark.parametrize("verb", ["gate", "run", "inspect"])
def test_what_is_no_bundle(verb: str, kind: str, anechain: Callable[..., Outcome], tmp_path: Path) -> None:
    make, reason = BUNDLES[kind]
    path = tmp_path / ("x" * 300 if kind == "a very long name" else "é b")
    make(path)
    prompt = ["hello"] if verb == "run" else []
    assert refusal(anechain, tmp_path, verb, path, *prompt).startswith(reason.format(p=path))


def test_a_name_of_two_lines_is_refused_in_one(anechain: Callable[..., Outcome], tmp_path: Path) -> None:
    assert refusal(anechain, tmp_path, "inspect", "two\nlines").startswith("bundle two lines is not there; ")


@pytest.mark.parametrize("verb", ["gate", "inspect"])
def test_a_flipped_byte_is_not_judged(
    verb: str, bundle: Path, anechain: Callable[..., Outcome], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(bundle, tmp_path / "b"))
    data = bytearray((path / "embedding.npy").read_bytes())
    data[-1] ^= 1
    (path / "embedding.npy").write_bytes(data)
    message = refusal(anechain, tmp_path, verb, path)
    assert message == f"bundle {path} is damaged: embedding.npy has another sha256 than recorded: bake it again."


@pytest.mark.parametrize("verb", ["gate", "run", "inspect"])
def test_a_damaged_bundle(verb: str, bundle: Path, anechain: Callable[..., Outcome], tmp_path: Path) -> None:
    path = Path(shutil.copytree(bundle, tmp_path / "b"))
    os.truncate(path / "block-000.mlpackage" / WEIGHTS, 1000)
    (path / "tokenizer/tokenizer.json").unlink()
    message = refusal(anechain, tmp_path, verb, path, *(["hello"] if verb == "run" else []))
    assert message.startswith(f"bundle {path} is damaged: block-000.mlpackage/{WEIGHTS} has 1000 bytes instead of ")
    assert message.endswith("; tokenizer/tokenizer.json is missing: bake it again.")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["gate", "{b}", "--engine", "gpu"], "--engine gpu is not known: use reference, cpu, openvino, coreml."),
        (["plan", "{b}", "--compute-units", "npu"], "--compute-units npu is not known: use cpu-and-ne, all, "),
        (
            ["gate", "{b}", "--compute-units", "cpu"],
            "--compute-units are Core ML's: use --engine coreml, or reference ",
        ),
        (["gate", "{b}", "--fast"], "--fast is a mode of the cpu engine: use --engine cpu, or reference without it."),
        (["gate", "{b}", "--profile", "m9"], "--profile m9 is not known: use m8 or strict."),
        (["gate", "{b}", "--profile", "strict"], "{b} has no strict baseline, because its context of 64 is too small"),
        (["gate", "{b}", "--baseline", "{t}/no.npz"], "baseline {t}/no.npz does not exist"),
        (
            ["gate", "{b}", "--baseline", "{b}/manifest.json"],
            "baseline {b}/manifest.json is damaged or was not written",
        ),
        (["gate", "{b}", "--by-package", "--source", "{t}/gone"], "there is no {t}/gone: give"),
        (["gate"], "Missing argument 'BUNDLE' (see `anechain --help`)."),
        (["run", "{b}", "x" * 64], "the prompt has 64 tokens and the context of 64 has room for 64, answer included"),
        (["run", "{b}", ""], "the prompt has no tokens: give some text."),
        (["run", "{b}", "hi", "--engine", "gpu"], "--engine gpu is not known: use reference, cpu, openvino, coreml."),
        (["run", "{b}", "hi", "--fast"], "--fast is a mode of the cpu engine: use --engine cpu, or reference without"),
        (["run", "{b}", "hi", "--max-tokens", "0"], "--max-tokens 0 is not a whole number of at least 1."),
        (["run", "{b}", "hi", "--temperature", "-1", "--top-p", "0"], "sampling cannot use temperature -1.0 (a number"),
        (["run", "{b}", "hi", "--temperature", "nan"], "sampling cannot use temperature nan"),
        (["run", "{b}", "hi", "--seed", "x"], "Invalid value for '--seed': "),
        (["run", "{b}"], "Missing argument 'PROMPT' (see `anechain --help`)."),
        (["inspect", "{b}", "more"], "Got unexpected extra argument(s) (more) (see `anechain --help`)."),
        (["demo", "--nope"], "No such option: --nope"),
        (["bakes"], "No such command 'bakes'. Did you mean 'bake'? (see `anechain --help`)."),
        (["bake", "x"], "Missing option '-o' / '--output' (see `anechain --help`)."),
        (["--nope"], "No such option: --nope (see `anechain --help`)."),
    ],
)
def test_requests_that_cannot_be_answered(
    arguments: list[str], reason: str, bundle: Path, anechain: Callable[..., Outcome], tmp_path: Path
) -> None:
    arguments = [argument.format(b=bundle, t=tmp_path) for argument in arguments]
    if arguments[0] == "run" and "--engine" not in arguments:
        arguments += ["--engine", "reference"]
    before = tree(bundle)
    assert refusal(anechain, tmp_path, *arguments).startswith(reason.format(b=bundle, t=tmp_path))
    assert tree(bundle) == before


def test_a_prompt_that_just_fits(bundle: Path, anechain: Callable[..., Outcome]) -> None:
    code, out, _ = anechain("run", bundle, "x" * 63, "--engine", "reference", "--json")
    assert code == 0 and len(json.loads(out)["ids"]) == 1 and json.loads(out)["finish"] == "length"


@pytest.mark.skipif(platform.system() == "Darwin", reason="a Mac has Core ML")
@pytest.mark.parametrize(
    "arguments",
    [
        ["gate", "{b}", "--engine", "coreml"],
        ["run", "{b}", "hi", "--engine", "coreml", "--compute-units", "cpu"],
        ["chat", "{b}", "--engine", "coreml"],
        ["plan", "{b}"],
        ["plan", "{b}", "--bisect"],
        ["doctor", "--record", "{t}/out.zip"],
    ],
    ids=" ".join,
)
def test_core_ml_is_elsewhere(
    arguments: list[str], bundle: Path, anechain: Callable[..., Outcome], tmp_path: Path
) -> None:
    message = refusal(anechain, tmp_path, *(argument.format(b=bundle, t=tmp_path) for argument in arguments))
    assert message == (
        f"the coreml engine needs a Mac with Apple silicon, and this is {platform.system()} on {platform.machine()}: "
        "use --engine cpu."
    )
