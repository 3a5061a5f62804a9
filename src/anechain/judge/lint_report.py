"""A lint report as data: one JSON object, or SARIF 2.1.0 (OASIS) for a continuous integration that shows findings."""

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from anechain.judge.lint import Finding, Report, Share, total

NOTE = "Published rules, held against the files. Nothing was measured here."
_LEVELS = {"E": "error", "W": "warning", "I": "note"}


def to_json(report: Report) -> dict[str, Any]:
    """What `anechain lint --json` prints."""
    return {
        "path": str(report.path),
        "note": NOTE,
        "machine": str(report.machine),
        "clean": report.clean,
        "findings": [_finding(f) for f in report.findings],
        "overruled": [_finding(f) for f in report.overruled],
        "ignored": report.ignored,
        "packages": [_share(s) for s in report.shares],
        "total": _share(total(report.shares)),
        "skipped": report.skipped,
        "compatibility": [
            {
                "feature": row.feature, "status": row.status if answer == "yes" else "unknown", "reported": row.status,
                "where": str(row.scope), "packages": count, "rule": row.rule, "what": row.what, "fix": row.fix,
                "source": row.source, "confidence": row.confidence,
            }
            for row, answer, count in report.compatibility
        ] + [{"feature": feature, "status": "unknown", "reported": None} for feature in report.unknown_features],
        "plan": {"machine": report.plan.machine, "os": report.plan.os} if report.plan else None,
    }  # fmt: skip


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "confidence": finding.confidence,
        "package": finding.package,
        "function": finding.function,
        "op": finding.op,
        "shape": None if finding.shape is None else list(finding.shape),
        "dtype": finding.dtype or None,
        "reason": finding.reason,
        "fix": finding.fix,
        "source": finding.source,
        "scope": finding.scope,
        "basis": finding.basis,
    }


def _share(share: Share) -> dict[str, Any]:
    return {
        "package": share.package,
        "functions": list(share.functions),
        "ops": share.ops,
        "findings": share.findings,
        "multiply_adds": share.multiply_adds,
        "compute_share": fraction(share.clear_multiply_adds, share.multiply_adds),
        "weight_bytes": share.weight_bytes,
        "weight_share": fraction(share.clear_weight_bytes, share.weight_bytes),
        "measured_engine_cost": share.engine_cost,
    }


def fraction(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def to_sarif(report: Report) -> dict[str, Any]:
    """The findings as a SARIF log with one run; each rule is described once, by its first finding."""
    first: dict[str, Finding] = {}
    for finding in report.findings:
        first.setdefault(finding.rule, finding)
    ids = list(first)
    driver = {
        "name": "anechain lint",
        "version": version("anechain"),
        "rules": [_sarif_rule(f) for f in first.values()],
    }
    folder = report.path if report.path.is_dir() and report.path.suffix != ".mlpackage" else report.path.parent
    results = [_sarif_result(f, ids, folder) for f in report.findings]
    return {
        "$schema": "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }


def _sarif_rule(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.rule,
        "shortDescription": {"text": finding.what},
        "help": {"text": f"Fix: {finding.fix}. Source: {finding.source}. Confidence: {finding.confidence}."},
        "defaultConfiguration": {"level": _LEVELS[finding.severity]},
    }


def _sarif_result(finding: Finding, ids: Sequence[str], folder: Path) -> dict[str, Any]:
    place = "/".join(part for part in (finding.package, finding.function, finding.op) if part)
    kind = "function" if finding.function else "module"
    location: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": {"uri": _uri(folder / finding.package)}},
        "logicalLocations": [{"fullyQualifiedName": place, "kind": kind}],
    }
    return {
        "ruleId": finding.rule,
        "ruleIndex": ids.index(finding.rule),
        "level": _LEVELS[finding.severity],
        "message": {"text": f"{finding.reason}. Fix: {finding.fix}."},
        "locations": [location],
        "properties": {"confidence": finding.confidence, "basis": finding.basis, "source": finding.source},
    }


def _uri(path: Path) -> str:
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())


def by_rule(findings: Sequence[Finding]) -> Iterator[list[Finding]]:
    """The findings of one rule and severity together, in their order."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.rule, finding.severity, finding.what), []).append(finding)
    yield from groups.values()
