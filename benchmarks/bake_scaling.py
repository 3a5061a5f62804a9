"""What a bake costs by the number of layers and by layers a package: processor time, wall time, peak memory.

    python benchmarks/bake_scaling.py --tokenizer DIR [--layers 7 14 28 56] [--per-package 1 4 auto] [--repeats 3]
                                      [--models DIR]

Models of Qwen3-0.6B's shape with so many layers (benchmarks/make_qwen3.py) are baked as int8, blocks, head and
embedding, context 1024, prefill 64, in fresh processes, round after round; the medians are printed. Counted is
everything from the start of Python to the finished manifest, the hash of the checkpoint included, all workers together;
not the baselines, which are not part of a package. Memory is the sum of the processes' proportional set sizes (see
measure_tree.py). Linux only; DIR as for make_qwen3.py. With --models the models are kept there for the next time.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from make_qwen3 import write_checkpoint
from measure_tree import busy_ticks, pss_bytes, tree


def bake_once(model: str, output: str, per_package: str, workers: int) -> None:
    """In a process of its own."""
    from anechain.bake.jobs import bake, make_plan
    from anechain.bake.source import open_source
    from anechain.bundle.recipe import load_recipe

    source = open_source(model)
    number = None if per_package == "auto" else int(per_package)
    bake(source, make_plan(source, load_recipe("int8"), 1024, 64, "macOS15", number), Path(output), workers)


def measured(command: list[str]) -> dict[str, float]:
    """Seconds of processor and wall, peak bytes, and the share of the machine that others used."""
    before, own_before, begun = busy_ticks(), os.times(), time.perf_counter()
    process = subprocess.Popen(command)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(pss_bytes, tree(process.pid))))
        time.sleep(0.02)
    wall_s, own = time.perf_counter() - begun, os.times()
    assert process.returncode == 0, command
    cpu_s = own.children_user + own.children_system - own_before.children_user - own_before.children_system
    looking_s = own.user + own.system - own_before.user - own_before.system
    all_s = (busy_ticks() - before) / os.sysconf("SC_CLK_TCK")
    others = max(0.0, all_s - cpu_s - looking_s) / (wall_s * (os.cpu_count() or 1))
    return {"cpu_s": cpu_s, "wall_s": wall_s, "peak_bytes": peak, "others": others}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[7, 14, 28, 56])
    parser.add_argument("--per-package", nargs="+", default=["1", "4", "auto"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        bake_once(*options.one, options.jobs)
        return
    if options.tokenizer is None:
        parser.error("--tokenizer is needed")
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    runs: dict[tuple[int, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as root:
        models = options.models or Path(root)
        for layers in options.layers:
            model = models / f"{layers}-layers"
            if not (model / "tokenizer_config.json").exists():
                write_checkpoint(model, layers)
                for name in ("tokenizer.json", "tokenizer_config.json"):
                    shutil.copy(options.tokenizer / name, model / name)
        for _ in range(options.repeats):
            for layers in options.layers:
                for per_package in options.per_package:
                    output = Path(root) / "bundle"
                    command = [sys.executable, __file__, "--jobs", str(options.jobs), "--one"]
                    run = measured([*command, str(models / f"{layers}-layers"), str(output), per_package])
                    runs.setdefault((layers, per_package), []).append(run)
                    shutil.rmtree(output)
    rows = []
    for (layers, per_package), found in runs.items():
        medians = {kind: statistics.median(run[kind] for run in found) for kind in found[0]}
        rows.append({"layers": layers, "per_package": per_package, **medians})
    if options.json:
        print(json.dumps(rows))
        return
    print("| layers | a package | processor s | s a layer | wall s | peak MB | others used |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['layers']} | {row['per_package']} | {row['cpu_s']:.1f} | {row['cpu_s'] / row['layers']:.2f} "
            f"| {row['wall_s']:.1f} | {row['peak_bytes'] / 1e6:.0f} | {row['others']:.0%} |"
        )
    print(f"\nmedian of {options.repeats}, {options.jobs} workers; 's a layer' has head and embedding in it")


if __name__ == "__main__":
    main()
