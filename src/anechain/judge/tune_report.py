"""What a search leaves behind: the recipe with its evidence, a table of all candidates, a plot of bytes against KL."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anechain.bundle.manifest import write_atomically
from anechain.bundle.recipe import Recipe, Scheme
from anechain.judge.gate import MAX_MEAN_KL
from anechain.judge.plots import png
from anechain.judge.tune import Candidate, Tuned, closest_of

_FOUND_BY = "# Found by `anechain tune "
_FIGURES = ("min_centred_cosine", "mean_kl", "max_kl", "top1")


def recipe_text(recipe: Recipe, evidence: Sequence[str] = ()) -> str:
    """`recipe` as TOML that `load_recipe` reads, `evidence` as comments above it."""
    lines = [f"# {line}" for line in evidence]
    lines += [f'name = "{recipe.name}"', f'compute = "{recipe.compute}"']
    if recipe.layers_per_package is not None:
        lines.append(f"layers_per_package = {recipe.layers_per_package}")
    if (calibration := recipe.calibration) is not None:
        methods = ", ".join(f'"{m}"' for m in calibration.methods)
        lines += ["", "[calibration]", f"methods = [{methods}]", f"sequences = {calibration.sequences}"]
        lines += [f"length = {calibration.length}", f"seed = {calibration.seed}"]
    grouped: list[tuple[Scheme, Mapping[str, Any], list[str]]] = []
    for rule in recipe.rules:
        limits = {key: value for key, value in rule.to_json().items() if key not in ("match", "scheme")}
        if grouped and grouped[-1][:2] == (rule.scheme, limits):
            grouped[-1][2].append(rule.pattern)
        else:
            grouped.append((rule.scheme, limits, [rule.pattern]))
    for scheme, limits, patterns in grouped:
        named = ", ".join(f'"{p}"' for p in patterns)
        lines += ["", "[[rule]]", f"match = {named}" if len(patterns) == 1 else f"match = [{named}]"]
        lines += [f"{key} = {value}" for key, value in limits.items()] + [f'scheme = "{scheme}"']
    return "\n".join(lines) + "\n"


def evidence_of(tuned: Tuned, candidate: Candidate, command: str) -> list[str]:
    """What is known about a candidate, a line each."""
    lines = [
        f"{_FOUND_BY.removeprefix('# ')}{command}`: {tuned.verdict}.",
        f"{candidate.bytes / 1e6:.1f} MB of weights, {candidate.share:.3f} of the fp16 bytes; "
        f"{candidate.eight_bit_share:.1%} of the block weights at 8 bits.",
        "In float32 arithmetic on the stored weights:",
        *(_line(name, candidate.found[name]) for name in ("search", "strict", "m8")),
    ]
    for run in candidate.engine:
        lines += [f"On {run['strict']['engine']}:", *(_line(name, run[name]) for name in ("strict", "m8"))]
    if not candidate.engine:
        lines.append("No engine was asked.")
    loud = sorted(tuned.sensitivity.items(), key=lambda item: -item[1])[:5]
    lines.append("Mean KL when one matrix alone is int8: " + ", ".join(f"{name} {kl:.1e}" for name, kl in loud))
    return lines


def _line(name: str, found: Mapping[str, Any]) -> str:
    figures = ", ".join(f"{key} {found[key]:.6g}" for key in ("min_cosine", *_FIGURES))
    return f"  {name}: {found['verdict']}, accepted {found['accepted']}: {figures}"


def table(tuned: Tuned) -> str:
    """All candidates as Markdown."""
    heads = ["recipe", "MB", "of fp16", "at 8 bits"]
    heads += [f"{name} {key.replace('_', ' ')}" for name in ("search", "strict", "m8") for key in _FIGURES]
    rows = [[*heads, "on the reference engine", "m8 outright", "passes"], ["---"] * (len(heads) + 3)]
    for c in tuned.candidates:
        row = [c.recipe.name, f"{c.bytes / 1e6:.1f}", f"{c.share:.3f}", f"{c.eight_bit_share:.1%}"]
        row += [f"{c.found[name][key]:.5g}" for name in ("search", "strict", "m8") for key in _FIGURES]
        row.append(("accepted" if c.passes else "refused") if c.engine else "not asked")
        rows.append([*row, *("yes" if good else "no" for good in (c.outright, c.passes))])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def draw(axes: Any, tuned: Tuned) -> None:
    """Bytes against mean KL on the search's and the held-out texts, every candidate."""
    shares = [c.share for c in tuned.candidates]
    for name, marker in (("search", "o"), ("strict", "s"), ("m8", "^")):
        axes.plot(shares, [c.found[name]["mean_kl"] for c in tuned.candidates], marker, label=name)
    for c in tuned.candidates:
        place = (c.share, c.found["strict"]["mean_kl"])
        label = f"{c.recipe.name}{' passes' if c.passes else ''}"
        axes.annotate(label, place, xytext=(4, 4), textcoords="offset points")
    axes.axhline(MAX_MEAN_KL, linestyle=":", color="gray")
    axes.set(xlabel="bytes, of the fp16 bytes", ylabel="mean KL divergence, nats", yscale="log")
    axes.legend()


def write_report(tuned: Tuned, output: Path, command: str) -> list[Path]:
    """The best recipe at `output`, or the closest as `.closest.toml`; a table and a plot beside it."""
    chosen = tuned.best or closest_of(tuned.candidates)
    recipe, other = output, output.with_suffix(".closest.toml")
    if tuned.best is None:
        recipe, other = other, recipe
    text = recipe_text(chosen.recipe, evidence_of(tuned, chosen, command))
    write_atomically(recipe, text.encode())
    beside = output.with_suffix(".md")
    write_atomically(beside, f"{tuned.verdict}.\n\n{table(tuned)}".encode())
    picture = output.with_suffix(".png")
    png(lambda axes: draw(axes, tuned), picture, (7, 4.5))
    if other.is_file() and other.read_text(encoding="utf-8", errors="replace").startswith(_FOUND_BY):
        other.unlink()  # of an earlier search: it would say the opposite
    return [recipe, beside, picture]
