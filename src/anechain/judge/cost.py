"""What a step on the Neural Engine is predicted to take: bytes, multiply-adds, dispatches and state, against what is
published of the chip (data/chips.toml).

step = dispatch_ms of the chip x predictions + layer_ms x layers + the longer of reading (weights and state, at the
published bandwidth) and computing (multiply-adds, at a share of the published operations). layer_ms and the share are
fitted to half of the published measurements and tested on the others: benchmarks/fit_cost_model.py, docs/cost.md.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from anechain.bundle.footprint import matrix_bytes
from anechain.bundle.manifest import Bundle
from anechain.bundle.spec import matrices_of
from anechain.errors import RequestError
from anechain.judge.compatibility import Machine


@dataclass(frozen=True)
class Chip:
    """What is published of a chip's Neural Engine; `tera_ops` None where nothing is."""

    name: str
    bandwidth_gb_s: float
    bandwidth_source: str
    dispatch_ms: float
    dispatch_source: str
    tera_ops: float | None = None
    tera_ops_source: str = ""
    fitted: bool = False  # the bandwidth comes from measurements of models, not from one of its own


@dataclass(frozen=True)
class Constants:
    """What was fitted. `expansion` is how far compressed weights are read as if they were fp16: 0 not at all, 1 whole.

    The spreads are factors that 90% of the measurements which were not fitted to lie within.
    """

    layer_ms: float
    compute_share: float
    expansion: float
    decode_spread: float
    chunk_spread: float


@dataclass(frozen=True)
class Work:
    """What one step does."""

    weight_bytes: float  # as stored
    fp16_bytes: float  # of the same weights
    state_bytes: float
    multiply_adds: float
    layers: int
    dispatches: int


@dataclass(frozen=True)
class Parts:
    """Where a step's milliseconds go; of `stream_ms` and `compute_ms` the longer counts."""

    dispatch_ms: float
    layers_ms: float
    stream_ms: float
    compute_ms: float | None

    @property
    def ms(self) -> float:
        return self.dispatch_ms + self.layers_ms + max(self.stream_ms, self.compute_ms or 0.0)


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((resources.files("anechain") / "data" / "chips.toml").read_text(encoding="utf-8"))


def chips() -> dict[str, Chip]:
    """Every chip of which enough is published, by name."""
    return {row["name"]: Chip(**row) for row in _table()["chip"]}


def constants() -> Constants:
    return Constants(**_table()["fit"])


def chip_of(machine: Machine) -> Chip:
    """Raises RequestError, listing the known ones, for a chip that nothing is published of."""
    known = chips()
    if machine.chip not in known:
        said = f"--chip {machine.chip!r} is not known here" if machine.chip else "--chip is needed"
        raise RequestError(f"{said}: nothing is published of other chips than {', '.join(known)}.")
    return known[machine.chip]


def parts(work: Work, chip: Chip, fit: Constants, expansion: float | None = None) -> Parts:
    """Where the time of a step goes."""
    wide = fit.expansion if expansion is None else expansion
    read = work.weight_bytes * (1 - wide) + work.fp16_bytes * wide + work.state_bytes
    compute_ms = None
    if chip.tera_ops is not None:
        compute_ms = 2 * work.multiply_adds / (fit.compute_share * chip.tera_ops * 1e12) * 1e3
    stream_ms = read / (chip.bandwidth_gb_s * 1e9) * 1e3
    return Parts(chip.dispatch_ms * work.dispatches, fit.layer_ms * work.layers, stream_ms, compute_ms)


def blocks_work(bundle: Bundle, query: int) -> Work:
    """One pass of `query` tokens through all packages of layers."""
    spec = bundle.spec
    matrices = {name: shape for name, shape in matrices_of(spec).items() if name.startswith("layers.")}
    size = sum(outputs * inputs for outputs, inputs in matrices.values())
    stored = sum(matrix_bytes(name, shape, bundle.recipe) for name, shape in matrices.items())
    width = spec.n_heads * spec.head_dim
    attention = 2 * spec.n_layers * query * (bundle.context + query) * width
    state = 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * bundle.context * 2
    rewritten = 2 if bundle.state_update == "blend" else 1
    return Work(stored, 2 * size, state * rewritten, size * query + attention, spec.n_layers, len(bundle.blocks))


