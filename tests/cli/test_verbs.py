"""What each verb prints and returns."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anechain.bundle.manifest import open_bundle, record_files, write_manifest
from anechain.bundle.program import read_program
from anechain.cli import run as run_module
from tests.cli.outcome import SMALL, VERBS, WEIGHTS, Outcome, refusal, subprocess_environment
from tests.tiny import write_tiny


def test_help_of_every_verb(anechain: Callable[..., Outcome]) -> None:
    code, out, err = anechain("--help")
    assert (code, err) == (0, "") and all(f"\n  {verb} " in out for verb in VERBS)
    assert {"bake", "gate", "run", "inspect", "demo"} <= set(VERBS)
    assert anechain() == (code, out, err)
    for verb in VERBS:
        code, out, err = anechain(verb, "--help")
        assert (code, err) == (0, "") and out.startswith(f"Usage: anechain {verb} ") and "--json" in out


def test_version(anechain: Callable[..., Outcome]) -> None:
    code, out, err = anechain("--version")
    assert (code, err) == (0, "")
    word, version = out.split()
    assert word == "anechain" and version[0].isdigit()


def test_flags_that_scripts_rely_on(anechain: Callable[..., Outcome]) -> None:
    flags = {
        "bake": "-o --recipe --context --prefill --layers-per-package --target --jobs --force --json",
        "gate": "--engine --profile --baseline --by-package --json",
        "run": "--engine --max-tokens --temperature --top-k --top-p --seed --json",
        "inspect": "--json",
    }
    for verb, wanted in flags.items():
        out = anechain(verb, "--help")[1]
        assert [flag for flag in wanted.split() if flag not in out] == []


def test_bake_says_what_it_made(model: Path, anechain: Callable[..., Outcome], tmp_path: Path) -> None:
    path = tmp_path / "a path with spaces" / "et un été [/red] :smile:"
    code, out, err = anechain("bake", model, "-o", path, *SMALL, "--recipe", "int8")
    assert (code, out) == (0, "")
    assert f"\n{path}: 2 packages, 0.2 MB, " in err and "Traceback" not in err
    assert "\nno matrix stays fp16\n" in err and err.count("\n") == err.count("bake int8: ") + 3
    assert open_bundle(path, verify_hashes=True).recipe.name == "int8"
    code, out, err = anechain("bake", model, "-o", path, *SMALL, "--recipe", "int8", "--json")
    assert code == 0 and err == ""
    record = json.loads(out)
    assert record["bundle"] == str(path) and record["packages"] == 2 and record["baselines"] == ["m8"]
    assert record["bytes"] == sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    assert 0 <= record["wall_s"] < 10


def test_bake_json_is_one_object_and_nothing_else_on_stdout(
    model: Path, anechain: Callable[..., Outcome], tmp_path: Path
) -> None:
    code, out, err = anechain("bake", model, "-o", tmp_path / "b", *SMALL, "--json", "--layers-per-package", "1")
    assert code == 0 and json.loads(out)["packages"] == 2
    assert {line.split(":")[0] for line in err.splitlines()} == {"bake fp16"}


def test_other_options_need_force(model: Path, anechain: Callable[..., Outcome], tmp_path: Path) -> None:
    path = tmp_path / "b"
    assert anechain("bake", model, "-o", path, *SMALL)[0] == 0
    message = refusal(anechain, tmp_path, "bake", model, "-o", path, *SMALL, "--recipe", "int8")
    assert message == f"{path} holds another bundle: choose another folder with -o, or replace it with --force."
    assert anechain("bake", model, "-o", path, *SMALL, "--recipe", "int8", "--force")[0] == 0
    assert open_bundle(path, verify_hashes=True).recipe.name == "int8"


def test_bake_reads_a_recipe_file(model: Path, anechain: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[[rule]]\nmatch = "*.down"\nscheme = "int8-block32"\n')
    code, *_ = anechain("bake", model, "-o", tmp_path / "b", *SMALL, "--recipe", tmp_path / "mine.toml")
    assert code == 0
    recipe = open_bundle(tmp_path / "b").recipe
    assert recipe.name == "mine" and str(recipe.scheme_for("layers.0.down", 1)) == "int8-block32"


# -- gate --------------------------------------------------------------------------------------------------------------

GATE = {"verdict", "profile", "engine", "min_cosine", "mean_kl", "max_kl", "top1", "canary", "positions", "near_ties"}


def test_gate_passes(bundle: Path, anechain: Callable[..., Outcome]) -> None:
    code, out, err = anechain("gate", bundle, "--json")
    record = json.loads(out)
    assert (code, record["verdict"]) == (0, "pass")
    assert GATE | {"reasons"} <= set(record) and record["reasons"] == []
    assert (record["profile"], record["top1"], record["canary"], record["positions"]) == ("m8", 1.0, True, 40)
    assert [run["engine"] for run in record["runs"]] == ["reference", "reference-stress"]
    assert "Traceback" not in err
    code, out, _ = anechain("gate", bundle)
    assert code == 0 and out.count("PASS") == 2 and "FAIL" not in out
    assert max(map(len, out.splitlines())) > 80  # a pipe's table is not folded


def test_gate_fails_a_chain_that_says_something_else(
    model: Path, anechain: Callable[..., Outcome], tmp_path: Path
) -> None:
    path = tmp_path / "b"
    assert anechain("bake", model, "-o", path, *SMALL, "--recipe", "int8")[0] == 0
    code, out, _ = anechain("gate", path, "--json")
    record = json.loads(out)
    assert (code, record["verdict"]) == (1, "fail") and record["min_cosine"] < 0.999
    assert record["reasons"] and record["near_ties"]
    code, out, err = anechain("gate", path)
    assert code == 1 and out.count("FAIL") == 2
    # One of the tokens is an id that the tokenizer does not have, as those of padded vocabularies.
    assert re.search(r"near-tie at m8-.. position .*: ('.+'|token [23]\d\d) before token [23]\d\d by", out)
    assert err.endswith("`--by-package` looks for the package\n")


def test_gate_finds_the_package_that_is_wrong(bundle: Path, anechain: Callable[..., Outcome], tmp_path: Path) -> None:
    """A bundle whose manifest agrees with its files, and whose weights are not the original's."""
    path = Path(shutil.copytree(bundle, tmp_path / "b"))
    weights = path / "block-000.mlpackage" / WEIGHTS
    opened, data = open_bundle(path), weights.read_bytes()
    matrix = read_program(weights.parents[3]).functions["decode"].consts["layers_0_o"].tobytes()
    assert len(matrix) == 2 * 64 * 64 and data.count(matrix) == 1
    weights.write_bytes(data.replace(matrix, matrix[::-1]))
    write_manifest(replace(opened, files=dict(opened.files) | record_files(path, weights)))
    code, out, _ = anechain("gate", path, "--by-package", "--json")
    record = json.loads(out)
    assert (code, record["verdict"]) == (1, "fail")
    (package,) = record["packages"]
    assert package["file"] == "block-000.mlpackage" and package["first_bad"].startswith("m8-00 position ")
    code, out, _ = anechain("gate", path, "--by-package")
    assert code == 1 and "block-000.mlpackage: min cosine " in out and ": bad from m8-00 position " in out


