"""Baselines: the right rows of the right passes, and a file that is what was written or is refused."""

import os
import re
import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from anechain.bundle.spec import Attention, Rope
from anechain.errors import BundleError, RequestError, SourceError
from anechain.judge import prompts as texts
from anechain.judge.baseline import Baseline, PromptIds, build_baseline, long_positions, prompts_of
from anechain.judge.oracle import Oracle
from tests.judge.memory_source import plain_spec, random_source, randomize, torch_source
from tests.tolerances import ORACLE_LOGITS, ORACLE_PIECES

CONTEXT = 80
RNG = np.random.default_rng(11)


def ids(n: int) -> np.ndarray:
    return RNG.integers(0, 97, n).astype(np.int32)


PROMPTS = (
    PromptIds("first", ids(5), 4),
    PromptIds("long", ids(CONTEXT), len(long_positions(CONTEXT)), "forced"),
    PromptIds("second", ids(1), 7),
    PromptIds("third", ids(12), 1),
)


@pytest.fixture(scope="module")
def baseline() -> Baseline:
    return build_baseline(Oracle(random_source(plain_spec())), PROMPTS, "strict", CONTEXT)


# -- what is asked -----------------------------------------------------------------------------------------------------


def test_m8_is_the_published_five() -> None:
    assert texts.M8 == (
        "The capital of France is",
        "2 plus 2 equals",
        "The opposite of hot is",
        "Once upon a time there was a",
        "The chemical symbol for gold is",
    )
    prompts = prompts_of("m8", 64, lambda text: [len(text), 3])
    assert [p.ids.tolist() for p in prompts] == [[len(text), 3] for text in texts.M8]
    assert {(p.steps, p.kind, p.ids.dtype) for p in prompts} == {(8, "greedy", np.dtype(np.int32))}


def test_strict_is_held_out_and_has_chat_and_a_full_context() -> None:
    assert len(set(texts.STRICT)) == 20 and not set(texts.STRICT) & set(texts.M8)
    assert not any(a in b or b in a for a in texts.STRICT for b in texts.M8)
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        return [ord(c) for c in text]

    def encode_chat(text: str) -> list[int]:
        asked.append(text)
        return [1, 2]

    prompts = prompts_of("strict", 256, encode, encode_chat)
    assert [p.kind for p in prompts] == ["greedy"] * 22 + ["forced"] and len({p.name for p in prompts}) == 23
    assert {p.steps for p in prompts[:-1]} == {16} and len(prompts[-1].ids) == 256
    assert tuple(asked) == texts.CHAT and [p.ids.tolist() for p in prompts[20:22]] == [[1, 2]] * 2
    assert [p.name for p in prompts_of("strict", 256, encode)] == [p.name for p in prompts if "chat" not in p.name]
    assert prompts[-1].ids.tolist() == encode(texts.long_text(256)[:256])


@pytest.mark.parametrize("context", [32, 1024, 8192])
def test_tokens_of_seven_characters_fill_the_context(context: int) -> None:
    prompts = prompts_of("strict", context, lambda text: [ord(c) for c in text[::7]])
    assert len(prompts[-1].ids) == context


def test_a_tokenizer_that_makes_too_few_tokens_is_refused() -> None:
    with pytest.raises(SourceError, match=r"^the tokenizer makes only 3 tokens of 2048 characters .* 256 are needed"):
        prompts_of("strict", 256, lambda text: [1, 2, 3])


def test_the_long_text_fills_any_context_without_repeating_itself() -> None:
    assert len({s.split()[0] + s.split()[-1] for s in texts.SENTENCES}) == len(texts.SENTENCES) == 31
    for characters in (1, 8 * 1024, 8 * 32768):
        assert len(texts.long_text(characters)) >= characters
    text = texts.long_text(3 * 1900)
    turns = [re.findall("|".join(map(re.escape, texts.SENTENCES)), text)[i * 31 : i * 31 + 31] for i in range(3)]
    assert all(sorted(turn) == sorted(texts.SENTENCES) for turn in turns)
    followers = [set(pairwise(turn)) for turn in turns]
    assert not followers[0] & followers[1] and not followers[1] & followers[2]


