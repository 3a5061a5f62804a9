"""What every engine must do with a bundle, whatever it computes on: the tests and a Mac's record run these checks.

Each check feeds a chain and compares with what the same chain says in another way, or, once, with the reference engine.
It returns "" or the reason why it failed. Numbers are the gate's business: `agreement` only tells "the same" from
"something else".
"""

from collections.abc import Callable

import numpy as np

from anechain.bundle.spec import DECODE
from anechain.errors import AnechainError, EngineError
from anechain.run.chain import MIN_CHUNK, Chain, Session

# What counts as the same on hardware that rounds as it likes: the fp16 chain of SmolLM2 is off by 0.01 under stress,
# and the logits of another token by 0.3 and more.
AGREEMENT = 0.1
STEPS = 4  # tokens that are decoded one by one after a prompt

Check = Callable[[Chain, Chain, float], str]


def run_checks(chain: Chain, reference: Chain, agreement: float) -> dict[str, str]:
    """Name of each check -> "" or why it failed.

    `reference` is the same bundle on the reference engine; `agreement` the largest root mean square error of a row of
    logits, relative to the spread of that row, that counts as the same.
    """
    results = {}
    for name, check in CHECKS.items():
        try:
            results[name] = check(chain, reference, agreement)
        except AnechainError as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


def deviation(got: np.ndarray, wanted: np.ndarray) -> float:
    """Of rows of logits [n, V]: the largest root mean square error, relative to the spread of the row; inf for NaN."""
    if not np.isfinite(got).all():
        return float("inf")
    return float((np.sqrt(((got - wanted) ** 2).mean(axis=-1)) / wanted.std(axis=-1)).max())


def as_the_reference(chain: Chain, reference: Chain, agreement: float) -> str:
    ids = _ids(chain, _chunk(chain) + MIN_CHUNK + STEPS)
    return _compare("logits", _talk(chain, ids), _talk(reference, ids), agreement)


def prompts_of_every_kind(chain: Chain, reference: Chain, agreement: float) -> str:
    """In chunks, in a partly filled chunk, one by one: the answer is that of one token after another."""
    chunk = _chunk(chain)
    longest = min(chunk + MIN_CHUNK + 1, chain.bundle.context)
    ids = _ids(chain, longest)
    session = chain.start()
    one_by_one = np.array([chain.feed(session, [i]) for i in ids])
    for length in sorted(
        {1, MIN_CHUNK - 1, MIN_CHUNK, chunk - 1, chunk, chunk + 1, longest} & set(range(1, longest + 1))
    ):
        got = chain.feed(chain.start(), ids[:length])
        if reason := _compare(f"a prompt of {length} tokens", got, one_by_one[length - 1], agreement):
            return reason
    return ""


