"""A suite whose expectations are what a tiny bundle itself says: `self_suite(bundle, folder)`.

A random model says nothing sensible, but it always says the same; constrained to four letters its answers are short,
differ from request to request, and change with almost any change to the model.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anechain.bundle.manifest import Bundle
from anechain.judge.answers import ChainAnswerer
from anechain.judge.suite import Suite, load_suite
from anechain.run.chain import Chain
from anechain.run.engine import Engine
from anechain.run.reference import ReferenceEngine

SCHEMA: dict[str, Any] = {"type": "string", "pattern": "^[a-zA-Z0-9]{4}$"}
KINDS = ("do", "ask")


def write_suite(folder: Path, rows: Sequence[dict[str, Any]], schema: Any = SCHEMA, system: str = "s") -> Suite:
    folder.mkdir(parents=True, exist_ok=True)
    settings = f'name = "self"\nsystem = "{system}"\nschema = "schema.json"\n[sampling]\nmax_tokens = 16\n'
    (folder / "suite.toml").write_text(settings, encoding="utf-8")
    (folder / "schema.json").write_text(json.dumps(schema), encoding="utf-8")
    (folder / "fixtures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_suite(str(folder))


def self_suite(bundle: Bundle, folder: Path, n: int = 20, engine: Engine | None = None) -> Suite:
    """`n` requests of four letters, three quarters of them in the split "trace", expecting what `bundle` answers on
    `engine`, by default the reference engine."""
    rng = np.random.default_rng(3)
    words = ["".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), 4)) for _ in range(n)]
    rows = [
        {"name": f"f{i:02d}", "prompt": word, "expect": "", "kind": KINDS[i % 2],
         "wording": ("new", "old")[i // 2 % 2], "split": "gate" if i % 4 == 0 else "trace"}
        for i, word in enumerate(words)
    ]  # fmt: skip
    suite = write_suite(folder, rows)
    answers = ChainAnswerer(suite, Chain(bundle, engine or ReferenceEngine())).answers(suite.fixtures)
    for row, answer in zip(rows, answers, strict=True):
        row["expect"] = answer.text
    assert len({row["expect"] for row in rows}) > n // 2, "the model says the same to everything"
    return write_suite(folder, rows)
