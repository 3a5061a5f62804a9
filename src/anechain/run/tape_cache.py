"""Tapes kept on disk, so that the second start of a bundle does not read its programs again.

An entry holds the tapes, their constants, and where in the packages the matrices are: a few megabytes; and beside it,
in a file of its own, the packed matrices (tape_packed). It is found by what is in each package's program and weight
file, and by the engine's own code: a copy of a package finds the same entry, and anything that changes makes another
one. Those that were used longest ago are removed when there are many or when they are large; the folder can be deleted,
also while it is used.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anechain.bundle.manifest import write_atomically
from anechain.bundle.program import Function, Op, Program, Value
from anechain.run.blend import Blend
from anechain.run.file_hash import hashes
from anechain.run.stage_plan import READ, SLICE_UPDATE, UPDATE, Write
from anechain.run.tape_build import Compiled, Place, Tape
from anechain.run.tape_plan import ALIGNMENT, Code
from anechain.run.tape_weights import Job

KEPT = 128  # entries: a stage is one
KEPT_BYTES = 4 << 30  # of them all
_SUFFIX, _PACKED = ".tape", ".packed"
_ABANDONED_S = 3600  # a file that is still being written after that is nobody's
WEIGHTS = ("Data", "com.apple.CoreML", "weights", "weight.bin")
PROGRAM = ("Data", "com.apple.CoreML", "model.mlmodel")


def folder() -> Path:
    """As the XDG base directory specification has it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anechain" / "tapes"


def key_of(packages: Sequence[Path], bits: tuple[int, int]) -> str | None:
    """None for packages whose files do not lie where they usually do: those are not kept."""
    digest = hashlib.sha256(f"{bits}".encode())
    here = Path(__file__).parent
    for code in sorted([*here.glob("*.py"), *here.glob("_native*")]):
        digest.update(code.read_bytes())
    try:
        for package in packages:
            digest.update(hashlib.sha256(package.joinpath(*PROGRAM).read_bytes()).digest())
        weights = [package.joinpath(*WEIGHTS) for package in packages]
        there = [path for path in weights if path.exists()]
        found = dict(zip(there, hashes(there, folder() / "hashes.json"), strict=True))
        digest.update("".join(found.get(path, "none") for path in weights).encode())
    except OSError:
        return None
    return digest.hexdigest()


def packed_path(key: str) -> Path:
    """Where the packed matrices of an entry are, if they are kept."""
    return folder() / (key + _PACKED)