def head_work(bundle: Bundle) -> Work:
    """The head's package, which computes one position."""
    shape = matrices_of(bundle.spec)["head"]
    size = shape[0] * shape[1]
    return Work(matrix_bytes("head", shape, bundle.recipe), 2 * size, 0, size, 0, 1)


def predict(bundle: Bundle, machine: Machine, prompt: int | None = None) -> dict[str, Any]:
    """Predicted tok/s, prefill and first token of `bundle`; `low` and `high` hold what the model's errors allow.

    A `prompt` of None is 128 tokens, or the context where that is less.
    """
    chip, fit = chip_of(machine), constants()
    prompt = min(128, bundle.context) if prompt is None else prompt
    if prompt < 1 or prompt > bundle.context:
        raise RequestError(f"--prompt {prompt} is not a whole number from 1 to the context of {bundle.context}.")
    block, head = (parts(work, chip, fit) for work in (blocks_work(bundle, 1), head_work(bundle)))
    token_ms = block.ms + head.ms
    slow_ms = sum(parts(w, chip, fit, expansion=1.0).ms for w in (blocks_work(bundle, 1), head_work(bundle)))
    record: dict[str, Any] = {
        "chip": chip.name,
        "os": f"{machine.system} {'.'.join(map(str, machine.os))}".strip(),
        "bandwidth_gb_s": chip.bandwidth_gb_s,
        "decode": {
            "tok_per_s": 1e3 / token_ms,
            "low": 1e3 / (max(token_ms, slow_ms) * fit.decode_spread),
            "high": 1e3 / token_ms * fit.decode_spread,
            "ms": token_ms,
            "parts_ms": _together(block, head),
        },
        "prefill": None,
        "first_token": None,
        "caveats": _caveats(bundle, chip),
        "sources": sorted({chip.bandwidth_source, chip.dispatch_source, chip.tera_ops_source} - {""}),
    }
    if not bundle.prefill:
        record |= _prompt(prompt, prompt * block.ms + head.ms, 1, fit.decode_spread)
    elif chip.tera_ops is not None:
        chunk = parts(blocks_work(bundle, bundle.prefill), chip, fit)
        chunks = -(-prompt // bundle.prefill)
        record |= _prompt(prompt, chunks * chunk.ms + head.ms, bundle.prefill, fit.chunk_spread)
        record["prefill"] |= {"tok_per_s": 1e3 * bundle.prefill / chunk.ms, "chunk_ms": chunk.ms}
        record["prefill"] |= _range(record["prefill"]["tok_per_s"], fit.chunk_spread)
    return record


def _prompt(prompt: int, first_ms: float, query: int, spread: float) -> dict[str, Any]:
    rate = prompt / first_ms * 1e3
    return {
        "prefill": {"tok_per_s": rate, **_range(rate, spread), "tokens_at_once": query},
        "first_token": {"ms": first_ms, **_range(first_ms, spread), "prompt": prompt},
    }


def _range(value: float, spread: float) -> dict[str, float]:
    return {"low": value / spread, "high": value * spread}


def _together(*steps: Parts) -> Mapping[str, float | None]:
    computed = [step.compute_ms for step in steps]
    return {
        "dispatch": sum(step.dispatch_ms for step in steps),
        "layers": sum(step.layers_ms for step in steps),
        "read": sum(step.stream_ms for step in steps),
        "compute": None if None in computed else sum(ms for ms in computed if ms is not None),
    }


def _caveats(bundle: Bundle, chip: Chip) -> list[str]:
    """What would make the figures wrong."""
    said = ["every op is taken to run on the ANE: `anechain lint`, and a compute plan from a Mac, say whether it does"]
    if bundle.recipe.compute == "fp32":
        said.append("this bundle computes in fp32, which is published to keep a program off the ANE (rule T1)")
    schemes = {bundle.recipe.scheme_for(name, o * i) for name, (o, i) in matrices_of(bundle.spec).items()}
    if any(s.kind == "linear" and s.granularity == "block" for s in schemes):
        said.append("weights with a scale per block are published to keep an op off the ANE (rule Q1)")
    if any(s.kind == "linear" and s.bits < 16 for s in schemes):
        said.append("int8 and int4 may be read as fp16 (rule Q2): the low end of decode is computed so")
    if chip.fitted:
        said.append(f"no bandwidth of the {chip.name}'s ANE is published: it is fitted to measurements of models on it")
    if chip.tera_ops is None and bundle.prefill:
        said.append(f"no operations per second of the {chip.name}'s ANE are published: prefill is not predicted")
    return said
