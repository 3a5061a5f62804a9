"""A bake as a whole: what is planned and refused, what is made, what processes leave whatever becomes of them."""

import importlib.util
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anechain.bake import jobs
from anechain.bake.jobs import make_plan
from anechain.bake.source import open_source
from anechain.bundle.manifest import HEAD, open_bundle
from anechain.bundle.program import read_program
from anechain.bundle.recipe import Recipe, Rule, Scheme, load_recipe
from anechain.cli.bake import bake_bundle
from anechain.errors import BundleError, RecipeError
from tests.in_process import InProcess, tree
from tests.tiny import write_tiny

OPTIONS = {"context": 64, "prefill": 32, "per_package": 1}
FLAGS = ["--context", "64", "--prefill", "32", "--layers-per-package", "1"]
PACKAGES = ["block-000.mlpackage", "block-001.mlpackage", "block-002.mlpackage", HEAD]
FP16 = load_recipe("fp16")
EMBED_INT8 = Recipe("embed", "fp16", (Rule("embed", Scheme(8)),))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Baselines are computed once for all bakes here."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANECHAIN_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three layers with a head of its own."""
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def undisturbed(model: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every bake of `model` with OPTIONS has to be, byte for byte."""
    path = tmp_path_factory.mktemp("undisturbed") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "ProcessPoolExecutor", InProcess)
        bake_bundle(str(model), path, jobs=1, **OPTIONS)
    return path


# -- what is made, in this process -------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(jobs, "ProcessPoolExecutor", InProcess)


@pytest.mark.parametrize("per_package", [1, 2, 3, None])
def test_packages_hold_the_layers_of_the_plan(per_package: int | None, model: Path, here: None, tmp_path: Path) -> None:
    bundle = bake_bundle(str(model), tmp_path / "b", "int8", 64, 0, per_package)
    held = []
    for block, path in zip(bundle.blocks, bundle.block_paths, strict=True):
        (state,) = read_program(path).functions["decode"].states
        assert state.shape[0] == 2 * len(block.layers)
        held += block.layers
    assert held == [0, 1, 2]
    assert len(bundle.blocks) == {1: 3, 2: 2, 3: 1, None: 1}[per_package]
    assert open_bundle(bundle.path, verify_hashes=True) == bundle


@pytest.mark.parametrize(("recipe", "shares"), [(FP16, True), (EMBED_INT8, False)])
def test_a_tied_table_lies_where_the_plan_says(recipe: Recipe, shares: bool, here: None, tmp_path: Path) -> None:
    ref = write_tiny(tmp_path / "model", "qwen3", num_hidden_layers=1)
    source = open_source(str(ref))
    planned = make_plan(source, recipe, 64, 0, "macOS15", None)
    bundle = jobs.bake(source, planned, tmp_path / "b", 1)
    assert bundle.embedding == (HEAD if shares else "embedding.npy")
    names = {"embedding.npy", "embedding-scale.npy"}
    assert names & set(bundle.files) == (set() if shares else names)


def test_progress_counts_every_job_and_the_manifest(model: Path, here: None, tmp_path: Path) -> None:
    source = open_source(str(model))
    planned = make_plan(source, FP16, 64, 0, "macOS15", 1)
    seen: list[tuple[int, int, str]] = []
    jobs.bake(source, planned, tmp_path / "b", 1, progress=lambda *step: seen.append(step))
    assert [done for done, _, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert {total for _, total, _ in seen} == {6}
    assert sorted(what for _, _, what in seen[:-1]) == sorted(planned.jobs) and seen[-1][2] == "manifest.json"


def test_what_is_attached_becomes_part_of_the_bundle(model: Path, here: None, tmp_path: Path) -> None:
    source = open_source(str(model))
    planned = make_plan(source, FP16, 64, 0, "macOS15", None)

    def attach(folder: Path) -> None:
        assert (folder / "tokenizer/tokenizer.json").read_bytes() == source.text_files["tokenizer.json"]
        (folder / "record.txt").write_text("attached")

    bundle = jobs.bake(source, planned, tmp_path / "b", 1, attach=attach)
    assert "record.txt" in bundle.files and (bundle.path / "record.txt").read_text() == "attached"
    assert {f"tokenizer/{name}" for name in source.text_files} < set(bundle.files)


def test_a_second_bake_returns_at_once(
    model: Path, undisturbed: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copytree(undisturbed, tmp_path / "b"))

    def never(*_: Any) -> None:
        raise AssertionError("a job was run")

    monkeypatch.setattr(jobs, "_run", never)
    times = {f: f.stat().st_mtime_ns for f in path.rglob("*")}
    before = time.perf_counter()
    bundle = bake_bundle(str(model), path, jobs=1, **OPTIONS)
    assert time.perf_counter() - before < 5
    assert bundle == open_bundle(path)
    assert {f: f.stat().st_mtime_ns for f in path.rglob("*")} == times


def test_a_weight_that_no_recipe_can_hold_leaves_nothing_behind(here: None, tmp_path: Path) -> None:
    ref = write_tiny(tmp_path / "model", "llama", num_hidden_layers=1)
    source = open_source(str(ref))
    planned = make_plan(source, FP16, 64, 0, "macOS15", None)

    class Damaged:
        spec, text_files, ref, fingerprint = source.spec, source.text_files, source.ref, source.fingerprint

        def tensor(self, name: str) -> np.ndarray:
            return source.tensor(name) * (np.inf if name == "layers.0.down" else 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "open_source", lambda _: Damaged())
        with pytest.raises(RecipeError, match=r"layers\.0\.down holds values that are not finite"):
            jobs.bake(source, planned, tmp_path / "deep" / "er" / "b", 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]  # though other packages could have been made


# -- the disk ----------------------------------------------------------------------------------------------------------


def test_too_little_space_is_found_before_anything_is_written(
    model: Path, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    asked = []

    def nearly_full(path: Path) -> Any:
        asked.append(path)
        return usage._replace(free=200_000)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    path = tmp_path / "new" / "b"
    with pytest.raises(BundleError) as caught:
        bake_bundle(str(model), path, jobs=1, **OPTIONS)
    assert str(caught.value) == (
        f"{path} would take 0.3 MB and its disk has 0.2 MB left: make room, or choose another folder with -o."
    )
    assert asked == [tmp_path]
    assert not path.parent.exists()


def test_a_full_disk_is_one_sentence_and_what_is_finished_stays(
    model: Path, undisturbed: Path, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system of 240 kB: it takes the first packages, and not all."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=240k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        path = disk / "b"
        with pytest.raises(BundleError, match=r"would take 0\.3 MB and its disk has 0\.2 MB left"):
            bake_bundle(str(model), path, jobs=1, **OPTIONS)
        assert not path.exists()
        monkeypatch.setattr(jobs, "SPACE_MARGIN", 0)
        with pytest.raises(BundleError) as caught:
            bake_bundle(str(model), path, jobs=1, **OPTIONS)
        message = str(caught.value)
        assert message.startswith(f"{path} could not be written (") and "\n" not in message
        assert message.endswith(
            "): make room or choose another folder with -o; the same command goes on from the packages that are "
            "finished."
        )
        first = path / "block-000.mlpackage"
        written = first.stat().st_mtime_ns
        assert not list((path / ".baking").glob("job-*")) and not list(path.rglob("*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
        bake_bundle(str(model), path, jobs=1, **OPTIONS)
        assert first.stat().st_mtime_ns == written
        assert tree(path) == tree(undisturbed)
    finally:
        subprocess.run(["umount", disk], check=True)


# -- processes ---------------------------------------------------------------------------------------------------------


class Bake:
    """`anechain bake` in processes of its own, with a private TMPDIR; it stops in the middle of the job `stall`."""

    def __init__(self, model: Path, path: Path, temporary: Path, *flags: str, stall: str = "", **options: Any) -> None:
        temporary.mkdir(exist_ok=True)
        self.path, self.temporary, root = path, temporary, Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, root / "tests/bake/stalling_bake.py", "bake", model, "-o", path, *FLAGS, *flags],
            env=os.environ
            | {
                "PYTHONPATH": f"{os.environ.get('BESIDE', '')}:{root / 'src'}:{root}",
                "TMPDIR": str(temporary),
                "STALL": stall,
                "COLUMNS": "1000",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )

    def wait_until_stalled(self) -> int:
        """Waits for the private folder with written weights and no program; returns the worker's process id."""
        limit = time.monotonic() + 120
        while time.monotonic() < limit:
            assert self.process.poll() is None, self.process.communicate()[1]
            for made in (self.path / ".baking").glob("job-*/*/Data/com.apple.CoreML"):
                if (made / "stalled").exists():
                    assert (made / "weights/weight.bin").exists() and not (made / "model.mlmodel").exists()
                    return int(made.parents[2].name.rpartition("-")[2])
            time.sleep(0.05)
        raise AssertionError("the bake never came to the job that it stops in")

    def kill_group(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def end(self) -> tuple[int, list[str]]:
        """Exit code and the lines on stderr, once it has ended."""
        err = self.process.communicate(timeout=120)[1]
        return self.process.returncode, err.splitlines()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def eventually(condition: Callable[[], bool], seconds: float = 20) -> bool:
    limit = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < limit:
        time.sleep(0.02)
    return met


def check_went_on(model: Path, path: Path, undisturbed: Path) -> None:
    """The same command again: goes on from the one finished package, and ends as if nothing had happened."""
    assert not (path / "manifest.json").exists() and (path / ".baking").is_dir()
    first = {f: (f.stat().st_mtime_ns, f.stat().st_ino) for f in (path / PACKAGES[0]).rglob("*")}
    assert len(first) == 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "ProcessPoolExecutor", InProcess)
        bake_bundle(str(model), path, jobs=1, **OPTIONS)
    assert {f: (f.stat().st_mtime_ns, f.stat().st_ino) for f in (path / PACKAGES[0]).rglob("*")} == first
    assert tree(path) == tree(undisturbed)


@pytest.mark.slow
def test_two_workers_write_what_one_process_writes_and_say_nothing_else(
    model: Path, undisturbed: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside/coremltools").mkdir(parents=True)  # whose own code no bake runs: only the format's definitions
    (tmp_path / "beside/coremltools/__init__.py").write_text("raise ImportError('a bake runs coremltools')")
    real = importlib.util.find_spec("coremltools")
    assert real is not None and real.submodule_search_locations
    (tmp_path / "beside/coremltools/proto").symlink_to(Path(real.submodule_search_locations[0]) / "proto")
    monkeypatch.setenv("BESIDE", str(tmp_path / "beside"))
    bake = Bake(model, tmp_path / "b", tmp_path / "tmp", "--jobs", "2")
    code, err = bake.end()
    assert code == 0
    done = [line for line in err if line.startswith("bake fp16: ")]
    assert sorted(line.split()[2] for line in done) == sorted([*PACKAGES, "embedding", "manifest.json"])
    # The bake's own summary, and nothing else.
    assert [line for line in err if line not in done] == [
        line
        for line in err
        if line.startswith((f"{tmp_path / 'b'}: 4 packages, ", "all matrices stay fp16", "no strict baseline: "))
    ]
    assert len(err) == len(done) + 3
    assert tree(tmp_path / "b") == tree(undisturbed)
    assert list(bake.temporary.iterdir()) == []


@pytest.mark.slow
def test_all_killed_while_a_package_is_written(model: Path, undisturbed: Path, cache: Path, tmp_path: Path) -> None:
    bake = Bake(model, tmp_path / "b", tmp_path / "tmp", "--jobs", "1", stall=PACKAGES[1])
    bake.wait_until_stalled()
    bake.kill_group(signal.SIGKILL)
    assert bake.end()[0] == -signal.SIGKILL
    check_went_on(model, bake.path, undisturbed)
    assert list(bake.temporary.iterdir()) == []


@pytest.mark.slow
def test_parent_killed_while_its_worker_writes(model: Path, undisturbed: Path, cache: Path, tmp_path: Path) -> None:
    bake = Bake(model, tmp_path / "b", tmp_path / "tmp", "--jobs", "1", stall=PACKAGES[1])
    worker = bake.wait_until_stalled()
    busy = tree(bake.path)
    # A second bake into the folder, of the same thing and of another, is refused and changes nothing.
    with pytest.raises(BundleError) as caught:
        bake_bundle(str(model), bake.path, jobs=1, **OPTIONS)
    wanted = f"{bake.path} is being baked by another process: wait for it, or choose another folder."
    assert str(caught.value) == wanted
    with pytest.raises(BundleError) as caught:
        bake_bundle(str(model), bake.path, "int8", 64, 32, force=True)
    assert str(caught.value) == wanted
    assert tree(bake.path) == busy and not gone(worker)
    bake.process.kill()
    assert bake.process.wait(timeout=30) == -signal.SIGKILL
    check_went_on(model, bake.path, undisturbed)  # at once: it waits for the worker
    assert gone(worker)
    bake.process.communicate()


@pytest.mark.slow
def test_worker_killed(model: Path, undisturbed: Path, cache: Path, tmp_path: Path) -> None:
    bake = Bake(model, tmp_path / "b", tmp_path / "tmp", "--jobs", "1", stall=PACKAGES[1])
    os.kill(bake.wait_until_stalled(), signal.SIGKILL)
    code, err = bake.end()
    assert (code, err[1:]) == (
        2,
        [
            "anechain: a baking process was killed, most likely for want of memory: run the same command again with "
            "--jobs 1."
        ],
    )
    assert not list((bake.path / ".baking").glob("job-*"))
    check_went_on(model, bake.path, undisturbed)
    assert list(bake.temporary.iterdir()) == []


@pytest.mark.slow
def test_interrupted(model: Path, undisturbed: Path, cache: Path, tmp_path: Path) -> None:
    def heard() -> None:  # a shell makes what it starts in the background deaf to it, and children inherit that
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    bake = Bake(model, tmp_path / "b", tmp_path / "tmp", "--jobs", "1", stall=PACKAGES[1], preexec_fn=heard)
    worker = bake.wait_until_stalled()
    bake.kill_group(signal.SIGINT)  # as the terminal does
    code, err = bake.end()
    assert (code, err[1:]) == (130, ["anechain: interrupted."])
    assert gone(worker)
    assert not list((bake.path / ".baking").glob("job-*"))
    check_went_on(model, bake.path, undisturbed)
    assert list(bake.temporary.iterdir()) == []


@pytest.mark.slow
def test_a_file_that_may_not_grow_any_further(model: Path, undisturbed: Path, cache: Path, tmp_path: Path) -> None:
    """What a full disk does to the writer of the weights, in a worker: a block takes 62 kB here, the other parts 41."""
    limit = (30_000, resource.RLIM_INFINITY)
    bake = Bake(
        model, tmp_path / "b", tmp_path / "tmp", "--jobs", "1",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )  # fmt: skip
    code, err = bake.end()
    assert code == 2 and len(err) == 1
    assert err[0].startswith(f"anechain: {bake.path} could not be written (")
    assert err[0].endswith("the same command goes on from the packages that are finished.")
    assert not bake.path.exists()  # nothing was finished
    assert list(bake.temporary.iterdir()) == []
