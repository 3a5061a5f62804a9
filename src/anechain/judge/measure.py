"""One fresh process of a bench: `python -m anechain.judge.measure BUNDLE ENGINE MODE ...` prints one JSON object.

A process of its own, because memory is counted at its peak and a start is only a start once.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from anechain.bundle.manifest import Bundle, open_bundle
from anechain.bundle.program import Program, read_program
from anechain.bundle.spec import DECODE
from anechain.run.chain import Chain
from anechain.run.cpu import cpu_engine
from anechain.run.engine import Engine
from anechain.run.reference import ReferenceEngine

REPEATS = 3  # of a prompt
STEPS = 16  # tokens at each length of context
KEPT_BACK = 1 << 10  # smaller constants are no weights: shapes, masks of one token


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("engine", choices=("cpu", "openvino", "reference"))
    parser.add_argument("mode", choices=("exact", "fast"))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--started", type=float, default=time.time())
    parser.add_argument("--curves", action="store_true")
    given = parser.parse_args()
    engine = ReferenceEngine() if given.engine == "reference" else cpu_engine(given.mode, given.engine == "cpu")
    json.dump(
        measure(open_bundle(given.bundle), engine, given.prompt, given.tokens, given.started, given.curves), sys.stdout
    )


def measure(bundle: Bundle, engine: Engine, prompt: int, tokens: int, started: float, curves: bool) -> dict[str, Any]:
    """Everything that one process can say. `started`: when the process was, in seconds since the epoch."""
    begin = time.perf_counter()
    chain = Chain(bundle, engine)
    load_ms = (time.perf_counter() - begin) * 1e3
    ids = np.random.default_rng(0).integers(0, bundle.spec.vocab_size, bundle.context)
    logits, first_ms = _fed(chain, ids[:prompt])
    start_to_first_ms = (time.time() - started) * 1e3
    prompt_ms = median(_fed(chain, ids[:prompt])[1] for _ in range(REPEATS))
    session = chain.start()
    logits = chain.feed(session, ids[:prompt])
    spent = []
    for _ in range(tokens):
        at = time.perf_counter()
        logits = chain.feed(session, [int(logits.argmax())])
        spent.append(time.perf_counter() - at)
    record: dict[str, Any] = {
        "engine": engine.name,
        "decode_tok_per_s": 1 / median(spent),
        "prefill_tok_per_s": prompt / prompt_ms * 1e3,
        "first_token_ms": first_ms,
        "load_ms": load_ms,
        "start_to_first_token_ms": start_to_first_ms,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
    }
    if curves:
        record["stages"] = _stages(chain, ids)
        record["decode_by_context"] = _by_context(chain, ids)
        record["prefill_by_length"] = _by_length(chain, ids)
    return record


def _fed(chain: Chain, ids: np.ndarray) -> tuple[np.ndarray, float]:
    session = chain.start()
    at = time.perf_counter()
    logits = chain.feed(session, ids)
    return logits, (time.perf_counter() - at) * 1e3


def _lengths(least: int, most: int) -> list[int]:
    lengths = [least << i for i in range(32) if least << i < most]
    return [*lengths, most]


def _by_context(chain: Chain, ids: np.ndarray) -> list[dict[str, float]]:
    """Decode at each length of context, the last STEPS tokens of it."""
    made = []
    for length in _lengths(64, chain.bundle.context):
        session = chain.start()
        chain.feed(session, ids[: length - STEPS])
        spent = []
        for token in ids[length - STEPS : length]:
            at = time.perf_counter()
            chain.feed(session, [int(token)])
            spent.append(time.perf_counter() - at)
        made.append({"context": length, "tok_per_s": 1 / median(spent)})
    return made


def _by_length(chain: Chain, ids: np.ndarray) -> list[dict[str, float]]:
    made = []
    for length in _lengths(16, chain.bundle.context):
        ms = min(_fed(chain, ids[:length])[1] for _ in range(2))
        made.append({"tokens": length, "tok_per_s": length / ms * 1e3})
    return made


def _stages(chain: Chain, ids: np.ndarray) -> list[dict[str, Any]]:
    """Milliseconds of a token in each stage and in the head; by kind of work where the engine says that."""
    session = chain.start()
    logits = chain.feed(session, ids[: max(1, min(64, chain.bundle.context - 2 * STEPS))])
    stages = [*chain.stages, chain.head]
    names = [f"{len(paths)} packages" if len(paths) > 1 else paths[0].name for paths in chain.packages]
    made = [{"stage": name, "ms": 0.0} for name in [*names, chain.bundle.head_path.name]]
    spent = [0.0] * len(stages)

    class Timed:
        def __init__(self, number: int, stage: Any) -> None:
            self.number, self.stage = number, stage

        def step(self, *arguments: Any) -> None:
            at = time.perf_counter()
            self.stage.step(*arguments)
            spent[self.number] += time.perf_counter() - at

    chain.stages = [Timed(i, stage) for i, stage in enumerate(stages[:-1])]  # type: ignore[misc]
    chain.head = Timed(len(stages) - 1, stages[-1])  # type: ignore[assignment]
    begin = time.perf_counter()
    for _ in range(STEPS):
        logits = chain.feed(session, [int(logits.argmax())])
    total = time.perf_counter() - begin
    chain.stages, chain.head = stages[:-1], stages[-1]
    for row, seconds in zip(made, spent, strict=True):
        row["ms"] = seconds / STEPS * 1e3
    made.append({"stage": "host", "ms": (total - sum(spent)) / STEPS * 1e3})
    for stage in stages:
        if hasattr(stage, "watch"):
            stage.watch(DECODE)
    for _ in range(STEPS):
        logits = chain.feed(session, [int(logits.argmax())])
    for row, stage in zip(made, stages, strict=False):
        if hasattr(stage, "watched"):
            row["kinds_ms"] = {kind: seconds / STEPS * 1e3 for kind, seconds in stage.watched(DECODE).items()}
    return made


def weight_bytes(bundle: Bundle) -> int:
    """What one token reads of the weights: the constants of the decode functions, as they are stored."""
    programs: list[Program] = [read_program(path) for path in (*bundle.block_paths, bundle.head_path)]
    consts = [array for program in programs for array in program.functions[DECODE].consts.values()]
    return sum(array.nbytes for array in consts if array.nbytes > KEPT_BACK)


if __name__ == "__main__":
    main()
