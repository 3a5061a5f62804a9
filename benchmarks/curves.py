"""Decode by the context that is in use, prefill by the length of the prompt, and single stages against stitched ones.

    python benchmarks/curves.py BUNDLE [--stages ONE_LAYER_BUNDLE] [--json OUT.json] [--plot OUT.svg]

Medians or the best of some runs in one process; how much of the processors others used meanwhile stands beside each.
`--stages` is a bundle with one layer a package; its chain runs stage by stage and stitched, token by token in turn.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from anechain.bundle.manifest import open_bundle
from anechain.judge.bench import clocks, read_bandwidth_bytes_per_s, used_by_others
from anechain.judge.measure import weight_bytes
from anechain.run.chain import Chain
from anechain.run.cpu import cpu_engine

STEPS, TURNS = 12, 40
CONTEXTS = (64, 128, 256, 512, 1024, 2048)
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--stages", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    bundle, before = open_bundle(given.bundle), clocks()
    chain = Chain(bundle, cpu_engine("fast"))
    ids = np.random.default_rng(0).integers(0, bundle.spec.vocab_size, bundle.context)
    record: dict[str, Any] = {
        "engine": chain.engine.name,
        "decode": [by_context(chain, ids, n) for n in CONTEXTS if n <= bundle.context],
        "prefill": [by_length(chain, ids, n) for n in LENGTHS if n <= bundle.context],
        "weight_bytes_per_token": weight_bytes(bundle),
    }
    if given.stages:
        record["stages"] = stages(given.stages, ids)
    record["cpu_used_by_others"] = used_by_others(before)
    record["read_bandwidth_bytes_per_s"] = read_bandwidth_bytes_per_s()
    text = json.dumps(record, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")
    if given.plot:
        plot(record, given.plot)


def by_context(chain: Chain, ids: np.ndarray, length: int) -> dict[str, float]:
    before, session = clocks(), chain.start()
    chain.feed(session, ids[: length - STEPS])
    spent = [timed(chain, session, [int(token)]) for token in ids[length - STEPS : length]]
    return {"context": length, "ms": median(spent), "tok_per_s": 1e3 / median(spent), "others": used_by_others(before)}


def by_length(chain: Chain, ids: np.ndarray, length: int) -> dict[str, float]:
    before = clocks()
    ms = min(timed(chain, chain.start(), ids[:length]) for _ in range(3 if length < 512 else 2))
    return {"tokens": length, "ms": ms, "tok_per_s": length / ms * 1e3, "others": used_by_others(before)}


def timed(chain: Chain, session: Any, ids: Any) -> float:
    begin = perf_counter()
    chain.feed(session, ids)
    return (perf_counter() - begin) * 1e3


def stages(path: Path, ids: np.ndarray) -> dict[str, float]:
    bundle = open_bundle(path)
    chains = [Chain(bundle, cpu_engine("fast"), stitched) for stitched in (False, True)]
    sessions = [chain.start() for chain in chains]
    for chain, session in zip(chains, sessions, strict=True):
        chain.feed(session, ids[:64])
    spent: list[list[float]] = [[], []]
    before = clocks()
    for token in ids[64 : 64 + TURNS]:
        for which in (0, 1):
            spent[which].append(timed(chains[which], sessions[which], [int(token)]))
    single, whole = map(median, spent)
    record = {"stages": len(chains[0].stages), "ms": single, "stitched_ms": whole, "ratio": single / whole}
    return record | {"others": used_by_others(before)}


def plot(record: dict[str, Any], out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.fonttype"], matplotlib.rcParams["svg.hashsalt"] = "none", "anechain"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axes, rows, key, what in (
        (left, record["decode"], "context", "decode, tokens a second by context in use"),
        (right, record["prefill"], "tokens", "prefill, tokens a second by length of the prompt"),
    ):
        axes.plot([row[key] for row in rows], [row["tok_per_s"] for row in rows], "o-", color="black")
        axes.set_xscale("log", base=2)
        axes.set_xticks([row[key] for row in rows], [str(row[key]) for row in rows])
        axes.set_ylim(bottom=0)
        axes.set_title(what, fontsize=9)
        axes.grid(alpha=0.3)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
