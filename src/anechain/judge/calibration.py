"""What rounding is calibrated on: a small text of the project's own, and what the model itself says.

None of the gate's prompts is in it (a test says so).
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np

from anechain.bake.source import Source
from anechain.bundle.recipe import Calibration
from anechain.judge.oracle import Cache, Oracle

Encode = Callable[[str], Sequence[int]]
Progress = Callable[[int, int], None]

# How the model's own texts begin, in turns: as texts do, in some languages, and as questions to it where it has a chat
# template.
BEGINNINGS = (
    *("The", "In", "A", "How", "Once", "When", "It", "def", "import", "Write", "What", "1.", "On", "She", "He", "This"),
    *("There", "If", "For", "My", "Our", "We", "#", "-", "Q:", "To", "As", "New", "Most", "Le", "Die", "El"),
    *("Die Kinder gingen nach der Schule", "Der Zug nach Hamburg", "Il y a dans ma rue une", "Les enfants ont"),
    *("Mi hermana trabaja en una", "El tren sale de la", "La mattina mia madre", "O rio passa por"),
    *("Long ago, in a village by the sea,", "An old man opened the door and", "It was late when"),
    *("Nobody in the house", "Meine Großmutter hat", "Am Abend saßen wir", "Quand nous sommes"),
    *("Hier soir, la voisine", "Cuando era joven,", "Domani andiamo", "Amanhã vamos", "De kinderen van", "class"),
    *("#include", "public", "Today"),
)
QUESTIONS = (
    "Give me a recipe for pancakes.",
    "What is the difference between a lake and a sea?",
    "Write a short poem about winter.",
    "How do I sort a list in Python?",
    "Tell me a fun fact about whales.",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' into Spanish.",
    "What should I cook tonight?",
)
LIKELIEST = 50  # of the vocabulary, from which the model's own texts are drawn
TEXT_PART = 512  # tokens of the project's text that are read as one sequence


@dataclass(frozen=True, eq=False)
class CalibrationSet:
    """Sequences of token ids, and the hash of all that decides them."""

    tokens: tuple[np.ndarray, ...]  # [n_i] i32 each
    sha256: str

    @staticmethod
    def of(tokens: Sequence[np.ndarray]) -> "CalibrationSet":
        return CalibrationSet(tuple(tokens), _hash(tokens))

    @property
    def size(self) -> int:
        return sum(len(ids) for ids in self.tokens)


def calibration_text() -> str:
    return (resources.files("anechain") / "data" / "calibration.txt").read_text(encoding="utf-8")


def calibration_set(
    source: Source,
    calibration: Calibration,
    vocabulary: int,
    encode: Encode,
    encode_chat: Encode | None = None,
    progress: Progress | None = None,
) -> CalibrationSet:
    """The project's text, and `calibration.sequences` texts of the model's own, `length` tokens each.

    `vocabulary` is how many ids the tokenizer knows; others are not drawn. `progress` counts tokens a sequence.
    """
    text = np.array(encode(calibration_text()), np.int32)
    length = min(TEXT_PART, source.spec.max_context)
    tokens = [text[i : i + length] for i in range(0, len(text), length)]
    if calibration.sequences:
        starts = [np.array(encode(words), np.int32) for words in BEGINNINGS]
        if encode_chat is not None:
            starts += [np.array(encode_chat(words), np.int32) for words in QUESTIONS]
        chosen = [starts[i % len(starts)] for i in range(calibration.sequences)]
        tokens += own_words(source, chosen, calibration.length, calibration.seed, vocabulary, progress)
    return CalibrationSet.of(tokens)


def own_words(
    source: Source, starts: Sequence[np.ndarray], length: int, seed: int, vocabulary: int, progress: Progress | None
) -> list[np.ndarray]:
    """What the model says after each of `starts`, drawn at temperature 1 from its likeliest tokens, [length] i32."""
    rng, oracle = np.random.default_rng(seed), Oracle(source)
    said = [list(map(int, ids[:length])) for ids in starts]
    caches = [Cache() for _ in said]
    feed = [np.array(ids, np.int32) for ids in said]
    while going := [i for i, ids in enumerate(said) if len(ids) < length]:
        hidden = oracle.forward([feed[i] for i in going], [caches[i] for i in going])
        logits = oracle.logits(np.stack([rows[-1] for rows in hidden]))[:, :vocabulary].astype(np.float64)
        likeliest = min(LIKELIEST, logits.shape[1])
        top = np.argpartition(-logits, likeliest - 1, axis=1)[:, :likeliest]
        for i, row, kept in zip(going, logits, top, strict=True):
            weights = np.exp(row[kept] - row[kept].max())
            said[i].append(int(rng.choice(kept, p=weights / weights.sum())))
            feed[i] = np.array(said[i][-1:], np.int32)
        if progress:
            progress(length - max(length - len(said[i]) for i in going), length)
    return [np.array(ids, np.int32) for ids in said]


def _hash(tokens: Sequence[np.ndarray]) -> str:
    decided = hashlib.sha256()
    for ids in tokens:
        decided.update(len(ids).to_bytes(8, "little") + ids.astype("<i4").tobytes())
    return decided.hexdigest()
