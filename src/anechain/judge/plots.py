"""The card's plots, as SVG that takes its colours from the page: the same picture is right in light and in dark.

matplotlib writes fixed colours, so each role has a colour that nothing else uses, and afterwards that becomes a CSS
variable. The text is drawn as outlines: every browser shows the same widths.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROLES = {
    "ink": "#010101", "muted": "#020202", "grid": "#030303", "first": "#040404", "second": "#050505",
    "third": "#060606", "fourth": "#070707", "bad": "#080808",
}  # fmt: skip
SERIES = ("first", "second", "third", "fourth")
_STYLE: dict[str, Any] = {
    "svg.fonttype": "path", "svg.hashsalt": "anechain", "font.size": 9.0, "font.family": "DejaVu Sans",
    "text.color": ROLES["ink"], "axes.labelcolor": ROLES["ink"], "axes.edgecolor": ROLES["muted"],
    "xtick.color": ROLES["muted"], "ytick.color": ROLES["muted"], "xtick.labelcolor": ROLES["ink"],
    "ytick.labelcolor": ROLES["ink"], "grid.color": ROLES["grid"], "axes.grid": True, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "figure.constrained_layout.use": True,
}  # fmt: skip
SIZE_IN = (7.2, 2.9)


def _svg(draw: Callable[["Axes"], None], title: str, size_in: tuple[float, float] = SIZE_IN) -> str:
    """One plot as an `<svg>` element with a title for readers that cannot see it."""
    import matplotlib  # here: it takes half a second, and the command line would pay it for every verb
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size_in)
        axes = figure.add_subplot()
        draw(axes)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    for role, colour in ROLES.items():
        text = text.replace(colour, f"var(--{role})")
    # Several plots share a page, and an id must be one of its kind there.
    mark = re.sub(r"\W+", "-", title.lower())
    text = re.sub(r'(?<=\bid=")([^"]+)', rf"{mark}-\1", text)
    text = re.sub(r'(?<=href="#)([^"]+)', rf"{mark}-\1", text)
    text = re.sub(r"(?<=url\(#)([^)]+)", rf"{mark}-\1", text)
    opening = re.match(r"<svg[^>]*>", text)
    assert opening is not None
    attributes = re.sub(r'\s(width|height)="[^"]*"', "", opening[0][:-1])
    return f'{attributes} role="img" aria-label="{title}"><title>{title}</title>' + text[opening.end() :]


def cosine_by_step(runs: Sequence[Mapping[str, Any]], limit: float, profile: str) -> str:
    """1 - cosine of the logits, for each position in the order judged; `runs` are {"name", "cosine"}."""
    kind = "cosine" if profile == "m8" else "centred cosine"

    def draw(axes: "Axes") -> None:
        for role, run in zip(SERIES, runs, strict=False):
            values = [max(1 - c, 1e-8) for c in run["cosine"]]
            _line(axes, values, role, run["name"])
        axes.axhline(1 - limit, color=ROLES["bad"], lw=1.0, ls="--", label=f"limit: {kind} {limit}")
        axes.set_xlabel("step (judged position, in order)")
        axes.set_ylabel(f"1 - {kind} of the logits\n(a ratio, log scale)")
        _legend(axes)

    return _svg(draw, f"Logit cosine by step, {profile}")


def kl_by_step(runs: Sequence[Mapping[str, Any]], limit: float | None, profile: str) -> str:
    """KL divergence in nats; `runs` are {"name", "kl"}, `limit` that of the mean where the profile has one."""

    def draw(axes: "Axes") -> None:
        for role, run in zip(SERIES, runs, strict=False):
            values = [max(k, 1e-9) for k in run["kl"]]
            _line(axes, values, role, run["name"])
        if limit is not None:
            axes.axhline(limit, color=ROLES["bad"], lw=1.0, ls="--", label=f"limit of the mean: {limit:g} nats")
        axes.set_xlabel("step (judged position, in order)")
        axes.set_ylabel("KL divergence\n(nats, log scale)")
        _legend(axes)

    return _svg(draw, f"KL divergence by step, {profile}")


def latency(bundles: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Every run of both bundles, first token and pace; `bundles` are {"name", "first_token_ms", "tok_per_s"}."""

    def points(key: str, unit: str) -> Callable[["Axes"], None]:
        def draw(axes: "Axes") -> None:
            for place, (role, bundle) in enumerate(zip(SERIES, bundles, strict=False)):
                values = sorted(bundle[key])
                axes.barh(place, values[len(values) // 2], height=0.55, color=ROLES[role], alpha=0.35)
                axes.plot(values, [place] * len(values), "o", color=ROLES[role], ms=4)
            axes.set_yticks(range(len(bundles)), [b["name"] for b in bundles])
            axes.invert_yaxis()
            axes.set_xlabel(unit)
            axes.grid(axis="y", visible=False)
            axes.set_xlim(left=0)

        return draw

    size = (7.2, 1.7)
    return (
        _svg(
            points("first_token_ms", "first token, whole prompt included (ms; bar: median, dots: runs)"), "First", size
        ),
        _svg(points("tok_per_s", "decode (tokens per second; bar: median, dots: runs)"), "Decode", size),
    )


def bytes_by_layer(parts: Sequence[Mapping[str, Any]]) -> str:
    """Weight bytes of each layer, and of embedding and head; `parts` are {"name", "bytes"}."""

    def draw(axes: "Axes") -> None:
        layers = sum(part["name"].isdigit() for part in parts)
        # What is no layer stands apart, far enough for its name.
        apart = max(1.5, layers / 6)
        places = [i if i < layers else layers + apart * (i - layers + 0.5) for i in range(len(parts))]
        axes.bar(places, [p["bytes"] / 1e6 for p in parts], color=ROLES["first"], width=0.75)
        step = max(1, -(-layers // 15))  # a label for every bar would overlap from some twenty on
        shown = [i for i in range(len(parts)) if i >= layers or i % step == 0]
        axes.set_xticks([places[i] for i in shown], [parts[i]["name"] for i in shown])
        axes.set_xlabel("layer")
        axes.set_ylabel("weights (MB)")
        axes.grid(axis="x", visible=False)

    return _svg(draw, "Bytes by layer")


def rates(groups: Sequence[Mapping[str, Any]], names: tuple[str, str]) -> str:
    """Pass rates with their intervals; `groups` are {"name", "rate", "interval", "other", "other_interval"}."""

    def draw(axes: "Axes") -> None:
        for role, offset, rate, interval, name in (
            ("first", -0.17, "rate", "interval", names[0]), ("second", 0.17, "other", "other_interval", names[1]),
        ):  # fmt: skip
            places = [i + offset for i in range(len(groups))]
            values = [100 * g[rate] for g in groups]
            low = [100 * (g[rate] - g[interval][0]) for g in groups]
            high = [100 * (g[interval][1] - g[rate]) for g in groups]
            axes.errorbar(values, places, xerr=[low, high], fmt="o", color=ROLES[role], ms=4, lw=1.2, label=name)
        axes.set_yticks(range(len(groups)), [g["name"] for g in groups])
        axes.invert_yaxis()
        axes.set_xlim(-2, 102)
        axes.set_xlabel("pass rate (%), with the 95% interval (Wilson)")
        axes.grid(axis="y", visible=False)
        _legend(axes)

    return _svg(draw, "Pass rates", (7.2, 0.9 + 0.36 * len(groups)))


def _line(axes: "Axes", values: Sequence[float], role: str, name: str) -> None:
    axes.semilogy(range(1, len(values) + 1), values, ".-", color=ROLES[role], lw=0.8, ms=3, label=name)


def _legend(axes: "Axes") -> None:
    """Above the axes, where it covers nothing."""
    count = len(axes.get_legend_handles_labels()[0])
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=min(count, 3), fontsize=8, borderaxespad=0.3)


def png(draw: Callable[["Axes"], None], path: Path, size_in: tuple[float, float]) -> None:
    """One plot as a PNG file on white, for places without a page."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_in, layout="constrained")
    draw(figure.add_subplot())
    FigureCanvasAgg(figure).print_png(str(path))
