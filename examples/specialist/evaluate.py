"""What the base model and the specialist get right in transformers, before anything is baked.

    python examples/specialist/evaluate.py ADAPTER [--free] [--output figures.json]

Float32, greedy, the suite's own checks, answers kept to the suite's schema as `anechain eval` does; with --free also
without.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from train import load_base

from anechain.bake.source import open_source
from anechain.judge.fixtures import Fixture, judge
from anechain.judge.paired import mcnemar, paired_interval, pairs_of, wilson
from anechain.judge.suite import Suite, load_suite
from anechain.run.grammar import Grammar, Grammars
from anechain.run.sample import restricted
from anechain.run.tokenizer import Tokenizer

TOGETHER = 25


def answers(model: torch.nn.Module, tokenizer: Any, suite: Suite, grammars: Grammars | None) -> dict[str, str]:
    """The text of every fixture's answer; with `grammars`, kept to the suite's schema."""
    said: dict[str, str] = {}
    for begin in range(0, len(suite.fixtures), TOGETHER):
        said |= together(model, tokenizer, suite, suite.fixtures[begin : begin + TOGETHER], grammars)
        print(f"{len(said)} of {len(suite.fixtures)}", flush=True)
    return said


@torch.no_grad()
def together(
    model: torch.nn.Module, tokenizer: Any, suite: Suite, fixtures: tuple[Fixture, ...], grammars: Grammars | None
) -> dict[str, str]:
    """Side by side, padded on the left, with transformers' own chat template and key/value cache."""
    chats = [
        [{"role": "system", "content": suite.system}, {"role": "user", "content": fixture.input}]
        for fixture in fixtures
    ]
    prompts = [
        tokenizer.encode(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        for chat in chats
    ]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])  # [B, T]
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    rules = [grammars.start(Grammar.schema(suite.schema)) if grammars else None for _ in fixtures]
    out: list[list[int]] = [[] for _ in fixtures]
    open_ends, cache = set(range(len(fixtures))), None
    for _ in range(suite.max_tokens):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        result = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        cache = result.past_key_values
        chosen = []
        for i, row in enumerate(result.logits[:, -1].numpy()):
            rule = rules[i]
            if i not in open_ends:
                chosen.append(0)
                continue
            token = int(np.argmax(restricted(row, len(row), rule.allowed() if rule else None)))
            ended = token in (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>"))
            if rule and not ended:
                rule.accept(token)
            if not ended:
                out[i].append(token)
            if ended or (rule and rule.complete):
                open_ends.discard(i)
            chosen.append(token)
        if not open_ends:
            break
        ids = torch.tensor(chosen)[:, None]
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return {f.name: tokenizer.decode(out[i], skip_special_tokens=True) for i, f in enumerate(fixtures)}


def counted(suite: Suite, said: dict[str, str]) -> dict[str, bool]:
    return {f.name: judge(f, said[f.name], suite.schema).passed for f in suite.fixtures}


def figures(suite: Suite, passed: dict[str, bool]) -> dict[str, Any]:
    """Passed, number, rate and interval: of all, of each wording, of each kind in each wording."""
    groups: dict[str, list[bool]] = {}
    for fixture in suite.fixtures:
        for name in ("all", fixture.wording, f"{fixture.kind}, {fixture.wording}"):
            groups.setdefault(name, []).append(passed[fixture.name])
    table = {}
    for name, values in sorted(groups.items()):
        interval = wilson(sum(values), len(values))
        table[name] = {
            "passed": sum(values), "n": len(values), "rate": round(sum(values) / len(values), 4),
            "interval": [round(interval.low, 4), round(interval.high, 4)],
        }  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--free", action="store_true", help="also without the schema")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    suite = load_suite("mac-actions")
    base, tokenizer = load_base()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in open_source("demo").text_files.items():
            (Path(folder) / name).write_bytes(content)
        grammars = Grammars(Tokenizer.load(Path(folder)))
    specialist = PeftModel.from_pretrained(base, options.adapter).eval()
    record: dict[str, Any] = {"suite_sha256": suite.sha256, "fixtures": len(suite.fixtures)}
    passed = {}
    for form, rule in (("schema", grammars), ("free", None))[: 1 + options.free]:
        with specialist.disable_adapter():
            passed["base", form] = counted(suite, answers(specialist, tokenizer, suite, rule))
        said = answers(specialist, tokenizer, suite, rule)
        passed["specialist", form] = counted(suite, said)
        if rule:
            record["answers"] = said
        for who in ("base", "specialist"):
            record[f"{who}, {form}"] = figures(suite, passed[who, form])
    pairs = pairs_of(*(list(passed[who, "schema"].values()) for who in ("specialist", "base")))
    interval = paired_interval(pairs)
    record["paired, schema"] = {
        "gained": pairs.gained, "lost": pairs.lost, "difference": round(pairs.difference, 4),
        "interval": [round(interval.low, 4), round(interval.high, 4)], "mcnemar_p": mcnemar(pairs),
    }  # fmt: skip
    text = json.dumps(record, indent=1, ensure_ascii=False)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in record.items() if key != "answers"}, indent=1))


if __name__ == "__main__":
    main()
