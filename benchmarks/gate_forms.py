"""The gate on every form of one model: layers per package x state update x context, on the engines that are named.

    python benchmarks/gate_forms.py demo build/forms --engine cpu [--layers 1 2 5 all] [--context 256 2048]

Prints a row of the table for each run, both profiles. Bundles lie in the folder and are used again.
"""

import argparse
import json
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

COLUMNS = (
    *("layers a package", "update", "context", "engine", "profile", "verdict"),
    *("top-1", "min cosine", "min centred", "mean KL", "s"),
)


def anechain(*arguments: str) -> dict[str, Any]:
    """One command with `--json`; exit code 1 is a verdict, not a failure."""
    done = subprocess.run([sys.executable, "-m", "anechain", *arguments, "--json"], capture_output=True, text=True)
    if done.returncode > 1:
        raise SystemExit(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", nargs="+", default=["cpu"])
    parser.add_argument("--profile", nargs="+", default=["m8", "strict"])
    parser.add_argument("--layers", nargs="+", default=["1", "2", "5", "all"])
    parser.add_argument("--update", nargs="+", default=["slice", "blend"])
    parser.add_argument("--context", nargs="+", default=["256", "2048"])
    parser.add_argument("--bake", nargs="*", default=[], help="more flags of `anechain bake`, without their dashes")
    options = parser.parse_args()
    extra = [f"--{word}" if i % 2 == 0 else word for i, word in enumerate(options.bake)]
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|", flush=True)
    for context, layers, update in product(options.context, options.layers, options.update):
        bundle = options.folder / "-".join([layers, update, context, *options.bake])
        form = ["--layers-per-package", layers, "--state-update", update, "--context", context]
        anechain("bake", options.model, "-o", str(bundle), *form, *extra)
        for engine, profile in product(options.engine, options.profile):
            started = time.perf_counter()
            figures = anechain("gate", str(bundle), "--engine", engine, "--profile", profile)
            verdict = "PASS" if figures["verdict"] == "pass" else "accepted" if figures["accepted"] else "FAIL"
            print(
                f"| {layers} | {update} | {context} | {engine} | {profile} | {verdict} | {figures['top1']:.1%} | "
                f"{figures['min_cosine']:.6f} | {figures['min_centred_cosine']:.6f} | {figures['mean_kl']:.1e} | "
                f"{time.perf_counter() - started:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