def two_conversations(chain: Chain, reference: Chain, agreement: float) -> str:
    ids = _ids(chain, 2 * (MIN_CHUNK + 2))
    talks = [ids[: len(ids) // 2], ids[len(ids) // 2 :]]
    alone = [_pieces(chain, chain.start(), talk) for talk in talks]
    if not deviation(alone[0], alone[1]) > agreement:
        return "two talks give the same logits: nothing was compared"
    sessions = [chain.start() for _ in talks]
    turns: list[list[np.ndarray]] = [[], []]
    for start, end in _turns(len(talks[0])):
        for session, talk, said in zip(sessions, talks, turns, strict=True):
            said.append(chain.feed(session, talk[start:end]))
    for number in range(2):
        if reason := _compare(f"conversation {number + 1} of 2", np.array(turns[number]), alone[number], agreement):
            return reason
    return ""


def a_copy_goes_its_own_way(chain: Chain, reference: Chain, agreement: float) -> str:
    ids = _ids(chain, MIN_CHUNK + 4)
    session = chain.start()
    chain.feed(session, ids[:MIN_CHUNK])
    copy = session.copy()
    first = chain.feed(session, ids[MIN_CHUNK : MIN_CHUNK + 2])
    chain.feed(copy, ids[MIN_CHUNK + 2 :])
    again = session.copy()
    last = [chain.feed(s, ids[:1]) for s in (session, again)]
    wanted = chain.start()
    chain.feed(wanted, ids[:MIN_CHUNK])
    right = chain.feed(wanted, ids[MIN_CHUNK : MIN_CHUNK + 2])
    return (
        _compare("after a copy was made", first, right, agreement)
        or _compare("after the copy went on", last[0], chain.feed(wanted, ids[:1]), agreement)
        or _compare("the copy of a copy", last[1], last[0], agreement)
    )


def a_new_start_knows_nothing(chain: Chain, reference: Chain, agreement: float) -> str:
    ids = _ids(chain, min(chain.bundle.context, _chunk(chain) + MIN_CHUNK))
    first = chain.feed(chain.start(), ids[:3])
    chain.feed(chain.start(), ids)
    return _compare("a second start", chain.feed(chain.start(), ids[:3]), first, agreement)


def going_back(chain: Chain, reference: Chain, agreement: float) -> str:
    """A conversation that is rewritten from some token on: what was written beyond is masked."""
    ids = _ids(chain, MIN_CHUNK + 6)
    session = chain.start()
    chain.feed(session, ids)
    session.position = 3
    got = chain.feed(session, ids[5:8])
    return _compare("after going back", got, chain.feed(chain.start(), [*ids[:3], *ids[5:8]]), agreement)


def stages_one_by_one(chain: Chain, reference: Chain, agreement: float) -> str:
    ids = _ids(chain, MIN_CHUNK + 1)
    hidden = chain.embedding.rows(ids)
    for number in range(len(chain.stages)):
        session = chain.start()
        parts = [chain.stage_feed(number, session, part) for part in (hidden[:MIN_CHUNK], hidden[MIN_CHUNK:])]
        hidden = np.concatenate(parts)
    spec = chain.bundle.spec
    last = chain.engine.buffer((1, 1, 1, spec.hidden_size), np.float16)
    last[0, 0, 0] = hidden[-1]
    chain.head.step(DECODE, {"hidden": last}, None, chain.logits)
    got = np.concatenate([part[0, 0, 0] for part in chain.logits.values()])[: spec.vocab_size].astype(np.float32)
    session = chain.start()
    chain.feed(session, ids[:MIN_CHUNK])
    return _compare("stages that were fed apart", got, chain.feed(session, ids[MIN_CHUNK:]), agreement)


def wrong_calls_are_refused(chain: Chain, reference: Chain, agreement: float) -> str:
    """... and change nothing: a port that is missing, of another shape or dtype, a state of another stage, no room."""
    ids = _ids(chain, 4)
    session = chain.start()
    chain.feed(session, ids[:3])
    stage, state = chain.stages[0], session.states[0]
    right = chain.ports(DECODE, session.position)
    wrong_kind = {"hidden": right["hidden"].astype(np.float32)}
    wrong_shape = {"hidden": np.zeros((1, 1, 2, chain.bundle.spec.hidden_size), np.float16)}
    beyond = {name: np.full(4, chain.bundle.context + n, np.int32) for n, name in enumerate(("begin", "end"))}
    out = {"hidden_out": np.zeros_like(right["hidden"])}
    calls = {
        "an unknown function": ("sing", right, state, out),
        "a missing input": (DECODE, {n: a for n, a in right.items() if n != "hidden"}, state, out),
        "another dtype": (DECODE, {**right, **wrong_kind}, state, out),
        "another shape": (DECODE, {**right, **wrong_shape}, state, out),
        "a missing output": (DECODE, right, state, {}),
        "an unknown output": (DECODE, right, state, {**out, "more": out["hidden_out"]}),
        "no state": (DECODE, right, None, out),
    }
    if "begin" in right:
        calls["a box beyond the context"] = (DECODE, {**right, **beyond}, state, out)
    for what, call in calls.items():
        try:
            stage.step(*call)
        except EngineError:
            continue
        return f"{what} was not refused"
    after = chain.start()
    chain.feed(after, ids[:3])
    return _compare("after refused calls", chain.feed(session, ids[3:]), chain.feed(after, ids[3:]), agreement)


def logits_belong_to_the_caller(chain: Chain, reference: Chain, agreement: float) -> str:
    ids = _ids(chain, 4)
    session = chain.start()
    first = chain.feed(session, ids[:3])
    kept = first.copy()
    chain.feed(session, ids[3:])
    return "" if np.array_equal(first, kept) else "logits changed while the next token was fed"


def the_hand_off_copies_nothing(chain: Chain, reference: Chain, agreement: float) -> str:
    """Last of all, when everything before has handed something on."""
    handoff = chain.engine.handoff
    return "" if handoff.startswith(("zero-copy", "host memory")) else f"the hand-off is {handoff}"


CHECKS: dict[str, Check] = {
    check.__name__.replace("_", " "): check
    for check in (
        as_the_reference, prompts_of_every_kind, two_conversations, a_copy_goes_its_own_way, a_new_start_knows_nothing,
        going_back, stages_one_by_one, wrong_calls_are_refused, logits_belong_to_the_caller,
        the_hand_off_copies_nothing,
    )
}  # fmt: skip


def _ids(chain: Chain, count: int) -> np.ndarray:
    return np.random.default_rng(8).integers(0, chain.bundle.spec.vocab_size, min(count, chain.bundle.context))


def _chunk(chain: Chain) -> int:
    return chain.bundle.prefill or MIN_CHUNK


def _talk(chain: Chain, ids: np.ndarray) -> np.ndarray:
    """Logits [1 + STEPS, V] after a prompt and after each of the last ids."""
    session = chain.start()
    prompt = chain.feed(session, ids[:-STEPS])
    return np.array([prompt, *(chain.feed(session, [i]) for i in ids[-STEPS:])])


def _turns(count: int) -> list[tuple[int, int]]:
    return [(0, MIN_CHUNK), (MIN_CHUNK, MIN_CHUNK + 1), (MIN_CHUNK + 1, count)]


def _pieces(chain: Chain, session: Session, ids: np.ndarray) -> np.ndarray:
    return np.array([chain.feed(session, ids[start:end]) for start, end in _turns(len(ids))])


def _compare(what: str, got: np.ndarray, wanted: np.ndarray, agreement: float) -> str:
    error = deviation(got, wanted)
    return "" if error <= agreement else f"{what}: off by {error:.4f} of the spread, more than {agreement}"
