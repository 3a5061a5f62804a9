"""What the gate compares with: the original's logits at every judged position of a profile's prompts, as one .npz.

Text becomes ids elsewhere: `prompts_of` takes the encoders as plain functions.
"""

import json
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np

from anechain.errors import BundleError, RequestError, SourceError
from anechain.judge.oracle import Cache, Oracle, Progress
from anechain.judge.prompts import CHAT_TEXTS, TEXTS, long_text

Profile = Literal["m8", "strict"]
Encode = Callable[[str], Sequence[int]]

STEPS: dict[Profile, int] = {"m8": 8, "strict": 16}
FORMAT = 1


@dataclass(frozen=True, eq=False)
class PromptIds:
    """A tokenized prompt and how many of its positions are judged.

    "greedy": the last token's position and the steps - 1 after it, each step fed with the original's own choice.
    "forced": the ids as they are, judged at `long_positions` of their number, of which there are `steps`.
    """

    name: str
    ids: np.ndarray  # [n] i32
    steps: int
    kind: Literal["greedy", "forced"] = "greedy"

    @property
    def positions(self) -> np.ndarray:
        """Where it is judged, [steps] i32: the logits at position p are those after the tokens 0 to p."""
        if self.kind == "forced":
            return long_positions(len(self.ids))
        return np.arange(len(self.ids) - 1, len(self.ids) - 1 + self.steps, dtype=np.int32)


