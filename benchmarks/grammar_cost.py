"""What a grammar's mask costs beside a decode step: median and worst over whole documents.

    python benchmarks/grammar_cost.py BUNDLE

The document is fed as if the model had said it, so that every place in the schema is met. Four times: compiled once,
then mask and accept for each token beside the chain's own step on the cpu engine.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from anechain.bundle.manifest import TOKENIZER, open_bundle
from anechain.run.chain import Chain
from anechain.run.grammar import Grammar, Grammars
from anechain.run.openvino import CpuEngine
from anechain.run.sample import greedy, restricted
from anechain.run.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "action": {"enum": ["open", "close", "play", "none"]},
        "say": {"type": "string", "maxLength": 200},
        "items": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "number"}}}},
        "when": {"type": "string", "format": "date-time"},
    },
    "required": ["action", "say", "items", "when"],
    "additionalProperties": False,
}
DOCUMENT = {
    "action": "open",
    "say": "Opening the door for you, one moment please. Ça va prendre un peu de temps 🌊.",
    "items": [{"n": 1}, {"n": -2.5e3}, {"n": 0.125, "other": [True, None, {"deep": "yes"}]}],
    "when": "2024-05-06T07:08:09Z",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    bundle = open_bundle(parser.parse_args().bundle)
    tokenizer, chain = Tokenizer.load(bundle.path / TOKENIZER), Chain(bundle, CpuEngine("exact"))
    begin = time.perf_counter()
    grammars = Grammars(tokenizer)
    tokenizer_ms = (time.perf_counter() - begin) * 1e3
    begin = time.perf_counter()
    grammars.start(Grammar.schema(SCHEMA))
    compile_ms = (time.perf_counter() - begin) * 1e3
    ids = tokenizer.encode(json.dumps(DOCUMENT, ensure_ascii=False), add_special=False)
    step_ms, mask_ms = [], []
    for turn in range(4):
        constraint, session = grammars.start(Grammar.schema(SCHEMA)), chain.start()
        logits = chain.feed(session, ids[:1])
        for token_id in ids:
            begin = time.perf_counter()
            allowed = constraint.allowed()
            assert allowed[token_id], tokenizer.decode([token_id])
            restricted(logits, tokenizer.n_ids, allowed)
            constraint.accept(token_id)
            with_mask = time.perf_counter()
            restricted(logits, tokenizer.n_ids, None)
            without = time.perf_counter()
            greedy(logits, tokenizer.n_ids)
            logits = chain.feed(session, [token_id])
            end = time.perf_counter()
            if turn:
                mask_ms.append(((with_mask - begin) - (without - with_mask)) * 1e3)
                step_ms.append((end - without) * 1e3)
        assert constraint.complete
    step, mask = statistics.median(step_ms), statistics.median(mask_ms)
    record = {
        "vocabulary": tokenizer.n_ids, "tokens": len(ids), "tokenizer_ms": tokenizer_ms, "compile_ms": compile_ms,
        "decode_step_ms": step, "mask_ms": mask, "mask_mean_ms": statistics.fmean(mask_ms),
        "mask_worst_ms": max(mask_ms), "mask_share": statistics.fmean(mask_ms) / statistics.fmean(step_ms),
    }  # fmt: skip
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
