"""Records that were imported: what they say of a machine, what they overrule, and what may not run there."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anechain.bundle.manifest import Bundle
from anechain.cli import doctor as doctor_module
from anechain.cli import serve as serve_module
from anechain.errors import EngineError, RequestError
from anechain.judge.compatibility import Machine
from anechain.judge.lint import lint
from anechain.judge.measured import (
    Stored,
    answer_for,
    configuration_of,
    feature_answer,
    import_record,
    refuse_diverged,
    stored_records,
)
from anechain.judge.record import Configuration, GateFigures, Record, Trial, write_record
from tests.bundle_maker import make_bundle, tiny_source
from tests.cli.outcome import Outcome, anechain

__all__ = ["anechain"]

PASS = GateFigures("pass", "m8", "coreml", 0.9999, 1e-5, 1e-4, 1.0, 40)
FORM = Configuration("demo", "fp16", "macOS15", 2, prefill=32, context=1024)
MACHINE = Machine("macOS", (26, 0, 1), "M5 Pro")


def record(*trials: Trial, os: str = "macOS 26.0.1", chip: str = "M5 Pro", tool: str = "9.0") -> Record:
    return Record(os, chip, "Mac17,3", tool, "0.1", "coreml", trials)


WORKS = record(Trial(FORM, gate=PASS))
BROKEN = record(Trial(FORM, diverged="cosine 0.31 at prompt 2"))
UNKNOWN = record(Trial(FORM))


def stored(*records: Record) -> list[Stored]:
    return [Stored(r, Path(f"{i}.zip")) for i, r in enumerate(records)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(tiny_source("qwen3"), tmp_path_factory.mktemp("b") / "b", cuts=[1, 2])


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANECHAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "records"


# -- three records: works, broken, unknown -----------------------------------------------------------------------------


@pytest.mark.parametrize(("made", "status"), [(WORKS, "works"), (BROKEN, "broken"), (UNKNOWN, "unknown")])
def test_what_a_record_says_of_a_bundle(made: Record, status: str, bundle: Bundle) -> None:
    assert bundle.tools["coremltools"] == "9.0"
    answer = answer_for(bundle, MACHINE, stored(made))
    assert answer.status == status
    assert (answer.basis, answer.file) == (("measured", Path("0.zip")) if status != "unknown" else ("", None))


def test_only_what_diverged_is_refused(bundle: Bundle) -> None:
    for made in (WORKS, UNKNOWN):
        refuse_diverged(bundle, MACHINE, stored(made))
    refuse_diverged(bundle, MACHINE, [])
    with pytest.raises(EngineError) as caught:
        refuse_diverged(bundle, MACHINE, stored(BROKEN))
    assert str(caught.value) == (
        f"{bundle.path} may not run on macOS 26.0.1, M5 Pro with packages of coremltools 9.0: a record made there says "
        "that it diverged (cosine 0.31 at prompt 2); bake it in another form, or use --engine cpu (the record is "
        "0.zip)."
    )


def test_one_record_that_diverged_outweighs_one_that_works(bundle: Bundle) -> None:
    for records in ([WORKS, BROKEN], [BROKEN, WORKS]):
        assert answer_for(bundle, MACHINE, stored(*records)).status == "broken"


@pytest.mark.parametrize("elsewhere", [
    replace(BROKEN, os="macOS 26.1"), replace(BROKEN, chip="M5"), replace(BROKEN, chip="M4 Pro"),
    replace(BROKEN, os="iOS 26.0.1"), replace(BROKEN, coremltools="8.3"),
])  # fmt: skip
def test_another_machine_says_nothing(elsewhere: Record, bundle: Bundle) -> None:
    assert answer_for(bundle, MACHINE, stored(elsewhere)).status == "unknown"


@pytest.mark.parametrize("change", [
    {"recipe": "int8"}, {"target": "macOS26"}, {"layers_per_package": 1}, {"state_update": "blend"},
    {"norm": "layer_norm"}, {"activations": "int8"}, {"prefill": 64},
])  # fmt: skip
def test_another_form_that_diverged_beside_one_that_works(change: dict[str, Any], bundle: Bundle) -> None:
    other = Trial(replace(FORM, **change), diverged="it died")
    assert answer_for(bundle, MACHINE, stored(record(other, Trial(FORM, gate=PASS)))).status == "works"
    control = Trial(replace(FORM, recipe="int4"), gate=PASS)
    assert answer_for(bundle, MACHINE, stored(record(other, control))).status == "unknown"


def test_a_machine_on_which_all_diverged_is_broken_for_every_form(bundle: Bundle) -> None:
    trials = [Trial(replace(FORM, recipe=r), diverged="it died") for r in ("int8", "m8")]
    assert answer_for(bundle, MACHINE, stored(record(*trials))).status == "broken"


def test_the_model_and_the_context_do_not_decide(bundle: Bundle) -> None:
    trial = Trial(replace(FORM, model="another", context=2048, function="decode"), diverged="it died")
    assert answer_for(bundle, MACHINE, stored(record(trial))).status == "broken"
    assert configuration_of(bundle).layers_per_package == 2


# -- features ----------------------------------------------------------------------------------------------------------


def test_measured_overrules_published() -> None:
    long = replace(FORM, prefill=64)
    published = feature_answer("long-slice-update", MACHINE, "9.0", [])
    assert (published.status, published.basis) == ("broken", "published")
    answer = feature_answer("long-slice-update", MACHINE, "9.0", stored(record(Trial(long, gate=PASS))))
    assert (answer.status, answer.basis) == ("works", "measured")
    # a decode step of one token says nothing of a long update
    decode = record(Trial(replace(long, function="decode"), gate=PASS))
    assert feature_answer("long-slice-update", MACHINE, "9.0", stored(decode)).basis == "published"


def test_two_records_that_contradict_each_other_prove_no_feature() -> None:
    long = Trial(replace(FORM, prefill=64), gate=PASS)
    bad = replace(long, diverged="cosine 0.31", gate=None)
    for records in ([record(long), record(bad)], [record(bad), record(long)], [record(bad, long)]):
        answer = feature_answer("long-slice-update", MACHINE, "9.0", stored(*records))
        assert (answer.status, answer.basis) == ("broken", "published")


def test_a_divergence_blames_only_what_nothing_that_works_has() -> None:
    slices = Trial(replace(FORM, prefill=64), diverged="cosine 0.1")
    blends = Trial(replace(FORM, state_update="blend"), gate=PASS)
    both = stored(record(slices, blends))
    assert feature_answer("slice-update", MACHINE, "9.0", both).status == "broken"
    assert feature_answer("state", MACHINE, "9.0", both).status == "works"
    assert feature_answer("int8", MACHINE, "9.0", both).status == "unknown"
    assert feature_answer("slice-update", MACHINE, "9.0", stored(record(slices))).basis != "measured"


def test_lint_moves_what_was_measured_to_work(tmp_path: Path) -> None:
    path = make_bundle(tiny_source("qwen3"), tmp_path / "b", context=128, prefill=64).path
    worked = stored(record(Trial(replace(FORM, prefill=64), gate=PASS)))
    before, after = lint(path, MACHINE), lint(path, MACHINE, records=worked)
    grave = {(f.rule, f.op) for f in before.findings if f.severity == "E"}
    assert ("K4", "kv_next") in grave and not before.overruled
    assert ("K4", "kv_next", "measured to work on macOS 26.0.1, M5 Pro") in {
        (f.rule, f.op, f.basis) for f in after.overruled
    }
    assert not [f for f in after.findings if f.severity == "E"] and after.clean
    assert lint(path, Machine("macOS", (26, 0, 1), "M5"), records=worked).overruled == ()


# -- the store ---------------------------------------------------------------------------------------------------------


def test_a_record_is_kept_once(tmp_path: Path, store: Path) -> None:
    write_record(BROKEN, tmp_path / "a.zip")
    kept, new = import_record(tmp_path / "a.zip")
    assert new and kept.record == BROKEN and kept.file.parent == store
    assert import_record(tmp_path / "a.zip") == (kept, False)
    write_record(WORKS, tmp_path / "b.zip")
    import_record(tmp_path / "b.zip")
    found = [s.record for s in stored_records()]
    assert len(found) == len(list(store.iterdir())) == 2 and BROKEN in found and WORKS in found


def test_a_damaged_record_of_the_store_is_named(tmp_path: Path, store: Path) -> None:
    write_record(WORKS, tmp_path / "a.zip")
    kept, _ = import_record(tmp_path / "a.zip")
    kept.file.write_bytes(b"PK")
    with pytest.raises(RequestError, match=str(kept.file)):
        stored_records()


# -- the command line --------------------------------------------------------------------------------------------------


def test_doctor_imports(anechain: Callable[..., Outcome], tmp_path: Path, store: Path) -> None:
    write_record(record(*WORKS.trials, Trial(replace(FORM, state_update="blend"), "it died")), tmp_path / "r.zip")
    code, out, _ = anechain("doctor", "--import", tmp_path / "r.zip", "--json")
    (file,) = store.iterdir()
    assert code == 0 and json.loads(out) == {
        "os": "macOS 26.0.1", "chip": "M5 Pro", "coremltools": "9.0", "new": True, "works": 1, "broken": 1,
        "unknown": 0, "file": str(file),
    }  # fmt: skip
    code, out, _ = anechain("doctor", "--import", tmp_path / "r.zip")
    assert code == 0 and out.splitlines() == [
        "measured on macOS 26.0.1, M5 Pro, with packages of coremltools 9.0:",
        "works    demo: fp16, macOS15, 2 layers a package, slice, fp16 between packages",
        "broken   demo: fp16, macOS15, 2 layers a package, blend, fp16 between packages: it died",
        f"known already: {file}",
    ]
    code, out, _ = anechain("doctor", "--json")
    assert json.loads(out)["records"] == 1


def test_doctor_refuses_what_is_no_record(anechain: Callable[..., Outcome], tmp_path: Path, store: Path) -> None:
    (tmp_path / "r.zip").write_bytes(b"hello")
    code, out, err = anechain("doctor", "--import", tmp_path / "r.zip")
    assert (code, out) == (2, "") and err.startswith(f"anechain: {tmp_path}/r.zip is not a record (File is not a zip")
    assert not store.exists()


@pytest.mark.parametrize("verb", ["run", "chat", "serve"])
@pytest.mark.parametrize(("made", "said"), [
    (BROKEN, "may not run on macOS 26.0.1, M5 Pro"), (WORKS, "the coreml engine needs"), (None, "the coreml engine"),
])  # fmt: skip
def test_run_chat_and_serve_refuse_on_a_machine_that_diverged(
    verb: str, made: Record | None, said: str, bundle: Bundle, anechain: Callable[..., Outcome], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for module in (doctor_module, serve_module):
        monkeypatch.setattr(module, "this_machine", lambda: MACHINE)
    if made is not None:
        write_record(made, tmp_path / "r.zip")
        import_record(tmp_path / "r.zip")
    words = (verb, bundle.path, *(["Hello"] if verb == "run" else []))
    code, out, err = anechain(*words, "--engine", "coreml")
    assert (code, out) == (2, "") and said in err
