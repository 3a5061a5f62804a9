"""Will the ANE take it? Programs held against published rules, from the files alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anechain.bundle.program import Op
from anechain.errors import RequestError
from anechain.judge.compatibility import Answer, Known, Machine, known_problems
from anechain.judge.lint_features import ANY_PROGRAM, FEATURES
from anechain.judge.lint_packages import Progress, load_packages, silent
from anechain.judge.lint_plan import NEURAL_ENGINE, Plan, load_plan
from anechain.judge.lint_rules import PLACED, RULES, Rule, Severity
from anechain.judge.lint_view import Hit, Package, View
from anechain.judge.measured import Stored, feature_answer

MEASURED = "plan"  # what stands for the rule's id of a finding that a compute plan makes
_GRAVITY = {"E": 0, "W": 1, "I": 2}


@dataclass(frozen=True)
class Finding:
    """One rule at one place. `basis` is "published", or "measured on ..." for what a compute plan says."""

    rule: str
    severity: str
    confidence: str
    package: str
    function: str | None
    op: str | None
    shape: tuple[int, ...] | None
    dtype: str
    what: str
    detail: str
    fix: str
    source: str
    scope: str
    basis: str = "published"

    @property
    def reason(self) -> str:
        return f"{self.basis}: {self.what}; here: {self.detail}"


@dataclass(frozen=True)
class Share:
    """How much of a package is clear: not under a finding of severity E."""

    package: str
    functions: tuple[str, ...]
    ops: int
    findings: dict[str, int]  # by severity
    multiply_adds: int  # of one call of each function
    clear_multiply_adds: int
    weight_bytes: int
    clear_weight_bytes: int
    engine_cost: float | None  # measured: the share of the plan's cost that went to the ANE


@dataclass(frozen=True)
class Report:
    """Everything that was found in one path. `overruled` are findings that a compute plan contradicts."""

    path: Path
    machine: Machine
    shares: tuple[Share, ...]
    skipped: dict[str, str]  # what is not an ML program, and what it is
    findings: tuple[Finding, ...]
    overruled: tuple[Finding, ...]
    ignored: dict[str, int]  # rules that were not to count, and how many findings each had
    compatibility: tuple[tuple[Known, Answer, int], ...]  # with how many packages it concerns
    unknown_features: tuple[str, ...]  # what the packages have and no row speaks of, for this machine
    plan: Plan | None

    @property
    def clean(self) -> bool:
        return not any(f.severity == "E" for f in self.findings)


def lint(
    path: Path,
    machine: Machine | None = None,
    plan: Path | None = None,
    ignore: Sequence[str] = (),
    report: Progress = silent,
    records: Sequence[Stored] = (),
) -> Report:
    """Judges a bundle, a package, or a folder of packages.

    `machine` is what they are to run on; rules and known problems of other machines are left out. Raises BundleError,
    naming all packages that cannot be read; RequestError when there is nothing to judge, for rules in `ignore` that
    are not there, and for a plan of other packages. `records` are those of Macs: what was measured on such a machine
    overrules what was published of it.
    """
    machine = machine or Machine()
    ids = {rule.id for rule in RULES} | {MEASURED}
    if strange := [i for i in ignore if i not in ids]:
        raise RequestError(f"--ignore {', '.join(strange)}: there is no such rule; docs/ane-rules.md lists them.")
    packages, skipped = load_packages(path, report)
    recorded = load_plan(plan, packages) if plan else None
    seen = _compatibility(packages, machine)
    findings: list[Finding] = []
    overruled: list[Finding] = []
    ignored = dict.fromkeys(ignore, 0)
    shares = []
    for package in packages:
        kept: list[tuple[Finding, Hit]] = []
        judged = _judge(package, machine, seen, recorded)
        contradicted = _contradicted(package, machine, seen, records)
        overruled += [replace(f, basis=f"measured to work on {machine}") for f in contradicted]
        for finding, hit, placed in judged:
            if finding in contradicted:
                continue
            if finding.rule in ignored:
                ignored[finding.rule] += 1
            elif placed and recorded and _refutes(recorded, package, hit):
                overruled.append(finding)
            else:
                kept.append((finding, hit))
        findings += [f for f, _ in kept]
        shares.append(_share(package, kept, recorded))
    findings.sort(key=lambda f: _GRAVITY[f.severity])  # stable: within a severity in the order of the table
    present = {row.feature for row, _, _ in seen}
    asked = [f for f in FEATURES if machine.known and f != ANY_PROGRAM and f not in present]
    unknown = [f for f in asked if any(any(FEATURES[f](p)) for p in packages)]
    rows = tuple((row, answer, len(where)) for row, answer, where in seen)
    return Report(
        path, machine, tuple(shares), skipped, tuple(findings), tuple(overruled), ignored, rows, tuple(unknown),
        recorded,
    )  # fmt: skip


def _judge(
    package: Package, machine: Machine, seen: Sequence[tuple[Known, Answer, Sequence[str]]], plan: Plan | None
) -> list[tuple[Finding, Hit, bool]]:
    """All findings of one package, the gravest of each rule at each place; the flag says that it is about placement."""
    best: dict[tuple[str, int, str], tuple[Finding, Hit, bool]] = {}

    def add(finding: Finding, hit: Hit, placed: bool) -> None:
        key = (finding.rule, id(hit.op) if hit.op else id(hit.view), hit.name)
        if key not in best or _GRAVITY[finding.severity] < _GRAVITY[best[key][0].severity]:
            best[key] = (finding, hit, placed)

    for rule in RULES:
        if rule.scope.holds(machine, package.coremltools) != "no":
            for hit in rule.condition(package):
                add(_finding(rule, package, hit), hit, rule.effect == PLACED)
    for row, answer, names in seen:
        if row.status == "broken" and answer == "yes" and package.name in names:
            for hit in FEATURES[row.feature](package):
                add(_known_finding(row, package, hit), hit, False)
    if plan is not None:
        for hit in _measured(plan, package):
            add(_plan_finding(plan, package, hit), hit, False)
    return list(best.values())


def _contradicted(
    package: Package, machine: Machine, seen: Sequence[tuple[Known, Answer, Sequence[str]]], records: Sequence[Stored]
) -> list[Finding]:
    """Findings of rows that say "broken" of what was measured to work on such a machine."""
    return [
        _known_finding(row, package, hit)
        for row, answer, names in seen
        if row.status == "broken"
        and answer == "yes"
        and package.name in names
        and feature_answer(row.feature, machine, package.coremltools, records).basis == "measured"
        and feature_answer(row.feature, machine, package.coremltools, records).status == "works"
        for hit in FEATURES[row.feature](package)
    ]


def _finding(rule: Rule, package: Package, hit: Hit) -> Finding:
    return Finding(
        rule.id, rule.severity, rule.confidence, package.name, hit.view.name if hit.view else None, hit.name or None,
        hit.shape, hit.dtype, rule.what, hit.detail, rule.fix, rule.source, str(rule.scope),
    )  # fmt: skip


def _known_finding(row: Known, package: Package, hit: Hit) -> Finding:
    return Finding(
        row.rule, row.severity, row.confidence, package.name, hit.view.name if hit.view else None, hit.name or None,
        hit.shape, hit.dtype, row.what, hit.detail, row.fix, row.source, str(row.scope),
    )  # fmt: skip


def _measured(plan: Plan, package: Package) -> Iterable[Hit]:
    for view in package.views:
        for op in view.ops:
            placed = plan.of(package.name, view, op)
            if placed is not None and placed.device != NEURAL_ENGINE:
                out = op.outputs[0] if op.outputs else None
                detail = f"{op.type} on the {placed.device}"
                yield Hit(detail, view, op, op.name, out.shape if out else None, out.dtype if out else "")


def _plan_finding(plan: Plan, package: Package, hit: Hit) -> Finding:
    assert hit.view is not None and hit.op is not None
    severity: Severity = "E" if hit.view.multiply_adds(hit.op) else "W"
    return Finding(
        MEASURED, severity, "H", package.name, hit.view.name, hit.name, hit.shape, hit.dtype,
        "the compute plan puts this op on another unit than the ANE", hit.detail,
        "look for a published rule at the same op, or at the ops around it", "the recorded compute plan",
        plan.where, f"measured on {plan.where}",
    )  # fmt: skip


def _refutes(plan: Plan, package: Package, hit: Hit) -> bool:
    """Whether the plan shows on the ANE what a rule says cannot be there."""
    if hit.view is None:
        return any(NEURAL_ENGINE in plan.devices(package.name, view) for view in package.views)
    if hit.op is None:
        return NEURAL_ENGINE in plan.devices(package.name, hit.view)
    concerned = _readers(hit.view, hit.op) if hit.op.type.startswith("constexpr") else [hit.op]
    placed = [plan.of(package.name, hit.view, op) for op in concerned]
    return bool(placed) and all(p is not None and p.device == NEURAL_ENGINE for p in placed)


def _readers(view: View, weight: Op) -> list[Op]:
    """The ops that compute with a weight, past the constexpr ops that spell it out."""
    spelled = frozenset(op.type for op in view.all_ops if op.type.startswith("constexpr"))
    return [op for op in view.downstream(weight, spelled) if op.type not in spelled]


def _share(package: Package, kept: Sequence[tuple[Finding, Hit]], plan: Plan | None) -> Share:
    grave = [hit for finding, hit in kept if finding.severity == "E"]
    whole_package = any(hit.view is None for hit in grave)
    whole_views = {id(hit.view) for hit in grave if hit.op is None}
    ops = {id(op) for hit in grave if hit.op and hit.view for op in (hit.op, *_readers_of(hit))}
    total = clear = 0
    weights: dict[object, int] = {}
    barred: set[object] = set()
    for view in package.views:
        for op in view.ops:
            under = whole_package or id(view) in whole_views or id(op) in ops
            count = view.multiply_adds(op)
            total += count
            clear += 0 if under else count
            parts = {key: size for weight in view.weights(op).values() for key, size in weight.parts.items()}
            weights |= parts
            barred |= set(parts) if under else set()
    counts = {s: sum(f.severity == s for f, _ in kept) for s in _GRAVITY}
    free = sum(size for key, size in weights.items() if key not in barred)
    return Share(
        package.name, tuple(v.name for v in package.views), sum(len(v.ops) for v in package.views), counts, total,
        clear, sum(weights.values()), free, plan.engine_cost(package.name) if plan else None,
    )  # fmt: skip


def _readers_of(hit: Hit) -> list[Op]:
    assert hit.view is not None and hit.op is not None
    return _readers(hit.view, hit.op) if hit.op.type.startswith("constexpr") else []


def _compatibility(packages: Sequence[Package], machine: Machine) -> list[tuple[Known, Answer, list[str]]]:
    """The rows that may hold for the named machine and a feature of a package, with the packages concerned."""
    rows: list[tuple[Known, Answer, list[str]]] = []
    if not machine.known:
        return rows
    for row in known_problems():
        if row.feature not in FEATURES:
            continue
        answers: dict[str, Answer] = {p.name: row.scope.holds(machine, p.coremltools) for p in packages}
        concerned = [p.name for p in packages if answers[p.name] != "no" and any(FEATURES[row.feature](p))]
        if concerned:
            rows.append((row, "yes" if any(answers[n] == "yes" for n in concerned) else "maybe", concerned))
    return rows


def total(shares: Sequence[Share]) -> Share:
    """All packages as one."""
    first = Share("all", (), 0, dict.fromkeys(_GRAVITY, 0), 0, 0, 0, 0, None)
    for share in shares:
        first = replace(
            first,
            ops=first.ops + share.ops,
            findings={s: n + share.findings[s] for s, n in first.findings.items()},
            multiply_adds=first.multiply_adds + share.multiply_adds,
            clear_multiply_adds=first.clear_multiply_adds + share.clear_multiply_adds,
            weight_bytes=first.weight_bytes + share.weight_bytes,
            clear_weight_bytes=first.clear_weight_bytes + share.clear_weight_bytes,
        )
    return first