def test_gate_refuses_the_baseline_of_another_model(
    bundle: Path, anechain: Callable[..., Outcome], tmp_path: Path
) -> None:
    other = write_tiny(tmp_path / "model", "llama", num_hidden_layers=1, rope_theta=5000.0)
    assert anechain("bake", other, "-o", tmp_path / "b", *SMALL)[0] == 0
    code, out, err = anechain("gate", bundle, "--baseline", tmp_path / "b/baseline-m8.npz")
    assert (code, out) == (2, "")
    assert err.startswith("anechain: the baseline was made from another source (fingerprint ") and err.count("\n") == 1


# -- run ---------------------------------------------------------------------------------------------------------------


def test_run_prints_the_text_and_json_the_same(bundle: Path, anechain: Callable[..., Outcome]) -> None:
    arguments = ("run", bundle, "The capital of France is", "--engine", "reference", "--max-tokens", "6")
    code, text, err = anechain(*arguments)
    assert code == 0 and err.startswith("reference: ") and err.count("\n") == 1
    code, out, err = anechain(*arguments, "--json")
    record = json.loads(out)
    assert (code, err) == (0, "") and record["text"] + "\n" == text
    assert set(record) == {"text", "ids", "finish", "engine", "handoff", "first_token_ms", "decode_tok_per_s"}
    assert (record["engine"], record["handoff"]) == ("reference", "host memory") and record["first_token_ms"] > 0
    assert len(record["ids"]) == 6 if record["finish"] == "length" else len(record["ids"]) <= 6


