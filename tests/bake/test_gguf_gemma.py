"""Gemma 3 as GGUF files: two kinds of layers, and what the format leaves out or says in its own way."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anechain.bake.gguf import GgufSource
from anechain.bundle.spec import Attention, Rope
from anechain.errors import SourceError
from tests.tiny_gguf import gguf_metadata, gguf_tensors, write_gguf, write_tiny_gguf


def gemma(path: Path, **changes: Any) -> GgufSource:
    """T-gemma3 with metadata changed (`__` for a dot) or, with None, left out."""
    metadata = gguf_metadata("gemma3_text") | {key.replace("__", "."): value for key, value in changes.items()}
    kept = {key: value for key, value in metadata.items() if value is not None}
    return GgufSource(write_gguf(path, "gemma3", gguf_tensors("gemma3_text"), kept))


def test_gemma_s_windows_and_ropes(tmp_path: Path) -> None:
    full, sliding = Rope(1e6, "linear", 8.0), Rope(10000.0)
    plain = gemma(tmp_path / "x.gguf").spec
    assert plain.attentions == (Attention("full", full), Attention("sliding", sliding, 8))
    assert plain.layer_attention == (1, 1, 0) * 2 and plain.attention_scale == 24**-0.5
    assert plain.embedding_scale == 8 and plain.activation == "gelu_tanh" and plain.sandwich_norms and plain.tied
    by_six = gemma(tmp_path / "x.gguf", attention__sliding_window_pattern=None)  # what older files leave out
    assert by_six.spec.layer_attention == (1, 1, 1, 1, 1, 0)
    listed = gemma(tmp_path / "x.gguf", attention__sliding_window_pattern=[True, True, False] * 2)
    assert listed.spec == plain
    local = gemma(tmp_path / "x.gguf", rope__freq_base_swa=5000.0, rope__scaling__type=None, rope__scaling__factor=None)
    assert [a.rope for a in local.spec.attentions] == [Rope(1e6), Rope(5000.0)]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"attention__sliding_window": None}, "gemma3.attention.sliding_window is missing"),
        ({"attention__key_length": None}, "gemma3.attention.key_length is missing"),
        ({"rope__freq_base": None}, "gemma3.rope.freq_base is missing"),
        ({"attention__sliding_window_pattern": [True, False]}, "layer_types = ['sliding_attention', 'full_attention']"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        ({"attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping = 50.0 is not understood"),
    ],
)
def test_gemma_metadata_that_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SourceError) as caught:
        gemma(tmp_path / "x.gguf", **changes)
    assert words in str(caught.value)


def test_a_gemma_whose_scores_are_not_by_the_head_s_size(tmp_path: Path) -> None:
    """Only the 27B model's, which is known by its 62 layers: its heads share the hidden size."""
    path = write_tiny_gguf(tmp_path / "x.gguf", "gemma3_text", num_hidden_layers=62)
    assert GgufSource(path).spec.attention_scale == (64 / 4) ** -0.5


def test_factors_of_frequencies_are_not_gemma_s(tmp_path: Path) -> None:
    tensors = gguf_tensors("gemma3_text") | {"rope_freqs.weight": np.ones(12, np.float32)}
    path = write_gguf(tmp_path / "x.gguf", "gemma3", tensors, gguf_metadata("gemma3_text"))
    with pytest.raises(SourceError, match=r"rope_freqs\.weight that are not those of llama3 scaling"):
        GgufSource(path)
