"""A checkpoint becomes a bundle that carries what it will be judged by: the packages, and the oracle's baselines."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from anechain.bake.jobs import Plan, Progress, bake, tools
from anechain.bake.source import Source
from anechain.bundle.cache import cache_directory
from anechain.bundle.manifest import TOKENIZER, Bundle, sha256_of, write_atomically
from anechain.bundle.recipe import Calibration
from anechain.bundle.rounded import Rounded, save_rounded
from anechain.errors import BundleError, RequestError
from anechain.judge.baseline import STEPS, Baseline, Profile, PromptIds, build_baseline, prompts_of
from anechain.judge.boundaries import boundary_scales, calibration_ids, kept_peaks, layer_peaks
from anechain.judge.calibration import BEGINNINGS, QUESTIONS, CalibrationSet, calibration_set, calibration_text
from anechain.judge.oracle import Oracle
from anechain.judge.rounding import ALGORITHM, round_model
from anechain.judge.stream import kept_peak, probes, stream_peak, stream_scale
from anechain.run.chat import ChatTemplate
from anechain.run.tokenizer import Tokenizer

PROFILES: tuple[Profile, ...] = tuple(STEPS)


def baseline_file(profile: Profile) -> str:
    """The name of a profile's baseline inside a bundle."""
    return f"baseline-{profile}.npz"


def load_baseline(bundle: Bundle, profile: Profile) -> Baseline:
    """The baseline baked into the bundle. Raises RequestError when its context was too small for the profile."""
    if baseline_file(profile) not in bundle.files:
        raise RequestError(
            f"{bundle.path} has no {profile} baseline, because its context of {bundle.context} is too small for the "
            "prompts: bake it with a larger --context, or use another --profile."
        )
    return Baseline.load(bundle.path / baseline_file(profile))


def bake_with_baselines(
    source: Source,
    plan: Plan,
    out: Path,
    workers: int,
    force: bool = False,
    progress: Progress | None = None,
    oracle_progress: Callable[[int, int, str], None] | None = None,
) -> Bundle:
    """`bake.jobs.bake`, with the baseline of every profile whose prompts fit into the context.

    A baseline depends on the source, the tokenizer and the context, not on the recipe, so it is computed once and kept
    in `cache_directory()`; so is how far the residual stream reaches, by which the plan's spec is scaled.
    `oracle_progress` counts the layers of a computation. Raises RequestError when that folder cannot be written to.
    """
    folder = cache_folder("baselines")
    plan = with_boundary_scales(with_stream_scale(plan, source, oracle_progress), source, oracle_progress)
    plan = with_rounding(plan, source, oracle_progress)

    def attach(extras: Path) -> None:
        tokenizer = Tokenizer.load(extras / TOKENIZER)
        encode_chat = chat_encoder(tokenizer)
        for profile in PROFILES:
            prompts = prompts_of(profile, plan.context, tokenizer.encode, encode_chat)
            if all(len(p.ids) + p.steps - 1 <= plan.context for p in prompts if p.kind == "greedy"):
                path = _cached(folder, source, prompts, profile, plan.context, oracle_progress)
                shutil.copyfile(path, extras / baseline_file(profile))

    return bake(source, plan, out, workers, force, attach, progress)


def with_stream_scale(plan: Plan, source: Source, progress: Callable[[int, int, str], None] | None = None) -> Plan:
    """`plan` with the measured peak of the residual stream, and scaled by the power of two that it needs in fp16."""
    sequences = probes(tokenizer_of(source).encode)
    path = _measured(source, sequences, "streams")
    report = None if progress is None else lambda done, total: progress(done, total, "stream")
    peak = kept_peak(path, lambda: stream_peak(source, sequences, report))
    return replace(plan, spec=replace(plan.spec, stream_scale=stream_scale(peak)), stream_peak=peak)


def with_rounding(plan: Plan, source: Source, progress: Progress | None = None) -> Plan:
    """`plan` with the weights rounded as its recipe's calibration says; the plan itself for a recipe without one.

    The rounded weights are kept in `cache_directory()`, under a hash of everything that decides them.
    """
    if (calibration := plan.recipe.calibration) is None:
        return plan
    decided = {
        "fingerprint": source.fingerprint, "text": plan.text_sha256, "recipe": plan.recipe.to_json()["rules"],
        "calibration": asdict(calibration), "calibration_text": calibration_text(), "tools": tools(),
        "stream_scale": plan.spec.stream_scale, "algorithm": ALGORITHM,
    }  # fmt: skip
    key = hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()
    path = cache_folder("rounded") / f"{key[:32]}.npz"
    about = _rounding_of(path)
    if about is None:
        report = None if progress is None else lambda done, total: progress(done, total, "calibration text")
        tokens = kept_text(source, calibration, report)
        report = None if progress is None else lambda done, total: progress(done, total, "rounding")
        tensors = round_model(source, plan.spec, plan.recipe, tokens.tokens, report)
        about = {"tokens_sha256": tokens.sha256, "tokens": tokens.size}
        save_rounded(path, tensors, about)
    return replace(plan, rounded_file=str(path), calibration={**about, "rounded_sha256": sha256_of(path)})


