"""Bakes a bundle: plan, validate everything, run the jobs in parallel, resume by content, write the manifest last.

After a kill, the same command goes on from the packages that are finished; `place.py` keeps what it needs for that.
"""

import hashlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from importlib.metadata import version
from itertools import pairwise
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

from anechain.bake import package, place
from anechain.bake.lora import Merged, open_merged
from anechain.bake.source import Source, open_source
from anechain.bake.survival import Figures, summary, survival
from anechain.bundle.embedding import PALETTE, SCALE, TABLE
from anechain.bundle.footprint import matrix_bytes
from anechain.bundle.form import INT8_PORTS, STATE_UPDATES, TARGETS, Form, StateUpdate, form_of
from anechain.bundle.manifest import (
    HEAD,
    MANIFEST,
    TOKENIZER,
    Block,
    Bundle,
    FileRecord,
    open_bundle,
    write_manifest,
)
from anechain.bundle.recipe import Recipe
from anechain.bundle.rounded import Rounded
from anechain.bundle.spec import ModelSpec, matrices_of
from anechain.errors import BundleError, RecipeError, RequestError, SourceError

PREFILL = 64  # tokens of a prefill chunk, unless somebody says otherwise
MAX_LAYERS, MAX_BYTES = 15, 950 * 10**6  # of one package (rules S18 and S19)
EMBEDDING, EXTRAS = "embedding", "extras"
SPACE_MARGIN = 1.02  # the programs, the tokenizer and what a file system keeps for itself

Progress = Callable[[int, int, str], None]  # jobs done, jobs in all, what was just finished


@dataclass(frozen=True)
class Plan:
    """A bake, decided and validated: nothing is read from the command line after this."""

    ref: str
    fingerprint: str
    text_sha256: str  # of the tokenizer's files, which the fingerprint leaves out
    spec: ModelSpec
    recipe: Recipe
    context: int
    prefill: int
    target: str
    blocks: tuple[Block, ...]
    shares_table: bool  # the embedding is read from the head's weights
    adapter_ref: str | None = None
    adapter_sha256: str | None = None
    stream_peak: float | None = None  # of the original's residual stream; what it decides is in `spec`
    state_update: StateUpdate = "slice"
    int8_boundaries: bool = False  # hidden states between packages in int8
    boundary_scales: tuple[float, ...] = ()  # then one for each boundary, as calibrated
    rounded_file: str | None = None  # tensors that were rounded beforehand, for a recipe with a calibration
    calibration: Mapping[str, Any] | None = None  # what they were rounded by, and the file's hash

    def form(self, job: str) -> Form:
        """How the package of `job` is written."""
        missing = self.int8_boundaries and len(self.boundary_scales) != len(self.blocks) - 1
        assert not missing, "the boundaries were not calibrated"
        numbers = [number for number, block in enumerate(self.blocks) if block.file == job]
        if not numbers:
            return Form(self.target, self.state_update)
        return form_of(numbers[0], self.target, self.state_update, self.boundary_scales)

    @property
    def jobs(self) -> tuple[str, ...]:
        """What has to be made, largest first, so that the last worker does not start the longest job."""
        files = ((HEAD,) if self.shares_table else (HEAD, EMBEDDING)) + tuple(b.file for b in self.blocks)
        return tuple(sorted(files, key=self.job_bytes, reverse=True))

    def job_matrices(self, job: str) -> list[str]:
        """The matrices whose weights `job` writes."""
        if job in (HEAD, EMBEDDING):
            return ["head" if job == HEAD else "embed"]
        layers = next(b.layers for b in self.blocks if b.file == job)
        return [n for n in matrices_of(self.spec) if n.startswith("layers.") and int(n.split(".")[1]) in layers]

    def job_bytes(self, job: str) -> int:
        """Bytes of weights that `job` writes."""
        matrices = matrices_of(self.spec)
        return sum(matrix_bytes(n, matrices[n], self.recipe) for n in self.job_matrices(job))

    @property
    def weight_bytes(self) -> int:
        return sum(self.job_bytes(job) for job in self.jobs)

    @cached_property
    def key(self) -> str:
        """Two bakes with the same key give the same bytes: a hash over everything that decides them."""
        decided = {**asdict(self), "recipe": self.recipe.to_json(), "tools": tools()}
        # Where it lies does not decide what it is, nor does what was measured to decide the spec.
        del decided["ref"], decided["adapter_ref"], decided["stream_peak"], decided["rounded_file"]
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()


