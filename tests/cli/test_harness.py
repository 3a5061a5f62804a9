"""The evaluation harness on a bundle: a local task of each kind, with transformers as the other answer."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import lm_eval
import torch
from lm_eval.tasks import TaskManager
from transformers import LlamaForCausalLM

from anechain.bake import jobs
from anechain.bake.source import open_source
from anechain.bundle.manifest import TOKENIZER
from anechain.cli import harness
from anechain.cli.harness import NAME, AnechainLM
from anechain.errors import RequestError
from anechain.run.tokenizer import Tokenizer
from tests.bundle_maker import make_bundle
from tests.in_process import InProcess
from tests.tiny import BOS, write_tiny
from tests.tolerances import HARNESS_NATS

CONTEXT = 64
TASKS = {
    "generate": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["Q"], max_gen_toks: 7}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "choose": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["yes", "no no"]
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
""",
}
QUESTIONS = ["abc", "what is it", "x" * 150]  # the last is longer than the context


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("harness")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "ProcessPoolExecutor", InProcess)
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        write_tiny(folder / "model", "llama", num_hidden_layers=1)
        make_bundle(open_source(str(folder / "model")), folder / "bundle", context=CONTEXT)
        for name, text in TASKS.items():
            rows = [{"question": q, "answer": "?"} for q in (QUESTIONS if name == "rolling" else QUESTIONS[:2])]
            data = folder / f"{name}.json"
            data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            head = f"task: tiny_{name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
            (folder / f"{name}.yaml").write_text(f"{head}test_split: test\n{text}", encoding="utf-8")
        yield folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found = lm_eval.simple_evaluate(
        model=NAME, model_args={"bundle": str(folder / "bundle"), "engine": "reference"}, bootstrap_iters=0,
        tasks=[f"tiny_{name}" for name in TASKS], log_samples=True,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )  # fmt: skip
    return {name: sorted(found["samples"][f"tiny_{name}"], key=lambda s: s["doc_id"]) for name in TASKS}


@pytest.fixture(scope="module")
def original(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()


def log_probabilities(model: LlamaForCausalLM, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1).numpy()  # [T, V]


def test_choices_are_scored_as_transformers_scores_them(
    folder: Path, results: dict[str, list[dict[str, Any]]], original: LlamaForCausalLM
) -> None:
    tokenizer, compared = Tokenizer.load(folder / "bundle" / TOKENIZER), 0
    for question, sample in zip(QUESTIONS, results["choose"], strict=False):
        for choice, answer in zip(("yes", "no no"), sample["filtered_resps"], strict=True):
            before, whole = tokenizer.encode(question), tokenizer.encode(f"{question} {choice}")
            table = log_probabilities(original, whole)
            wanted = sum(table[i - 1, whole[i]] for i in range(len(before), len(whole)))
            greedy = all(table[i - 1].argmax() == whole[i] for i in range(len(before), len(whole)))
            assert answer[0] == pytest.approx(wanted, abs=HARNESS_NATS * (len(whole) - len(before)))
            assert bool(answer[1]) == greedy
            compared += 1
    assert compared == 4


def test_rolling_likelihood_is_that_of_transformers_beyond_the_context_too(
    folder: Path, results: dict[str, list[dict[str, Any]]], original: LlamaForCausalLM
) -> None:
    tokenizer = Tokenizer.load(folder / "bundle" / TOKENIZER)
    for question, sample in zip(QUESTIONS, results["rolling"], strict=True):
        ids, wanted = [BOS, *tokenizer.encode(question, add_special=False)], 0.0
        for end in range(1, len(ids), CONTEXT):  # windows of the context, the last one moved back to be full
            stop = min(end + CONTEXT, len(ids))
            start = max(0, stop - 1 - CONTEXT)
            table = log_probabilities(original, ids[start : stop - 1])
            wanted += sum(table[i - 1 - start, ids[i]] for i in range(end, stop))
        got = sample["filtered_resps"][0]
        assert got == pytest.approx(wanted, abs=HARNESS_NATS * len(ids)) and got < -10


def test_text_is_generated_until_a_stop(
    results: dict[str, list[dict[str, Any]]], folder: Path, original: LlamaForCausalLM
) -> None:
    tokenizer = Tokenizer.load(folder / "bundle" / TOKENIZER)
    for question, sample in zip(QUESTIONS, results["generate"], strict=False):
        ids = tokenizer.encode(question)
        said: list[int] = []
        while len(said) < 7 and not (said and said[-1] in tokenizer.eos_ids):
            said.append(int(log_probabilities(original, ids + said)[-1][: tokenizer.n_ids].argmax()))
        assert sample["filtered_resps"][0] == tokenizer.decode(said).split("Q")[0]


@pytest.fixture(scope="module")
def model(folder: Path) -> AnechainLM:
    return AnechainLM(str(folder / "bundle"), engine="reference")


def test_a_stop_text_ends_it_wherever_it_begins(model: AnechainLM) -> None:
    whole = model._continue("abc", {"max_gen_toks": 7})
    assert len(whole) > 3
    assert model._continue("abc", {"max_gen_toks": 7, "until": whole[2:4]}) == whole[: whole.find(whole[2:4])]
    assert model._continue("abc", {"max_gen_toks": 7, "until": [whole[3], whole[1]]}) == whole[: min(
        whole.find(whole[3]), whole.find(whole[1]))]  # fmt: skip
    assert model._continue("abc", {"max_gen_toks": 7, "do_sample": False, "temperature": 9.0}) == whole


@pytest.mark.parametrize(
    ("options", "temperature"),
    [({}, 0.0), ({"temperature": 0.7}, 0.7), ({"do_sample": False, "temperature": 0.7}, 0.0),
    ({"do_sample": True}, 1.0),
     ({"do_sample": True, "temperature": 0.0}, 0.0)],
)  # fmt: skip
def test_the_temperature_is_what_the_harness_means(options: dict[str, Any], temperature: float) -> None:
    assert harness._temperature(options) == temperature


def test_what_it_cannot_do_it_refuses(model: AnechainLM) -> None:
    with pytest.raises(RequestError, match="options beams are not known"):
        model._continue("abc", {"beams": 4})
    with pytest.raises(RequestError, match="the context of 64 has room for 64"):
        model._continue("x" * 80, {})
    with pytest.raises(RequestError, match="has no tokens"):
        model._pair("abc", "") and model._score([1], [])
    assert model.apply_chat_template([{"role": "user", "content": "hi"}]).endswith("<|im_start|>assistant\n")
    assert model.chat_template(True) == model._tokenizer.chat_templates["default"] and model.tokenizer_name
