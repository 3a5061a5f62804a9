"""The bench: fresh processes in turn, what it makes of their records, and what it refuses."""

import json
import sys
from pathlib import Path

import pytest

from anechain.bundle.manifest import Bundle
from anechain.errors import EngineError
from anechain.judge import bench
from anechain.judge.bench import MEASURES, NOT_INSTALLED, Contender, own, peers, run_bench
from anechain.judge.measure import weight_bytes
from tests.bundle_maker import make_bundle, tiny_source


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(tiny_source("llama"), tmp_path_factory.mktemp("b") / "b", "int8", 64, 32, (2, 1))


def process(record: dict[str, float] | str, code: int = 0, error: str = "") -> tuple[str, ...]:
    text = record if isinstance(record, str) else json.dumps(record)
    script = f"import sys; print({text!r}); print({error!r}, file=sys.stderr); sys.exit({code})"
    return (sys.executable, "-c", script)


def quiet(done: int, total: int, what: str) -> None:
    assert 0 <= done < total and what


def test_a_bundle_in_a_fresh_process(bundle: Bundle) -> None:
    seen: list[tuple[int, int, str]] = []
    contender = own(bundle, "cpu", "exact", 16, 8)
    record = run_bench(bundle, [contender], 1, True, lambda *what: seen.append(what))
    assert seen == [(0, 1, "cpu exact")]
    assert all(record[key] > 0 for key in MEASURES)
    assert record["engine"].startswith(("cpu-native-exact", "cpu-openvino-exact"))
    assert record["start_to_first_token_ms"] > record["load_ms"]
    assert record["first_token_ms"] == pytest.approx(16e3 / record["prefill_tok_per_s"], rel=3)
    assert [row["context"] for row in record["decode_by_context"]] == [64]
    assert [row["tokens"] for row in record["prefill_by_length"]] == [16, 32, 64]
    assert [row["stage"] for row in record["stages"]] == ["2 packages", "head.mlpackage", "host"]
    assert 0 <= record["cpu_used_by_others"] <= 1 and record["runs"] == 1 and not record["not_installed"]
    if record["engine"].startswith("cpu-native"):
        kinds = record["stages"][0]["kinds_ms"]
        assert {"linear8", "attention", "norm", "quantise"} <= set(kinds)
        assert record["share_of_read_bandwidth"] == pytest.approx(
            record["weight_bytes_per_token"] * record["decode_tok_per_s"] / record["read_bandwidth_bytes_per_s"]
        )


def test_weight_bytes_are_those_of_the_matrices_and_their_scales(bundle: Bundle) -> None:
    """Three layers: four 64 x 64 or 32 x 64 matrices of attention, three of 96 x 64; a head of 320 x 64. Scales f16."""
    matrices = 3 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 96 * 64) + 320 * 64
    assert matrices <= weight_bytes(bundle) <= matrices * 1.1


def test_medians_of_processes_in_turn_and_who_is_missing(bundle: Bundle, tmp_path: Path) -> None:
    """The first one's figures are the record's; one that is not installed is asked once."""
    counter = tmp_path / "count"
    numbered = (
        "import json, pathlib, sys; p = pathlib.Path(sys.argv[1]); n = len(p.read_text()) if p.exists() else 0; "
        f"p.write_text('x' * (n + 1)); made = dict.fromkeys({MEASURES!r}, [4, 1, 2][n]); "
        "print(json.dumps({**made, 'engine': 'e'}))"
    )
    first = Contender("mine", (sys.executable, "-c", numbered, str(counter)))
    other = Contender("other", process({"decode_tok_per_s": 7.0}))
    absent = Contender("absent", process("", NOT_INSTALLED, "it is not installed"))
    record = run_bench(bundle, [first, other, absent], 3, False, quiet)
    assert {record[key] for key in MEASURES} == {2}
    assert record["contenders"]["other"]["decode_tok_per_s"] == 7 and len(record["contenders"]["other"]["runs"]) == 3
    assert record["not_installed"] == {"absent": "it is not installed"} and "absent" not in record["contenders"]
    assert record["achieved_bytes_per_s"] == 2 * record["weight_bytes_per_token"]


@pytest.mark.parametrize(("text", "code"), [("{}", 1), ("no json", 0), ("", 0)])
def test_a_process_that_fails_is_an_error(bundle: Bundle, text: str, code: int) -> None:
    with pytest.raises(EngineError) as caught:
        run_bench(bundle, [Contender("broken", process(text, code, "it broke"))], 1, False, quiet)
    assert str(caught.value) == "the process that measures broken failed (it broke): run it alone to see why."


def test_a_run_that_others_disturb_is_made_again(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as TRIES says, and then the calmest of them counts."""
    made = dict.fromkeys(MEASURES, 1.0)
    shares = iter([0.5, 0.2, 0.01, 0.5, 0.9, 0.4, 0.6, 0.7, 0.8])
    ran = []

    def process(contender: Contender, extra: object) -> dict[str, object]:
        ran.append(contender.name)
        return {**made, "engine": "e", "cpu_used_by_others": next(shares)}

    monkeypatch.setattr(bench, "_process", process)
    record = run_bench(bundle, [Contender("a", ()), Contender("b", ())], 1, False, quiet, calm=True)
    assert ran == ["a"] * 3 + ["b"] * bench.TRIES
    found = {name: row["runs"][0]["cpu_used_by_others"] for name, row in record["contenders"].items()}
    assert found == {"a": 0.01, "b": 0.4}


def test_peers_are_the_scripts_of_a_folder(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "_shared.py", "notes.txt"):
        (tmp_path / name).write_text("")
    found = peers(tmp_path, "/a/python", "/models/m", 5, 6)
    assert [contender.name for contender in found] == ["a", "b"]
    flags = ("--source", "/models/m", "--prompt", "5", "--tokens", "6")
    assert found[0].command == ("/a/python", str(tmp_path / "a.py"), *flags)
    with pytest.raises(EngineError, match=r"holds no scripts for peers: run the bench from a checkout, or name their"):
        peers(tmp_path / "nothing", "/a/python", "m", 5, 6)


def test_without_the_native_library_the_share_is_unknown(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise EngineError("not built")

    monkeypatch.setattr(bench, "library", refused)
    made = {**dict.fromkeys(MEASURES, 1.0), "engine": "e"}
    record = run_bench(bundle, [Contender("mine", process(made))], 1, False, quiet)  # type: ignore[arg-type]
    assert record["read_bandwidth_bytes_per_s"] is record["share_of_read_bandwidth"] is None


def test_the_peers_of_the_repository_say_what_is_missing(tmp_path: Path) -> None:
    """Exit code NOT_INSTALLED and a reason, whether the model or the library is what lacks."""
    import subprocess

    folder = Path(__file__).parents[2] / "benchmarks" / "peers"
    scripts = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
    assert len(scripts) >= 2
    for script in scripts:
        made = subprocess.run([sys.executable, str(script), "--source", str(tmp_path)], capture_output=True, text=True)
        assert made.returncode == NOT_INSTALLED and "Traceback" not in made.stderr, made.stderr
