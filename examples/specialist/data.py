"""Training rows for the specialist: `rows(seed, count)` gives the same ones every time."""

import json
import random
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from intents import INTENTS
from wording import FRAMES, TALK_FRAMES, VALUES, Intent

SUITE = Path(__file__).parents[2] / "src/anechain/suites/mac-actions"
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Row:
    """One exchange: what is said to the assistant, what it answers, and the template (frame and core) it came from."""

    text: str
    answer: str
    kind: str
    template: str


def system_prompt() -> str:
    """What the suite says before every request."""
    return str(tomllib.loads((SUITE / "suite.toml").read_text(encoding="utf-8"))["system"])


def answer(intent: Intent, core: str, value: str) -> str:
    """The compact JSON that the specialist has to say; `value` is what was in the target's slot."""
    say = intent.say[intent.cores.index(core) % len(intent.say)].format(target=value)
    said = {
        "action": intent.action,
        "target": value,
        "confirm": intent.confirm,
        "say": say[:1].upper() + say[1:],
    }
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"))


def part_of(intent: Intent, validation: bool) -> tuple[str, ...]:
    """Every tenth way to ask for an action is not trained on: settings are chosen by how well those are understood."""
    return tuple(core for number, core in enumerate(intent.cores) if (number % 10 == 9) == validation)


def rows(seed: int, count: int, validation: bool = False) -> list[Row]:
    """`count` rows, each kind equally often; a third of them written all in small letters, half without a full stop."""
    rng = random.Random(f"validation {seed}" if validation else seed)
    kinds = sorted({intent.kind for intent in INTENTS})
    made = []
    for number in range(count):
        # Asking for an action has many more wordings than the other kinds, so it gets two turns in six.
        kind = [*kinds, "do-it"][number % (len(kinds) + 1)]
        intent = rng.choice([i for i in INTENTS if i.kind == kind])
        core = rng.choice(part_of(intent, validation))
        frame = rng.choice(TALK_FRAMES if kind == "plain-talk" else FRAMES)
        filled = {slot: rng.choice(VALUES[slot]) for slot in _SLOT.findall(core)}
        lower = rng.random() < 0.33
        if lower:
            filled = {slot: value.lower() for slot, value in filled.items()}
        text = frame.format(core.format(**filled))
        if not lower:
            text = text[:1].upper() + text[1:]
            text = re.sub(r"\bi\b(?=[ '])", "I", text)
        if text[-1].isalnum() and rng.random() < 0.5:
            text += "."
        made.append(Row(text, answer(intent, core, filled.get(intent.target, "")), kind, frame.format(core)))
    rng.shuffle(made)
    return made


def templates() -> dict[str, tuple[str, str, str]]:
    """Every frame around every core, all that `rows` can make, values aside; of each what its parts are: opening, core
    and closing."""
    return {
        frame.format(core): (frame.partition("{}")[0], core, frame.partition("{}")[2])
        for intent in INTENTS
        for core in intent.cores
        for frame in (TALK_FRAMES if intent.kind == "plain-talk" else FRAMES)
    }


def cores() -> dict[str, set[str]]:
    """The cores of each kind."""
    found: dict[str, set[str]] = {}
    for intent in INTENTS:
        found.setdefault(intent.kind, set()).update(intent.cores)
    return found