def kept_text(
    source: Source, calibration: Calibration, progress: Callable[[int, int], None] | None = None
) -> CalibrationSet:
    """The calibration's tokens, from the cache where they are already there."""
    texts = hashlib.sha256(repr(sorted(source.text_files.items())).encode()).hexdigest()
    drawn = [calibration.sequences, calibration.length, calibration.seed]
    decided = [source.fingerprint, texts, calibration_text(), BEGINNINGS, QUESTIONS, drawn, tools()]
    key = hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()
    path = cache_folder("texts") / f"{key[:32]}.json"
    try:
        kept = CalibrationSet.of([np.array(ids, np.int32) for ids in json.loads(path.read_text(encoding="utf-8"))])
        if kept.size:
            return kept
    except (OSError, ValueError, TypeError, OverflowError):
        pass
    tokenizer = tokenizer_of(source)
    chat = chat_encoder(tokenizer)
    made = calibration_set(source, calibration, tokenizer.n_ids, tokenizer.encode, chat, progress)
    write_atomically(path, json.dumps([ids.tolist() for ids in made.tokens]).encode())
    return made


def _rounding_of(path: Path) -> dict[str, Any] | None:
    """What the rounded weights in `path` were rounded by; None where there is no such intact file."""
    try:
        about = Rounded(path).about
        return {name: about[name] for name in ("tokens_sha256", "tokens")}
    except (BundleError, LookupError):
        return None


def chat_encoder(tokenizer: Tokenizer) -> Callable[[str], Sequence[int]] | None:
    """A user's message -> the ids that the model's chat template makes of it; None for a model without one."""
    if not tokenizer.chat_templates:
        return None
    chat = ChatTemplate(tokenizer)
    return lambda text: chat.encode([{"role": "user", "content": text}])


def with_boundary_scales(plan: Plan, source: Source, progress: Callable[[int, int, str], None] | None = None) -> Plan:
    """`plan` with a scale for each boundary between packages, if it hands hidden states on in int8."""
    if not plan.int8_boundaries:
        return plan
    sequences = calibration_ids(tokenizer_of(source).encode)
    report = None if progress is None else lambda done, total: progress(done, total, "boundaries")
    path = _measured(source, sequences, "boundaries")
    peaks = kept_peaks(path, plan.spec.n_layers + 1, lambda: layer_peaks(source, sequences, report))
    scales = boundary_scales(peaks, [block.start for block in plan.blocks], plan.spec.stream_scale)
    return replace(plan, boundary_scales=scales)


def tokenizer_of(source: Source) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in source.text_files.items():
            (Path(folder) / name).write_bytes(content)
        return Tokenizer.load(Path(folder))


def _measured(source: Source, sequences: Sequence[np.ndarray], kind: str) -> Path:
    """Where in the cache it is kept what was measured of `source` while it read `sequences`."""
    decided = hashlib.sha256(source.fingerprint.encode())
    for ids in sequences:
        decided.update(ids.tobytes() + b"|")
    return cache_folder(kind) / f"{decided.hexdigest()[:32]}.json"


def cache_folder(name: str) -> Path:
    """The folder `name` in `cache_directory()`, which is made. Raises RequestError when that cannot be."""
    folder = cache_directory() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"the cache folder {folder} cannot be made ({error.strerror}): set ANECHAIN_CACHE to a folder of your own."
        ) from None
    return folder


def kept_baseline(source: Source, name: str, build: Callable[[Source], Baseline]) -> Baseline:
    """What `build` makes of `source`, from the cache where it is already there under `name`."""
    texts = hashlib.sha256(repr(sorted(source.text_files.items())).encode()).hexdigest()
    decided = hashlib.sha256(f"{source.fingerprint} {texts} {name}".encode()).hexdigest()
    path = cache_folder("baselines") / f"{decided[:32]}.npz"
    try:
        kept = Baseline.load(path)
        if kept.fingerprint == source.fingerprint:
            return kept
    except BundleError:
        pass
    build(source).save(path)
    return Baseline.load(path)


def exam_baseline(source: Source, profile: Profile, context: int) -> Baseline:
    """The baseline of a profile that a bake of `source` would put into its bundle."""
    prompts = prompts_of(profile, context, tokenizer_of(source).encode, chat_encoder(tokenizer_of(source)))
    return Baseline.load(_cached(cache_folder("baselines"), source, prompts, profile, context, None))


def _cached(
    folder: Path,
    source: Source,
    prompts: tuple[PromptIds, ...],
    profile: Profile,
    context: int,
    progress: Callable[[int, int, str], None] | None,
) -> Path:
    """The file of this baseline in the cache `folder`: what is there is used if it is right, else computed again."""
    decided = hashlib.sha256(f"{source.fingerprint} {profile} {context}".encode())
    for prompt in prompts:
        decided.update(prompt.ids.astype(np.int64).tobytes() + b"|")
    path = folder / f"{decided.hexdigest()[:32]}.npz"
    if not _holds(path, source.fingerprint, prompts, profile, context):
        report = None if progress is None else lambda done, total: progress(done, total, profile)
        build_baseline(Oracle(source), prompts, profile, context, report).save(path)
    return path


def _holds(path: Path, fingerprint: str, prompts: tuple[PromptIds, ...], profile: Profile, context: int) -> bool:
    """Whether `path` is an intact baseline of just this."""
    try:
        kept = Baseline.load(path)
    except BundleError:
        return False
    same = (kept.fingerprint, kept.profile, kept.context) == (fingerprint, profile, context)
    return same and [(p.name, p.ids.tolist(), p.steps, p.kind) for p in kept.prompts] == [
        (p.name, p.ids.tolist(), p.steps, p.kind) for p in prompts
    ]