def test_long_positions() -> None:
    assert long_positions(1024).tolist() == [63, 64, 511, 512, *range(1007, 1024)]
    assert long_positions(2048).tolist() == [63, 64, 511, 1024, *range(2031, 2048)]
    assert long_positions(80).tolist() == [40, *range(63, 80)]
    assert long_positions(5).tolist() == [0, 1, 2, 3, 4]


# -- what is answered --------------------------------------------------------------------------------------------------


def test_greedy_steps_are_those_of_transformers() -> None:
    """Its own greedy generation, and its logits at every judged position."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="eager",
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).float().eval()
    randomize(model, seed=5)
    spec = replace(plain_spec(), attentions=(Attention("full", Rope(10000.0)),))
    baseline = build_baseline(Oracle(torch_source(model, spec)), PROMPTS, "strict", CONTEXT)
    compared = 0
    for prompt, answer in zip(PROMPTS, baseline.answers, strict=True):
        with torch.no_grad():
            if prompt.kind == "greedy":
                given = torch.tensor(prompt.ids[None], dtype=torch.long)
                made = model.generate(given, max_new_tokens=prompt.steps, do_sample=False, pad_token_id=0)
                assert made[0, len(prompt.ids) :].tolist() == answer.tokens.tolist()
            logits = model(torch.tensor(answer.ids[None], dtype=torch.long)).logits[0].numpy()
        assert len(answer.ids) == answer.positions[-1] + 1
        assert np.abs(logits[answer.positions] - answer.logits).max() < ORACLE_LOGITS
        compared += len(answer.positions)
    assert compared == 4 + 18 + 7 + 1 == len(baseline.logits)


def test_answers_are_what_was_asked(baseline: Baseline) -> None:
    assert [(a.name, a.kind, len(a.ids), len(a.tokens)) for a in baseline.answers] == [
        ("first", "greedy", 5 + 3, 4),
        ("long", "forced", CONTEXT, 18),
        ("second", "greedy", 1 + 6, 7),
        ("third", "greedy", 12, 1),
    ]
    assert [a.positions.tolist() for a in baseline.answers] == [
        [4, 5, 6, 7],
        long_positions(CONTEXT).tolist(),
        [0, 1, 2, 3, 4, 5, 6],
        [11],
    ]
    for prompt, answer in zip(PROMPTS, baseline.answers, strict=True):
        assert np.array_equal(answer.ids[: len(prompt.ids)], prompt.ids)
        assert np.array_equal(answer.ids[len(prompt.ids) :], answer.tokens[:-1] if prompt.kind == "greedy" else [])
        assert np.array_equal(answer.logits.argmax(axis=1), answer.tokens)
        assert np.shares_memory(answer.logits, baseline.logits)
    assert baseline.vocab_size == 97 and baseline.canary == baseline.answers[0].tokens[0]
    assert baseline.tokens.dtype == baseline.positions.dtype == np.int32 and baseline.logits.dtype == np.float32


def test_prompts_alone_are_answered_as_together(baseline: Baseline) -> None:
    for prompt, answer in zip(PROMPTS, baseline.answers, strict=True):
        alone = build_baseline(Oracle(random_source(plain_spec())), [prompt], "strict", CONTEXT)
        assert np.array_equal(alone.tokens, answer.tokens)
        assert np.abs(alone.logits - answer.logits).max() < ORACLE_PIECES


def test_a_forced_prompt_alone_takes_one_pass(baseline: Baseline) -> None:
    calls: list[tuple[int, int]] = []
    oracle = Oracle(random_source(plain_spec()))
    alone = build_baseline(oracle, PROMPTS[1:2], "strict", CONTEXT, lambda *c: calls.append(c))
    assert calls == [(1, 2), (2, 2)] and np.array_equal(alone.tokens, baseline.answers[1].tokens)


def test_the_lowest_id_of_equal_logits_is_chosen() -> None:
    source = random_source(replace(plain_spec(), tied=False))
    head = np.zeros_like(source.tensors["head"])  # sums of zeros are equal in whatever order a BLAS adds them up
    flat = Oracle(replace(source, tensors={**source.tensors, "head": head}))
    assert build_baseline(flat, PROMPTS[:1], "m8", CONTEXT).tokens.tolist() == [0, 0, 0, 0]


def test_progress_counts_every_layer_of_every_pass() -> None:
    calls: list[tuple[int, int]] = []
    build_baseline(
        Oracle(random_source(plain_spec())), PROMPTS, "strict", CONTEXT, lambda done, total: calls.append((done, total))
    )
    assert calls == [(i, 14) for i in range(1, 15)]


def test_one_pass_over_the_weights_for_each_step() -> None:
    source = random_source(plain_spec())
    build_baseline(Oracle(source, keep_bytes=0), PROMPTS, "strict", CONTEXT)
    assert source.reads["layers.1.down"] == 7


def test_weights_with_a_nan_give_no_baseline() -> None:
    source = random_source(plain_spec())
    broken = source.tensors["embed"].copy()
    broken[int(PROMPTS[3].ids[0])] = np.nan
    spec = replace(source.spec, tied=False)
    tensors = {**source.tensors, "embed": broken, "head": source.tensors["embed"]}
    with pytest.raises(SourceError) as refusal:
        build_baseline(Oracle(replace(source, spec=spec, tensors=tensors)), PROMPTS[3:], "m8", CONTEXT)
    assert str(refusal.value) == (
        "the original's own float32 logits are not finite after third: its weights are damaged, fetch it again."
    )


def test_impossible_prompts_are_named_all_at_once() -> None:
    bad = [
        PromptIds("none", ids(0), 4),
        PromptIds("square", ids(4).reshape(2, 2), 4),
        PromptIds("idle", ids(3), 0),
        PromptIds("far", ids(70), 12),
        PromptIds("miscounted", ids(20), 3, "forced"),
        PromptIds("fits", ids(70), 11),
    ]
    with pytest.raises(RequestError) as refusal:
        build_baseline(Oracle(random_source(plain_spec())), bad, "m8", CONTEXT)
    assert str(refusal.value) == (
        "no baseline for a context of 80: none has no tokens; square has no tokens; idle has 0 steps; far needs 81 "
        "positions; miscounted has 3 steps where 20 tokens have 17 positions; use other prompts or a longer context."
    )
    with pytest.raises(RequestError, match="there is no prompt"):
        build_baseline(Oracle(random_source(plain_spec())), [], "m8", CONTEXT)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_saved_baseline_comes_back_whole(baseline: Baseline, tmp_path: Path) -> None:
    path = tmp_path / "baseline.npz"
    baseline.save(path)
    loaded = Baseline.load(path)
    for name in ("profile", "fingerprint", "context", "vocab_size", "canary"):
        assert getattr(loaded, name) == getattr(baseline, name)
    for name in ("positions", "tokens", "logits"):
        mine, theirs = getattr(baseline, name), getattr(loaded, name)
        assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs) and mine.size > 0
    for mine, theirs in zip(baseline.prompts, loaded.prompts, strict=True):
        assert (mine.name, mine.steps, mine.kind) == (theirs.name, theirs.steps, theirs.kind)
        assert np.array_equal(mine.ids, theirs.ids)
    assert isinstance(loaded.logits, np.memmap) and not loaded.logits.flags.writeable
    with np.load(path) as plain:
        assert np.array_equal(plain["logits"], baseline.logits), "numpy alone reads it"


def test_the_same_baseline_gives_the_same_bytes(baseline: Baseline, tmp_path: Path) -> None:
    baseline.save(tmp_path / "a.npz")
    Baseline.load(tmp_path / "a.npz").save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_a_new_file_leaves_the_rows_of_a_loaded_one_alone(baseline: Baseline, tmp_path: Path) -> None:
    baseline.save(tmp_path / "baseline.npz")
    loaded = Baseline.load(tmp_path / "baseline.npz")
    replace(baseline, logits=-baseline.logits).save(tmp_path / "baseline.npz")
    assert np.array_equal(loaded.logits, baseline.logits)
    assert np.array_equal(Baseline.load(tmp_path / "baseline.npz").logits, -baseline.logits)


def test_a_failed_save_leaves_what_was_there(
    baseline: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "baseline.npz"
    baseline.save(path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(BundleError, match=r"^baseline .*baseline\.npz cannot be written \(.*No space left"):
            baseline.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(BundleError, match="cannot be written"):
        baseline.save(tmp_path / "nowhere" / "baseline.npz")


def test_a_truncated_file_is_refused(baseline: Baseline, tmp_path: Path) -> None:
    path, cut = tmp_path / "baseline.npz", tmp_path / "cut.npz"
    baseline.save(path)
    whole = path.read_bytes()
    for length in [0, 1, 30, 500, *range(1000, len(whole), 1500), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(BundleError, match=r"cut\.npz is damaged or was not written by anechain \(.*\): bake again"):
            Baseline.load(cut)


def test_a_changed_byte_is_refused_or_changes_nothing(baseline: Baseline, tmp_path: Path) -> None:
    """Dates and the like in the zip's headers may differ; nothing that is read may."""
    path, other = tmp_path / "baseline.npz", tmp_path / "other.npz"
    replace(baseline, logits=baseline.logits[:, :5]).save(path)
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), 3):
        other.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            loaded = Baseline.load(other)
        except BundleError:
            refused += 1
            continue
        assert np.array_equal(loaded.logits, baseline.logits[:, :5]), at
        assert np.array_equal(loaded.tokens, baseline.tokens) and loaded.fingerprint == baseline.fingerprint, at
    assert refused > 0.8 * len(whole) / 3