def tools() -> dict[str, str]:
    """Versions of what writes the bytes."""
    return {name: version(name) for name in ("anechain", "coremltools", "numpy")}


def make_plan(
    source: Source,
    recipe: Recipe,
    context: int,
    prefill: int,
    target: str,
    layers_per_package: int | None,
    state_update: str = "slice",
    activations: str = "fp16",
) -> Plan:
    """Decides a bake. `layers_per_package` None is the recipe's wish or, without one, the fewest packages of at most
    15 layers and 950 MB. With `activations` "int8" the plan still lacks the scales, which judge calibrates. Raises
    RecipeError or RequestError for anything that cannot be baked.
    """
    spec = source.spec
    recipe.check(spec)
    faults = []
    step = max(32, prefill) if prefill % 32 == 0 else 32
    if context < 32 or context % step:
        fitting = max(step, -(-context // step) * step)
        faults.append(f"--context {context} is not a multiple of {step} (use {fitting})")
    if context > spec.max_context:
        faults.append(f"--context {context} is more than the {spec.max_context} positions that the model knows")
    if prefill < 0 or prefill % 32:
        faults.append(f"--prefill {prefill} is not 0 or a multiple of 32 (use 64)")
    if layers_per_package is not None and layers_per_package < 1:
        faults.append(f"--layers-per-package {layers_per_package} is not a whole number of at least 1")
    if target not in TARGETS:
        faults.append(f"--target {target} is not known (use {', '.join(TARGETS)})")
    if state_update not in STATE_UPDATES:
        faults.append(f"--state-update {state_update} is not known (use {' or '.join(STATE_UPDATES)})")
    if activations not in ("fp16", "int8"):
        faults.append(f"--activations {activations} is not known (use fp16 or int8)")
    elif activations == "int8" and TARGETS.get(target, INT8_PORTS) < INT8_PORTS:
        faults.append(
            f"--activations int8 needs inputs and outputs of int8, which no system before macOS 26 and iOS 26 has "
            f"(use --target macOS26, or leave it out for {target})"
        )
    if "tokenizer.json" not in source.text_files:
        faults.append(f"{source.ref} has no tokenizer.json (put it beside the weights)")
    if faults:
        raise RequestError(f"this cannot be baked: {'; '.join(faults)}.")
    blocks = _cut(spec, recipe, layers_per_package or recipe.layers_per_package)
    if activations == "int8" and len(blocks) == 1:
        raise RequestError(
            "this cannot be baked: --activations int8 is for what packages hand on to each other, and all layers are "
            "in one package (use --layers-per-package with a smaller number)."
        )
    size = spec.vocab_size * spec.hidden_size
    same = recipe.scheme_for("embed", size) == recipe.scheme_for("head", size)
    shared = spec.tied and recipe.compute == "fp16" and same
    texts = hashlib.sha256(repr(sorted(source.text_files.items())).encode()).hexdigest()
    adapter = source.adapter if isinstance(source, Merged) else None
    return Plan(
        source.ref, source.fingerprint, texts, spec, recipe, context, prefill, target, blocks, shared,
        adapter.ref if adapter else None, adapter.sha256 if adapter else None, None,
        "blend" if state_update == "blend" else "slice", activations == "int8",
    )  # fmt: skip


def _cut(spec: ModelSpec, recipe: Recipe, per_package: int | None) -> tuple[Block, ...]:
    """The layers of each package: `per_package` of them or, with None, the fewest packages of about equal length."""
    n = spec.n_layers
    if per_package is not None:
        return _blocks([*range(0, n, per_package), n])
    layer_bytes = [0] * n
    for name, shape in matrices_of(spec).items():
        if name.startswith("layers."):
            layer_bytes[int(name.split(".")[1])] += matrix_bytes(name, shape, recipe)
    for packages in range(-(-n // MAX_LAYERS), n):
        bounds = [round(i * n / packages) for i in range(packages + 1)]
        if all(sum(layer_bytes[a:b]) <= MAX_BYTES for a, b in pairwise(bounds)):
            return _blocks(bounds)
    return _blocks(list(range(n + 1)))


def _blocks(bounds: list[int]) -> tuple[Block, ...]:
    return tuple(Block(f"block-{i:03d}.mlpackage", start, stop) for i, (start, stop) in enumerate(pairwise(bounds)))


def bake(
    source: Source,
    plan: Plan,
    out: Path,
    workers: int,
    force: bool = False,
    attach: Callable[[Path], None] | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Makes the bundle `out` as planned and returns it; the same command after an interruption goes on where it was.

    `attach` is called with a folder after the packages are there and may put files into it, which become part of the
    bundle (it sees the tokenizer's files in `tokenizer/` below it). Raises BundleError when `out` holds something else,
    is being baked by another process, or cannot be written.
    """
    if plan.recipe.calibration is not None and plan.rounded_file is None:
        raise RecipeError(f"recipe {plan.recipe.name!r} is calibrated, and this bake was given no rounded weights.")
    place.check_place(out, plan.ref, plan.adapter_ref)
    if not force:
        place.check_unforced(out, plan.key)
    if place.is_complete(out, plan.key):
        return open_bundle(out)
    _check_space(plan, out)
    with _disk_errors(out), place.only_one(out):
        if not force:
            place.check_unforced(out, plan.key)  # another bake may have ended since
        place.begin(out, plan.key, [(job, _beginnings(job)) for job in plan.jobs])
        try:
            return _bake(source, plan, out, workers, attach, progress)
        except (RecipeError, SourceError):  # the same command would come to the same end
            place.remove_ours(out)
            raise


def _beginnings(job: str) -> tuple[str, ...]:
    """How the paths of a job's files begin."""
    return (*((TABLE, SCALE, PALETTE) if job == EMBEDDING else (f"{job}/",)), _figures_file(job))


def _figures_file(job: str) -> str:
    """Where a job keeps what its rounding left of an adapter."""
    return f"adapter-{job.removesuffix('.mlpackage')}.json"


def _bake(
    source: Source,
    plan: Plan,
    out: Path,
    workers: int,
    attach: Callable[[Path], None] | None,
    progress: Progress | None,
) -> Bundle:
    made = {job: place.finished(out, job) for job in plan.jobs}
    files = {name: record for found in made.values() if found for name, record in found.items()}
    todo = [job for job, found in made.items() if not found]
    total = len(plan.jobs) + 1
    count = total - 1 - len(todo)

    def done(job: str, record: dict[str, FileRecord]) -> None:
        nonlocal count
        count += 1
        files.update(record)
        if progress:
            progress(count, total, job)

    _run(plan, todo, out, workers, done)
    with place.private(out, EXTRAS) as extras:
        (extras / TOKENIZER).mkdir()
        for name, content in source.text_files.items():
            (extras / TOKENIZER / name).write_bytes(content)
        if attach:
            attach(extras)
        files |= place.publish(extras, out, EXTRAS)
    embedding = HEAD if plan.shares_table else TABLE
    bundle = Bundle(
        out, plan.spec, plan.recipe, plan.context, plan.prefill, plan.target, plan.ref, plan.fingerprint,
        plan.blocks, embedding, tools(), plan.key, files, _provenance(source, plan, out),
        plan.stream_peak, plan.state_update, plan.boundary_scales, plan.calibration,
    )  # fmt: skip
    write_manifest(bundle)
    place.end(out)
    if progress:
        progress(total, total, MANIFEST)
    return bundle


def _provenance(source: Source, plan: Plan, out: Path) -> dict[str, Any] | None:
    """What the manifest says of the adapter: what it is, what it changes, what rounding left of it."""
    if not isinstance(source, Merged):
        return None
    figures: Figures = {}
    for file in (out / _figures_file(job) for job in plan.jobs):
        figures |= json.loads(file.read_text(encoding="utf-8"))
    return source.provenance | {"survival": summary(figures)}


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    """A full or read-only disk becomes a sentence; what was finished stays for the next run."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        inside = error.filename is None or Path(str(error.filename)).is_relative_to(out)
        raise BundleError(
            f"{out if inside else error.filename} could not be written ({reason}): make room or choose another folder "
            "with -o; the same command goes on from the packages that are finished."
        ) from None


def _check_space(plan: Plan, out: Path) -> None:
    """Raises BundleError when the disk cannot take the packages, counting what an earlier bake already put there."""
    there = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    free = shutil.disk_usage(next(folder for folder in (out, *out.parents) if folder.exists())).free
    if free + there < plan.weight_bytes * SPACE_MARGIN:
        raise BundleError(
            f"{out} would take {plan.weight_bytes / 1e6:.1f} MB and its disk has {free / 1e6:.1f} MB left: make room, "
            "or choose another folder with -o."
        )


def _run(
    plan: Plan, todo: list[str], out: Path, workers: int, done: Callable[[str, dict[str, FileRecord]], None]
) -> None:
    """Runs the jobs in `workers` fresh processes and hands each one's record to `done` as it finishes."""
    if not todo:
        return
    others = set(active_children())
    pool = ProcessPoolExecutor(min(workers, len(todo)), get_context("spawn"), _start_worker, (out,))
    try:
        # The workers inherit what is blocked: an interrupt is for the bake alone to answer, and ends them below.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            running = {pool.submit(run_job, plan, job, out): job for job in todo}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                done(running.pop(future), future.result())
    except (BrokenProcessPool, MemoryError):
        raise BundleError(
            "a baking process was killed, most likely for want of memory: run the same command again with --jobs 1."
        ) from None
    except KeyboardInterrupt:
        for worker in set(active_children()) - others:
            worker.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        place.clear_private(out)


def _start_worker(out: Path) -> None:
    """A worker must not go on writing after its bake was killed: the next one waits until all of them are gone."""
    parent = parent_process()
    assert parent is not None
    place.hold_as_worker(out)
    if wait_for([parent.sentinel], timeout=0):  # it was gone before the next bake had anything to wait for
        os._exit(1)

    def watch() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_job(plan: Plan, job: str, out: Path) -> dict[str, FileRecord]:
    """Makes one package (or the embedding table) in a private folder, checks it, records it, moves it into place."""
    with place.private(out, job) as folder:
        source = open_source(plan.ref) if plan.adapter_ref is None else _with_adapter(plan.ref, plan.adapter_ref)
        rounded = Rounded(Path(plan.rounded_file)) if plan.rounded_file else None
        if job == EMBEDDING:
            package.make_embedding(source, plan.recipe, folder)
        elif job == HEAD:
            package.make_head(source, plan.spec, plan.recipe, folder / HEAD, plan.form(HEAD), rounded)
        else:
            layers = next(b.layers for b in plan.blocks if b.file == job)
            form, path = plan.form(job), folder / job
            package.make_block(source, plan.spec, plan.recipe, layers, plan.context, plan.prefill, path, form, rounded)
        if isinstance(source, Merged):
            figures = survival(source, plan.recipe, plan.job_matrices(job))
            (folder / _figures_file(job)).write_text(json.dumps(figures, indent=1), encoding="utf-8")
        return place.publish(folder, out, job)


@cache
def _with_adapter(ref: str, adapter: str) -> Source:
    """Matching an adapter with its base can mean to read whole tables, so a worker does it once."""
    return open_merged(ref, adapter)
