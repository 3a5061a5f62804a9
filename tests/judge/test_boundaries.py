"""int8 between packages: where its scales come from, and a bake that goes all the way through the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from anechain.bundle.form import boundary_scale
from anechain.bundle.manifest import MANIFEST, open_bundle
from anechain.bundle.program import read_program
from anechain.errors import BundleError, SourceError
from anechain.judge.boundaries import boundary_scales, calibration_ids, calibration_texts, kept_peaks, layer_peaks
from anechain.judge.lint import lint
from anechain.judge.oracle import Oracle
from anechain.judge.prompts import TEXTS
from tests.bundle_maker import tiny_source
from tests.cli.outcome import SMALL, Outcome, anechain, here
from tests.tiny import write_tiny

__all__ = ["anechain", "here"]


def test_no_prompt_of_the_gate_is_calibrated_on() -> None:
    texts = calibration_texts()
    prompts = [prompt for group in TEXTS.values() for prompt in group]
    assert len(texts) > 10 and len(prompts) > 20
    assert not [p for p in prompts for text in texts if p in text or text in p]


def test_every_paragraph_is_read_from_its_beginning() -> None:
    ids = calibration_ids(lambda text: list(text.encode()))
    assert [bytes(i.tolist()).decode(errors="ignore") for i in ids] == [
        text.encode()[:128].decode(errors="ignore") for text in calibration_texts()
    ]


def test_peaks_are_those_of_what_enters_each_layer() -> None:
    source = tiny_source("gemma3")
    sequences = [np.arange(9), np.arange(30, 35)]
    peaks = layer_peaks(source, sequences)
    assert len(peaks) == source.spec.n_layers + 1
    embedded = source.tensor("embed")[np.concatenate(sequences)] * source.spec.embedding_scale
    assert peaks[0] == pytest.approx(float(np.abs(embedded).max()), rel=1e-6)
    last = Oracle(source).forward(sequences)
    assert peaks[-1] == pytest.approx(max(float(np.abs(h).max()) for h in last), rel=1e-6)


def test_a_scale_for_each_boundary() -> None:
    assert boundary_scales([9.0, 127.0, 5.0, 254.0], [0, 1, 3], 0.5) == (boundary_scale(63.5), boundary_scale(127.0))
    assert boundary_scales([9.0, 127.0], [0], 0.5) == ()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_stream_that_is_not_finite() -> None:
    source = tiny_source("llama")
    source.tensors["layers.1.down"][0, 0] = np.inf
    with pytest.raises(SourceError, match=r"the residual stream of .* is not finite in float32: its wei"):
        layer_peaks(source, [np.arange(4)])


@pytest.mark.parametrize("content", ["", "{}", '{"peaks": [1.0]}', '{"peaks": [1.0, "x"]}', '{"peaks": [1.0, NaN]}'])
def test_a_cache_that_is_not_right_is_measured_again(content: str, tmp_path: Path) -> None:
    path = tmp_path / "peaks.json"
    path.write_text(content)
    assert kept_peaks(path, 2, lambda: [1.5, 2.5]) == [1.5, 2.5]
    assert kept_peaks(path, 2, lambda: pytest.fail("it is kept")) == [1.5, 2.5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama", head_dim=32)


def test_bake_for_macos_26_warns_and_lint_agrees(model: Path, anechain: Callable[..., Outcome], tmp_path: Path) -> None:
    form = ("--target", "macOS26", "--state-update", "blend", "--activations", "int8", "--layers-per-package", "1")
    code, out, err = anechain("bake", model, "-o", tmp_path / "b", *SMALL, *form, "--jobs", "1", "--json")
    assert code == 0
    warnings = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1 and warnings[0].startswith("warning: --target macOS26: rule V1: ")
    assert "Unable to bind buffer to network" in warnings[0] and "(published: tinygpt" in warnings[0]
    record, bundle = json.loads(out), open_bundle(tmp_path / "b")
    assert (record["target"], record["state_update"]) == ("macOS26", "blend")
    assert (bundle.target, bundle.state_update) == ("macOS26", "blend")
    assert record["boundary_scales"] == list(bundle.boundary_scales) and len(bundle.boundary_scales) == 1
    assert {read_program(p).spec_version for p in (*bundle.block_paths, bundle.head_path)} == {10}
    found = {(f.severity, f.rule) for f in lint(bundle.path).findings}
    assert {("E", "V1"), ("E", "Q6")} <= found
    assert not {rule for _, rule in found} & {"T5", "K4"}
    code, out, _ = anechain("inspect", bundle.path)
    assert code == 0
    assert f"for macOS26, state update blend, int8 (scales {bundle.boundary_scales[0]:g}) between packages" in out


@pytest.mark.parametrize("target", ["macOS15", "iOS18"])
def test_other_targets_do_not_warn(target: str, model: Path, anechain: Callable[..., Outcome], tmp_path: Path) -> None:
    code, _, err = anechain("bake", model, "-o", tmp_path / "b", *SMALL, "--target", target, "--jobs", "1")
    assert code == 0 and "warning" not in err and open_bundle(tmp_path / "b").target == target
    assert {f.rule for f in lint(tmp_path / "b").findings if f.severity == "E"} == set()


def test_all_layers_in_one_package(model: Path, anechain: Callable[..., Outcome], tmp_path: Path) -> None:
    flags = ("--layers-per-package", "all", "--jobs", "1")
    code, _, _ = anechain("bake", model, "-o", tmp_path / "b", *SMALL, *flags)
    assert code == 0 and [len(b.layers) for b in open_bundle(tmp_path / "b").blocks] == [2]


@pytest.mark.parametrize(("change", "said"), [
    ({"target": "macOS14"}, "its target 'macOS14' is none of macOS15, iOS18, macOS26, iOS26"),
    ({"state_update": "cat"}, "its state update 'cat' is none of slice, blend"),
    ({"boundary_scales": [1.0, 2.0]}, "it has 2 scales for 0 boundaries"),
])  # fmt: skip
def test_a_manifest_of_no_form(
    change: dict[str, object], said: str, model: Path, anechain: Callable[..., Outcome], tmp_path: Path
) -> None:
    anechain("bake", model, "-o", tmp_path / "b", *SMALL, "--jobs", "1")
    manifest = tmp_path / "b" / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **change}))
    with pytest.raises(BundleError) as caught:
        open_bundle(tmp_path / "b")
    assert said in str(caught.value)