def kept(key: str, packages: Sequence[Path]) -> Compiled | None:
    """The entry, if there is one that can be read."""
    try:
        data = np.fromfile(folder() / (key + _SUFFIX), np.uint8)
        size = int(data[:8].view(np.uint64)[0])
        record = json.loads(data[8 : 8 + size].tobytes())
        if record["key"] != key:
            return None
        os.utime(folder() / (key + _SUFFIX))
        return _Reader(record, data[-(-(8 + size) // ALIGNMENT) * ALIGNMENT :], packages).compiled()
    except (OSError, ValueError, LookupError, TypeError):
        return None


def keep(key: str, made: Compiled, packages: Sequence[Path]) -> bool:
    """Writes an entry beside its name and renames it; without a place to write to, or for matrices that are in no file,
    nothing is kept. Returns whether it is."""
    writer = _Writer(packages)
    try:
        record = {"key": key, **writer.record(made)}
        text = json.dumps(record).encode()
        head = np.uint64(len(text)).tobytes() + text
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        content = head + bytes(-len(head) % ALIGNMENT) + b"".join(writer.blocks)
        write_atomically(folder() / (key + _SUFFIX), content)
        cleared()
    except (OSError, _NotInAFileError):
        return False
    return True


def cleared() -> None:
    """Removes the entries that were used longest ago, as many as are too many, and what nobody finished."""
    used = {path: path.stat().st_mtime for path in folder().glob("*" + _SUFFIX)}
    size = 0
    for place, entry in enumerate(sorted(used, key=lambda path: -used[path])):
        files = [path for path in (entry, packed_path(entry.stem)) if path.exists()]
        size += sum(path.stat().st_size for path in files)
        if place >= KEPT or size > KEPT_BYTES:
            for path in files:
                path.unlink(missing_ok=True)
    tables = sorted(folder().glob("*.embedding"), key=lambda path: -path.stat().st_mtime)
    for path in tables[KEPT:]:
        path.unlink(missing_ok=True)
    for path in (*folder().glob("*.part"), *folder().glob(".*.tmp")):
        if path.stat().st_mtime < time.time() - _ABANDONED_S:
            path.unlink(missing_ok=True)


class _NotInAFileError(Exception):
    """A matrix was computed, and lies in no weight file."""


class _Writer:
    def __init__(self, packages: Sequence[Path]) -> None:
        self.blocks: list[bytes] = []
        self._size = 0
        self._files = [str(package.joinpath(*WEIGHTS).resolve()) for package in packages]

    def record(self, made: Compiled) -> dict[str, Any]:
        return {
            "programs": [self._program(program) for program in made.programs],
            "tapes": {name: self._tape(tape) for name, tape in made.tapes.items()},
            "jobs": [self._job(job) for job in made.jobs],
            "packed_bytes": made.packed_bytes,
        }

    def _block(self, array: np.ndarray) -> list[Any]:
        data = np.ascontiguousarray(array).tobytes()
        self.blocks.append(data + bytes(-len(data) % ALIGNMENT))
        begin, self._size = self._size, self._size + len(self.blocks[-1])
        return [array.dtype.str, list(array.shape), begin]

    def _program(self, program: Program) -> dict[str, Any]:
        return {name: self._function(function) for name, function in program.functions.items()}

    def _function(self, function: Function) -> dict[str, Any]:
        """Ports, states, and the ops that write to states: what StagePlan reads."""
        ops = [op for op in function.ops if op.type in (READ, UPDATE, SLICE_UPDATE)]
        names = {name for op in ops for names in op.inputs.values() for name in names} & set(function.consts)
        return {
            **{part: [_value(v) for v in getattr(function, part)] for part in ("inputs", "states", "outputs")},
            "ops": [_op(op) for op in ops],
            "consts": {name: self._block(function.consts[name]) for name in sorted(names)},
        }

    def _tape(self, tape: Tape) -> dict[str, Any]:
        places = [
            {"slot": p.slot, "of": p.of, "shape": p.shape, "package": p.write.package, "state": _value(p.write.state),
             "value": p.write.value, "place": _where(p.write.place),
             "consts": {n: self._block(p.write.consts[n]) for n in _constants(p.write)}}
            for p in tape.places
        ]  # fmt: skip
        numbers = {"slots": tape.slots, "arena_bytes": tape.arena_bytes, "scratch_bytes": tape.scratch_bytes}
        arrays = {name: self._block(getattr(tape, name)) for name in ("words", "counted", "constants")}
        return {**numbers, **arrays, "ports": tape.ports, "places": places}

    def _job(self, job: Job) -> list[Any]:
        base: Any = job.source
        while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
            base = base.base
        if not isinstance(base, np.memmap) or str(base.filename) not in self._files:
            raise _NotInAFileError
        offset = job.source.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        return [
            int(job.code),
            list(job.numbers),
            self._files.index(str(base.filename)),
            offset,
            job.source.nbytes,
            job.at,
        ]


class _Reader:
    def __init__(self, record: dict[str, Any], data: np.ndarray, packages: Sequence[Path]) -> None:
        self._record, self._data, self._packages = record, data, packages
        self._files: dict[int, np.ndarray] = {}

    def compiled(self) -> Compiled:
        programs = [
            Program(path, 0, {name: self._function(name, made) for name, made in functions.items()})
            for path, functions in zip(self._packages, self._record["programs"], strict=True)
        ]
        tapes = {name: self._tape(made) for name, made in self._record["tapes"].items()}
        jobs = [
            Job(Code(code), tuple(numbers), self._file(file)[offset : offset + size], at)
            for code, numbers, file, offset, size, at in self._record["jobs"]
        ]
        return Compiled(programs, tapes, jobs, self._record["packed_bytes"])

    def _file(self, number: int) -> np.ndarray:
        if number not in self._files:
            self._files[number] = np.asarray(np.memmap(self._packages[number].joinpath(*WEIGHTS), np.uint8, "r"))
        return self._files[number]

    def _array(self, block: list[Any]) -> np.ndarray:
        dtype, shape, begin = np.dtype(block[0]), block[1], block[2]
        size = int(np.prod(shape)) * dtype.itemsize
        array: np.ndarray = self._data[begin : begin + size].view(dtype).reshape(shape)
        return array

    def _function(self, name: str, made: dict[str, Any]) -> Function:
        inputs, states, outputs = (tuple(map(_read_value, made[part])) for part in ("inputs", "states", "outputs"))
        consts = {key: self._array(block) for key, block in made["consts"].items()}
        return Function(name, inputs, states, tuple(map(_read_op, made["ops"])), outputs, consts)

    def _tape(self, made: dict[str, Any]) -> Tape:
        places = []
        for p in made["places"]:
            consts = {name: self._array(block) for name, block in p["consts"].items()}
            write = Write(p["package"], _read_value(p["state"]), p["value"], _read_where(p["place"]), consts)
            places.append(Place(p["slot"], p["of"], write, tuple(p["shape"])))
        words, counted, constants = (self._array(made[part]) for part in ("words", "counted", "constants"))
        numbers = (made["slots"], made["arena_bytes"], made["scratch_bytes"])
        return Tape(words, counted, constants, made["ports"], places, *numbers)


def _constants(write: Write) -> list[str]:
    if not isinstance(write.place, Op):
        return []
    return sorted({name for names in write.place.inputs.values() for name in names} & set(write.consts))


def _where(place: Op | Blend | None) -> list[Any] | None:
    if isinstance(place, Blend):
        return ["blend", place.port, place.fresh, sorted(place.replaced)]
    return None if place is None else ["slices", *_op(place)]


def _read_where(made: list[Any] | None) -> Op | Blend | None:
    if made is None:
        return None
    return Blend(made[1], made[2], frozenset(made[3])) if made[0] == "blend" else _read_op(made[1:])


def _value(value: Value) -> list[Any]:
    return [value.name, list(value.shape), value.dtype]


def _read_value(made: list[Any]) -> Value:
    return Value(made[0], tuple(made[1]), made[2])


def _op(op: Op) -> list[Any]:
    return [op.type, op.name, {p: list(names) for p, names in op.inputs.items()}, [_value(v) for v in op.outputs]]


def _read_op(made: list[Any]) -> Op:
    inputs = {p: tuple(names) for p, names in made[2].items()}
    return Op(made[0], made[1], inputs, tuple(map(_read_value, made[3])))