def long_positions(context: int) -> np.ndarray:
    """Judged positions of a sequence that fills the context, ascending i32: early, half way, and the last 17.

    63 and 64 lie at both sides of a prefill's edge; 511 is the last position that a window of 512 does not cut.
    """
    chosen = {63, 64, 511, context // 2, *range(context - 17, context)}
    return np.array(sorted(p for p in chosen if 0 <= p < context), np.int32)


def prompts_of(
    profile: Profile, context: int, encode: Encode, encode_chat: Encode | None = None
) -> tuple[PromptIds, ...]:
    """The prompts of a profile as ids. `strict` adds what the chat template makes of two user messages, when there is a
    template (`encode_chat` is not None), and one sequence of `context` tokens.

    Raises SourceError when the tokenizer makes fewer tokens of the long text than the context has.
    """
    steps = STEPS[profile]
    prompts = [PromptIds(f"{profile}-{i:02d}", _ids(encode(text)), steps) for i, text in enumerate(TEXTS[profile])]
    if profile == "strict":
        if encode_chat is not None:
            prompts += [PromptIds(f"chat-{i}", _ids(encode_chat(text)), steps) for i, text in enumerate(CHAT_TEXTS)]
        ids = _ids(encode(long_text(8 * context)))
        if len(ids) < context:
            raise SourceError(
                f"the tokenizer makes only {len(ids)} tokens of {8 * context} characters of plain English, where "
                f"{context} are needed to fill the context: check that tokenizer.json belongs to this model."
            )
        prompts.append(PromptIds("long", ids[:context], len(long_positions(context)), "forced"))
    return tuple(prompts)


@dataclass(frozen=True, eq=False)
class Answer:
    """What the original said of one prompt, and what a candidate is fed so that it answers in the same contexts."""

    name: str
    kind: Literal["greedy", "forced"]
    ids: np.ndarray  # [n] i32: the prompt, and for a greedy one all of the original's tokens but the last
    positions: np.ndarray  # [steps] i32, ascending, the last is n - 1
    tokens: np.ndarray  # [steps] i32
    logits: np.ndarray  # [steps, vocab_size] f32


@dataclass(frozen=True, eq=False)
class Baseline:
    """The original's answers. The T judged positions of all prompts follow each other in the order of `prompts`.

    `logits` of a loaded baseline is a read-only map of the file: a row comes into memory when it is looked at.
    """

    profile: Profile
    fingerprint: str
    context: int
    prompts: tuple[PromptIds, ...]
    positions: np.ndarray  # [T] i32, within the prompt's own sequence
    tokens: np.ndarray  # [T] i32, the highest logit, the lowest id of equal ones
    logits: np.ndarray  # [T, vocab_size] f32

    @property
    def vocab_size(self) -> int:
        return int(self.logits.shape[1])

    @property
    def canary(self) -> int:
        """The original's first token after the first prompt."""
        return int(self.tokens[0])

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The same, prompt by prompt; nothing is copied from `logits`."""
        answers, start = [], 0
        for p in self.prompts:
            rows = slice(start, start := start + p.steps)
            chosen = self.tokens[rows]
            ids = p.ids if p.kind == "forced" else np.concatenate([p.ids, chosen[:-1]])
            answers.append(Answer(p.name, p.kind, ids, self.positions[rows], chosen, self.logits[rows]))
        return tuple(answers)

    def check(self, fingerprint: str) -> None:
        """Raises BundleError when this baseline was made from another source than the one with `fingerprint`."""
        if fingerprint != self.fingerprint:
            raise BundleError(
                f"the baseline was made from another source (fingerprint {self.fingerprint[:12]}, the bundle's is "
                f"{fingerprint[:12]}): bake again, or give the baseline that was written with this bundle."
            )

    def save(self, path: Path) -> None:
        """Writes the .npz under a temporary name beside `path` and renames it; the same baseline gives the same bytes.

        Not compressed, so that rows can be mapped: 4 bytes a logit, 40 rows for m8 and 373 for strict with a context of
        1024. Vocabulary 49 152: 8 and 73 MB; 151 936: 24 and 227 MB. (Deflate takes 10% off and 25 times as long.)
        """
        about = {
            "format": FORMAT,
            "profile": self.profile,
            "fingerprint": self.fingerprint,
            "context": self.context,
            "prompts": [{"name": p.name, "tokens": len(p.ids), "steps": p.steps, "kind": p.kind} for p in self.prompts],
        }
        part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with part.open("wb") as file:
                np.savez(
                    file,
                    about=np.frombuffer(json.dumps(about).encode(), np.uint8),
                    ids=np.concatenate([p.ids for p in self.prompts]),
                    positions=self.positions,
                    tokens=self.tokens,
                    logits=self.logits,
                )
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            raise BundleError(f"baseline {path} cannot be written ({error}): give a place with enough room.") from None
        finally:
            part.unlink(missing_ok=True)

    @staticmethod
    def load(path: Path) -> "Baseline":
        """Reads what `save` wrote and checks every byte of it; raises BundleError for anything else."""
        try:
            return _load(path)
        except FileNotFoundError:
            raise BundleError(f"baseline {path} does not exist: give the .npz that `anechain bake` wrote.") from None
        except (OSError, EOFError, LookupError, RuntimeError, TypeError, ValueError, struct.error, BadZipFile) as error:
            raise BundleError(
                f"baseline {path} is damaged or was not written by anechain ({error}): bake again to write it anew."
            ) from None


def build_baseline(
    oracle: Oracle, prompts: Sequence[PromptIds], profile: Profile, context: int, progress: Progress | None = None
) -> Baseline:
    """Runs the oracle over all prompts together, one pass over the weights for each greedy step.

    `progress` counts layers. Raises RequestError, naming every offender, for prompts that cannot be judged within
    `context`, and SourceError when the original's own logits are not finite.
    """
    _check(prompts, context)
    vocab = oracle.spec.vocab_size
    positions = np.concatenate([p.positions for p in prompts])  # [T]
    offsets = np.cumsum([0, *(p.steps for p in prompts)])
    tokens = np.empty(len(positions), np.int32)
    logits = np.empty((len(positions), vocab), np.float32)
    layers, passes = oracle.spec.n_layers, max([1, *(p.steps for p in prompts if p.kind == "greedy")])

    def step(number: int, ids: Sequence[np.ndarray], caches: Sequence[Cache | None]) -> list[np.ndarray]:
        report = None if progress is None else lambda done, _: progress(number * layers + done, passes * layers)
        return oracle.forward(ids, caches, progress=report)

    def keep(rows: np.ndarray, hidden: np.ndarray) -> None:
        logits[rows] = oracle.logits(hidden)
        tokens[rows] = logits[rows].argmax(axis=1)

    caches = [Cache() if p.kind == "greedy" else None for p in prompts]
    hidden = step(0, [p.ids for p in prompts], caches)
    ready = [1 if p.kind == "greedy" else p.steps for p in prompts]
    first = [np.arange(offset, offset + n) for offset, n in zip(offsets[:-1], ready, strict=True)]
    keep(np.concatenate(first), np.concatenate([h[positions[r]] for h, r in zip(hidden, first, strict=True)]))
    for number in range(1, passes):
        going = [i for i, p in enumerate(prompts) if p.kind == "greedy" and number < p.steps]
        rows = offsets[going] + number
        hidden = step(number, [tokens[row - 1 : row] for row in rows], [caches[i] for i in going])
        keep(rows, np.concatenate(hidden))

    bad = [p.name for p, o in zip(prompts, offsets[:-1], strict=True) if not np.isfinite(logits[o : o + p.steps]).all()]
    if bad:
        raise SourceError(
            f"the original's own float32 logits are not finite after {', '.join(bad)}: its weights are damaged, "
            "fetch it again."
        )
    return Baseline(profile, oracle.fingerprint, context, tuple(prompts), positions, tokens, logits)


def _ids(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(tokens, np.int32)


def _check(prompts: Sequence[PromptIds], context: int) -> None:
    faults = [] if prompts else ["there is no prompt"]
    for prompt in prompts:
        n, judged = len(prompt.ids), prompt.steps
        if prompt.ids.ndim != 1 or n == 0:
            faults.append(f"{prompt.name} has no tokens")
        elif prompt.kind == "forced" and judged != len(prompt.positions):
            faults.append(f"{prompt.name} has {judged} steps where {n} tokens have {len(prompt.positions)} positions")
        elif judged < 1:
            faults.append(f"{prompt.name} has {judged} steps")
        elif (fed := int(prompt.positions[-1]) + 1) > context:
            faults.append(f"{prompt.name} needs {fed} positions")
    if faults:
        what = "; ".join(faults)
        raise RequestError(f"no baseline for a context of {context}: {what}; use other prompts or a longer context.")


def _load(path: Path) -> Baseline:
    """Raises one of many errors where the file is not what `save` writes."""
    with ZipFile(path) as archive:
        if any(m.compress_type != ZIP_STORED for m in archive.infolist()):
            raise ValueError("it is compressed")
        if (broken := archive.testzip()) is not None:
            raise ValueError(f"the checksum of {broken} is wrong")
        member = archive.getinfo("logits.npy")
    with np.load(path, allow_pickle=False) as arrays:
        about = json.loads(arrays["about"].tobytes())
        ids, positions, tokens = (_vector(arrays, name) for name in ("ids", "positions", "tokens"))
    if about["format"] != FORMAT:
        raise ValueError(f"its format is {about['format']}, this version reads {FORMAT}")
    ends = np.cumsum([p["tokens"] for p in about["prompts"]])
    prompts = tuple(
        PromptIds(p["name"], ids[end - p["tokens"] : end], p["steps"], p["kind"])
        for p, end in zip(about["prompts"], ends, strict=True)
    )
    logits = _map(path, member)
    rows = sum(p.steps for p in prompts)
    if not rows == len(positions) == len(tokens) == len(logits) or ends[-1] != len(ids):
        raise ValueError("its parts do not belong together")
    return Baseline(about["profile"], about["fingerprint"], about["context"], prompts, positions, tokens, logits)


def _vector(arrays: "np.lib.npyio.NpzFile", name: str) -> np.ndarray:
    array: np.ndarray = arrays[name]
    if array.ndim != 1 or array.dtype != np.int32:
        raise ValueError(f"{name} is {array.dtype} with {array.ndim} axes")
    return array


def _map(path: Path, member: ZipInfo) -> np.ndarray:
    """The array of an uncompressed .npy member, mapped where it lies in the .npz."""
    with path.open("rb") as file:
        shape, fortran, dtype = _seek_npy(file, member.header_offset)
        if len(shape) != 2 or fortran or dtype != np.float32:
            raise ValueError(f"{member.filename} is {dtype} {list(shape)}")
        return np.memmap(file, dtype, "r", file.tell(), shape)


def _seek_npy(file: IO[bytes], offset: int) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Moves to the array's first byte in the zip member with its header at `offset`; gives shape, order and dtype."""
    file.seek(offset + 26)  # PKWARE's APPNOTE 4.3.7: the lengths of name and extra field end the 30 byte header
    name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
    file.seek(name_bytes + extra_bytes, os.SEEK_CUR)
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    raise ValueError(f"its arrays have the .npy version {version}")