def test_a_missing_file_and_other_files_are_refused(baseline: Baseline, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"none\.npz does not exist: give the \.npz that `anechain bake` wrote\.$"):
        Baseline.load(tmp_path / "none.npz")
    path = tmp_path / "baseline.npz"
    baseline.save(path)
    with np.load(path) as arrays:
        parts = dict(arrays)
    text = parts["about"].tobytes()

    def about(content: bytes) -> dict[str, np.ndarray]:
        return {"about": np.frombuffer(content, np.uint8)}

    changes = [
        ("is not a file in the archive", {k: v for k, v in parts.items() if k != "tokens"}),
        ("do not belong together", parts | {"logits": parts["logits"][:-1]}),
        ("do not belong together", parts | {"positions": parts["positions"][:-1]}),
        ("do not belong together", parts | {"tokens": parts["tokens"][:-1]}),
        ("do not belong together", parts | {"ids": parts["ids"][:-1]}),
        ("tokens is int64 with 1 axes", parts | {"tokens": parts["tokens"].astype(np.int64)}),
        ("positions is int32 with 2 axes", parts | {"positions": parts["positions"][None]}),
        (r"logits\.npy is float64 \[30, 97\]", parts | {"logits": parts["logits"].astype(np.float64)}),
        (r"logits\.npy is float32 \[30, 97\]", parts | {"logits": np.asfortranarray(parts["logits"])}),
        (r"logits\.npy is float32 \[2910\]", parts | {"logits": parts["logits"].reshape(-1)}),
        ("its format is 7, this version reads 1", parts | about(text.replace(b'"format": 1', b'"format": 7'))),
        ("Expecting value", parts | about(b"hello")),
        ("list indices", parts | about(b"[]")),
        ("out of bounds", {k: v[:0] for k, v in parts.items()} | about(b'{"format": 1, "prompts": []}')),
        ("Object", parts | {"ids": np.array([{}, []], dtype=object)}),
    ]
    other = tmp_path / "other.npz"
    for reason, wrong in changes:
        np.savez(other, **wrong)
        with pytest.raises(BundleError, match=rf"other\.npz is damaged .*{reason}.*: bake again"):
            Baseline.load(other)
    np.savez_compressed(other, **parts)
    with pytest.raises(BundleError, match=r"other\.npz is damaged .*it is compressed"):
        Baseline.load(other)
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(BundleError, match="is damaged or was not written by anechain"):
        Baseline.load(other)
    with pytest.raises(BundleError, match="is damaged or was not written by anechain"):
        Baseline.load(tmp_path)


def test_another_sources_baseline_is_refused(baseline: Baseline) -> None:
    baseline.check(baseline.fingerprint)
    with pytest.raises(BundleError) as refusal:
        baseline.check("f" * 64)
    assert str(refusal.value) == (
        f"the baseline was made from another source (fingerprint {baseline.fingerprint[:12]}, the bundle's is "
        "ffffffffffff): bake again, or give the baseline that was written with this bundle."
    )
    assert baseline.fingerprint == random_source(plain_spec()).fingerprint