def test_the_same_seed_draws_the_same_tokens(bundle: Path, anechain: Callable[..., Outcome]) -> None:
    drawn = []
    for seed in (1, 1, 2):
        flags = ("--temperature", 2, "--top-k", 200, "--top-p", 0.99, "--seed", seed)
        out = anechain("run", bundle, "Once", "--engine", "reference", "--max-tokens", 12, "--json", *flags)[1]
        drawn.append(json.loads(out)["ids"])
    assert drawn[0] == drawn[1] != drawn[2]


def test_an_interrupt_is_one_line(
    bundle: Path, anechain: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "generate", interrupted)
    assert anechain("run", bundle, "x", "--engine", "reference") == (130, "", "anechain: interrupted.\n")


@pytest.mark.parametrize("engine", ["reference", "cpu"])
def test_run_needs_neither_torch_nor_coremltools(engine: str, bundle: Path) -> None:
    program = (
        "import sys; sys.argv = ['anechain', 'run', sys.argv[1], 'x', '--engine', sys.argv[2], '--max-tokens', '2']\n"
        "from anechain.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    print('\\nexit', end.code)\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print('heavy', sorted(loaded & {'torch', 'coremltools', 'transformers'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, bundle, engine],
        capture_output=True, text=True, check=True, env=subprocess_environment(),
    )  # fmt: skip
    assert done.stdout.splitlines()[-2:] == ["exit 0", "heavy []"], done.stderr


def test_a_reader_who_has_seen_enough(bundle: Path) -> None:
    """`anechain inspect | head -0`: the pipe is closed before anything is written to it."""
    reading, writing = os.pipe()
    os.close(reading)
    program = "import sys; sys.argv = ['anechain', *sys.argv[1:]]; from anechain.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "inspect", bundle],
        stdout=writing, stderr=subprocess.PIPE, check=False, env=subprocess_environment(),
    )  # fmt: skip
    os.close(writing)
    assert done.stderr == b""


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_inspect_measures_the_files(bundle: Path, anechain: Callable[..., Outcome]) -> None:
    code, out, err = anechain("inspect", bundle, "--json")
    record = json.loads(out)
    assert (code, err) == (0, "")
    assert (record["family"], record["context"], record["prefill"]) == ("llama", 64, 32)
    block, head = record["packages"]
    assert (block["file"], block["layers"], head["layers"]) == ("block-000.mlpackage", "0-0", "head")
    assert set(block["ops"]) == {"decode", "prefill"} and block["ops"]["decode"]["conv"] == 7
    spec = open_bundle(bundle).spec
    weights = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 96 * 64 + 2 * 64)  # q o, k v, feed-forward, norms
    assert block["weight_bytes"] == {"float16": weights + 2 * 2 * 32 * 32}  # and the mask of a chunk
    assert head["weight_bytes"] == {"float16": 2 * (spec.vocab_size + 1) * spec.hidden_size}
    assert record["bytes"] == sum(f.stat().st_size for f in bundle.rglob("*") if f.is_file())
    assert record["embedding"]["bytes"] == (bundle / "embedding.npy").stat().st_size
    code, out, err = anechain("inspect", bundle)
    assert (code, err) == (0, "")
    assert out.startswith(f"{bundle}: llama, 1 layers, context 64, recipe fp16, from ")
    assert "block-000.mlpackage" in out and "the model's head is another matrix" in out


def test_bench_measures_and_prints(bundle: Path, anechain: Callable[..., Outcome]) -> None:
    short = ("--runs", 1, "--prompt", 8, "--tokens", 4)
    code, out, err = anechain("bench", bundle, *short, "--json")
    record = json.loads(out)
    assert (code, err.count("bench: cpu exact")) == (0, 1)
    keys = ("decode_tok_per_s", "prefill_tok_per_s", "first_token_ms", "load_ms", "peak_rss_bytes")
    assert all(record[key] > 0 for key in (*keys, "weight_bytes_per_token"))
    code, out, _ = anechain("bench", bundle, *short, "--engine", "reference")
    assert code == 0 and "reference" in out and "MB of weights a token: " in out and "others used " in out
    assert anechain("bench", bundle, "--prompt", 10**6)[0] == 2
    assert (
        "--engine coreml is not known here: use cpu, openvino, reference."
        in anechain("bench", bundle, "--engine", "coreml")[2]
    )
