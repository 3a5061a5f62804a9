"""Records that were imported, and what they say of a machine: measured beats published, and what diverged may not run.

Every record lies as it came in `records/` of the cache folder (ANECHAIN_CACHE, or the user's own), under its hash.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anechain.bundle.form import TARGETS
from anechain.bundle.manifest import Bundle, write_atomically
from anechain.errors import EngineError
from anechain.judge.compatibility import Known, Machine, Status, known_problems, parse_machine
from anechain.judge.prepare import cache_folder
from anechain.judge.record import Configuration, Record, Trial, read_record


@dataclass(frozen=True)
class Stored:
    """A record in the store, and the file that it lies in."""

    record: Record
    file: Path


@dataclass(frozen=True)
class Judgement:
    """`basis` is "measured" (then `file` holds the record), "published", or "" where nobody speaks of it."""

    status: Status
    basis: str = ""
    reason: str = ""
    file: Path | None = None


UNKNOWN = Judgement("unknown")


def import_record(path: Path) -> tuple[Stored, bool]:
    """Checks a record and puts it into the store; whether it is new there. Raises RequestError for what is no record,
    and when the store cannot be written to."""
    record, content = read_record(path), path.read_bytes()
    file = cache_folder("records") / f"{hashlib.sha256(content).hexdigest()[:32]}.zip"
    new = not file.is_file()
    if new:
        write_atomically(file, content)
    return Stored(record, file), new


def stored_records() -> list[Stored]:
    """All records of the store. Raises RequestError, naming the file, for one that is damaged."""
    return [Stored(read_record(file), file) for file in sorted(cache_folder("records").glob("*.zip"))]


def configuration_of(bundle: Bundle) -> Configuration:
    """What a trial of this bundle would be called. Model and context are left as they are: they do not decide."""
    return Configuration(
        model="", recipe=bundle.recipe.name, target=bundle.target,
        layers_per_package=max(len(block.layers) for block in bundle.blocks), state_update=bundle.state_update,
        norm=bundle.recipe.norm,
        activations="int8" if bundle.boundary_scales else "fp16", context=bundle.context, prefill=bundle.prefill,
    )  # fmt: skip


def answer_for(bundle: Bundle, machine: Machine, records: Iterable[Stored]) -> Judgement:
    """What was measured of such a bundle on this machine: exactly this system, chip and coremltools.

    Trials of the same form decide, and one that diverged outweighs any that did not. Without one, a machine on which
    all that was tried diverged is broken for every form.
    """
    tried = _tried(machine, bundle.tools.get("coremltools", ""), records)
    mine = [(t, s) for t, s in tried if same_form(t.configuration, configuration_of(bundle))]
    if not mine and any(t.status != "broken" for t, _ in tried):
        return UNKNOWN
    for status in ("broken", "works"):
        for trial, stored in mine or tried:
            if trial.status == status:
                return Judgement("broken" if status == "broken" else "works", "measured", trial.diverged, stored.file)
    return UNKNOWN


def refuse_diverged(bundle: Bundle, machine: Machine, records: Iterable[Stored] | None = None) -> None:
    """Raises EngineError when a record says that such a bundle diverged on this machine; for `run` and `ship`."""
    answer = answer_for(bundle, machine, stored_records() if records is None else records)
    if answer.status == "broken":
        raise EngineError(
            f"{bundle.path} may not run on {machine} with packages of coremltools {bundle.tools['coremltools']}: a "
            f"record made there says that it diverged ({answer.reason}); bake it in another form, or use --engine cpu "
            f"(the record is {answer.file})."
        )


def feature_answer(feature: str, machine: Machine, coremltools: str, records: Iterable[Stored]) -> Judgement:
    """Whether a feature of data/compatibility.toml works there. What was measured overrules what was published.

    A trial that works shows that all of its features do. One that diverged does not say which of them is to blame:
    only a feature that no working trial has, and that a working trial is without, is.
    """
    tried = [(t, s) for t, s in _tried(machine, coremltools, records) if t.status != "unknown"]
    having = [(t, s) for t, s in tried if feature in features_of(t.configuration)]
    for trial, stored in having:
        if trial.status == "works":
            return Judgement("works", "measured", "", stored.file)
    if having and any(t.status == "works" for t, _ in tried):
        trial, stored = having[0]
        return Judgement("broken", "measured", trial.diverged, stored.file)
    return _published(feature, machine, coremltools)


def features_of(tried: Configuration) -> frozenset[str]:
    """The features of data/compatibility.toml that every bundle of this configuration has."""
    found = {"any", "state", "target-26" if TARGETS.get(tried.target, 9) > 9 else "spec-9"}
    if tried.state_update == "slice":
        found.add("slice-update")
        if tried.prefill > 32 and tried.function != "decode":
            found.add("long-slice-update")
    if tried.activations == "int8":
        found.add("activation-quantised")
    if tried.recipe == "int8":
        found |= {"int8", "int8-channel"}
    if tried.recipe in ("int8-block32", "m8"):
        found |= {"int8", "per-block"}
    return frozenset(found)


def _published(feature: str, machine: Machine, coremltools: str) -> Judgement:
    mine: list[Known] = [row for row in known_problems() if row.feature == feature]
    rows = [row for row in mine if row.scope.holds(machine, coremltools) == "yes"]
    for status in ("broken", "works"):
        for row in rows:
            if row.status == status:
                return Judgement(row.status, "published", row.what)
    return UNKNOWN


def _tried(machine: Machine, coremltools: str, records: Iterable[Stored]) -> Sequence[tuple[Trial, Stored]]:
    """The trials of all records of exactly this machine, of packages that this coremltools wrote."""
    return [
        (trial, stored)
        for stored in records
        if machine.known
        and coremltools
        and (_machine(stored.record), stored.record.coremltools) == (machine, coremltools)
        for trial in stored.record.trials
    ]


def _machine(record: Record) -> Machine:
    return parse_machine(record.os, record.chip)


def same_form(tried: Configuration, wanted: Configuration) -> bool:
    """Whether two configurations are of the same form: the model, the context and the function do not count."""
    parts = ("recipe", "target", "layers_per_package", "state_update", "norm", "activations", "prefill")
    return all(getattr(tried, part) == getattr(wanted, part) for part in parts)
