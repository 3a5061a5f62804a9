"""What `anechain doctor --record` measures on a Mac: forms of the demo bundle on Core ML, one row of a table each.

Every row runs in a process of its own, so that one that Core ML ends costs its figures and no others.
"""

import inspect
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from anechain.bake.jobs import make_plan as plan_bake
from anechain.bake.lora import open_merged
from anechain.bundle.manifest import Bundle, open_bundle
from anechain.bundle.recipe import Norm, Recipe, load_recipe, parse_recipe
from anechain.errors import AnechainError, RecipeError
from anechain.judge.conformance import AGREEMENT, run_checks
from anechain.judge.gate import run_gate
from anechain.judge.plan import make_plan
from anechain.judge.prepare import bake_with_baselines, load_baseline
from anechain.judge.record import Configuration, Device, GateFigures, Packages, Record, Trial, without_paths
from anechain.run.chain import Chain
from anechain.run.coreml import CoreMLEngine
from anechain.run.reference import ReferenceEngine

DECODE_TOKENS = 32  # whose median time is a decode speed
SHIPPED = ("fp16", "int8", "int8-block32", "m8")
NOT_AVAILABLE = "not available: "

MakeEngine = Callable[[], CoreMLEngine]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One form of a bundle. `scheme` is the name of a recipe that comes with anechain, or a scheme for all matrices;
    `options` are further arguments of a bake, by their names, which this anechain may or may not know.
    """

    name: str
    scheme: str = "fp16"
    layers: int | None = None  # a package; None is the fewest packages
    norm: Norm = "max-scaled"
    target: str = "macOS15"
    options: Mapping[str, str] = field(default_factory=dict)

    def recipe(self) -> Recipe:
        """Raises RecipeError for a scheme or a norm that this anechain does not know."""
        if self.scheme in SHIPPED:
            return replace(load_recipe(self.scheme), norm=self.norm)
        text = f'name = "{self.scheme}"\nnorm = "{self.norm}"\n[[rule]]\nmatch = "*"\nscheme = "{self.scheme}"\n'
        return parse_recipe(text, f"{self.name}.toml")


BLEND, INT8_PORTS = {"state_update": "blend"}, {"activations": "int8"}
ROWS: tuple[Row, ...] = (
    Row("fp16"),
    *(Row(f"fp16, {n} layers a package", layers=n) for n in (1, 2, 5)),
    Row("fp16, all layers in one package", layers=1000),
    Row("int8 per channel", "int8"),
    *(Row(f"int8 per channel, {n} layers a package", "int8", n) for n in (1, 2, 5)),
    Row("int8 per channel, all layers in one package", "int8", 1000),
    Row("int8 per block of 32", "int8-block32"),
    Row("palette of 6 bits, groups of 16", "palette6-group16"),
    Row("palette of 8 bits", "palette8"),
    Row("fp16, blend", options=BLEND),
    Row("int8 per channel, blend", "int8", options=BLEND),
    Row("fp16, layer_norm", norm="layer_norm"),
    Row("int8 per channel, int8 ports", "int8", 5, target="macOS26", options=INT8_PORTS),
    Row("historical recipe", "m8", 1),
)


@dataclass(frozen=True)
class Mac:
    """Where a record is made, in words that name no person and no single machine."""

    os: str
    chip: str
    machine: str


def make_record(
    mac: Mac, model: str, make_engine: MakeEngine, say: Say, rows: Sequence[Row] = ROWS, context: int = 1024
) -> Record:
    """Bakes every row of `model` into a temporary folder and tries it. `make_engine` is also called elsewhere.

    What this anechain cannot bake is a trial, too, with the reason and without a verdict.
    """
    trials, checks = [], dict[str, str]()
    for number, row in enumerate(rows):
        say(f"{number + 1} of {len(rows)}: {row.name}")
        with tempfile.TemporaryDirectory(prefix="anechain-record-") as folder:
            trial, failed = _trial(row, model, make_engine, Path(folder) / "bundle", context)
        trials.append(trial)
        checks |= {f"{row.name}: {check}": without_paths(reason) for check, reason in failed.items()}
        say(f"   {describe(trial)}")
    return Record(
        mac.os, mac.chip, mac.machine, version("coremltools"), version("anechain"), "coreml", tuple(trials), checks
    )


def describe(trial: Trial) -> str:
    """One line of a trial for the terminal."""
    if trial.diverged or trial.handoff.startswith(NOT_AVAILABLE):
        return trial.diverged or trial.handoff
    gate = f"gate {trial.gate.verdict}" if trial.gate else "no gate"
    speed = trial.bench.get("decode_tok_per_s")
    return ", ".join([gate, *([f"{speed:.1f} tok/s"] if speed else []), f"hand-off {trial.handoff}"])


def _trial(row: Row, model: str, make_engine: MakeEngine, out: Path, context: int) -> tuple[Trial, dict[str, str]]:
    written = {name: value for name, value in row.options.items() if name in Configuration.__dataclass_fields__}
    empty = replace(
        Configuration(Path(model).name, row.scheme, row.target, row.layers or 0, norm=row.norm, context=context),
        **written,  # type: ignore[arg-type]
    )
    unknown = sorted(set(row.options) - set(inspect.signature(plan_bake).parameters))
    if unknown:
        return Trial(empty, handoff=f"{NOT_AVAILABLE}this anechain does not know {', '.join(unknown)}"), {}
    try:
        source = open_merged(model, None)
        layers = None if row.layers is None else min(row.layers, source.spec.n_layers)
        plan = plan_bake(source, row.recipe(), context, 64, row.target, layers, **row.options)  # type: ignore[arg-type]
    except RecipeError as error:
        return Trial(empty, handoff=NOT_AVAILABLE + without_paths(str(error))), {}
    bundle = bake_with_baselines(source, plan, out, 1)
    tried = replace(empty, layers_per_package=max(len(block.layers) for block in bundle.blocks))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            found = pool.submit(try_bundle, out, make_engine).result()
        except BrokenProcessPool:
            return Trial(tried, diverged="Core ML ended the process, after the package had been tried out alone"), {}
    return replace(found.trial(tried), diverged=without_paths(found.diverged)), found.checks


@dataclass(frozen=True)
class Found:
    """What one bundle did on Core ML, as it comes back from the process that ran it."""

    diverged: str = ""
    checks: dict[str, str] = field(default_factory=dict)
    gate: dict[str, Any] | None = None
    handoff: str = ""
    bench: dict[str, float | None] = field(default_factory=dict)
    plan: Packages = field(default_factory=dict)

    def trial(self, tried: Configuration) -> Trial:
        names = GateFigures.__dataclass_fields__
        gate = None if self.gate is None else GateFigures(**{name: self.gate[name] for name in names})
        return Trial(tried, self.diverged, gate, self.handoff, self.bench, self.plan)


def try_bundle(path: Path, make_engine: MakeEngine) -> Found:
    """Loads, checks, gates, times and plans the bundle at `path`; the first failure ends it, and is the reason."""
    bundle, found = open_bundle(path), Found()
    try:
        started = time.perf_counter()
        engine = make_engine()
        chain = Chain(bundle, engine)
        load_ms = (time.perf_counter() - started) * 1e3
        bench = {"load_ms": load_ms, **_bench(chain)}
        checks = run_checks(chain, Chain(bundle, ReferenceEngine()), AGREEMENT)
        found = replace(found, bench=bench, checks=checks, handoff=engine.handoff)
        failed = [f"{check}: {reason}" for check, reason in checks.items() if reason and "hand off" not in check]
        found = replace(found, diverged="; ".join(failed))
        found = replace(found, gate=run_gate(chain, load_baseline(bundle, "m8")).to_json(), handoff=engine.handoff)
        planned = make_plan(bundle, engine, lambda done, total, what: None)
        return replace(found, plan=_devices(planned.places))
    except AnechainError as error:
        return replace(found, diverged="; ".join(part for part in (found.diverged, str(error)) if part))


def _bench(chain: Chain) -> dict[str, float | None]:
    bundle: Bundle = chain.bundle
    ids = np.random.default_rng(0).integers(0, bundle.spec.vocab_size, bundle.context)
    chunk = bundle.prefill or 1
    chain.feed(chain.start(), ids[: chunk + 1])  # the first prediction of each function is not like the others
    session, timed = chain.start(), []
    started = time.perf_counter()
    chain.feed(session, ids[:chunk])
    prefill_s = time.perf_counter() - started
    for i in ids[chunk : min(chunk + DECODE_TOKENS, bundle.context)]:
        started = time.perf_counter()
        chain.feed(session, [i])
        timed.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "first_token_ms": prefill_s * 1e3,
        "prefill_tok_per_s": chunk / prefill_s,
        "decode_tok_per_s": 1 / float(np.median(timed)) if timed else None,
        "peak_rss_bytes": float(peak),
    }


def _devices(places: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Packages:
    return {
        package: {
            function: {op: Device(placed.device, placed.cost) for op, placed in ops.items()}
            for function, ops in functions.items()
        }
        for package, functions in places.items()
    }
