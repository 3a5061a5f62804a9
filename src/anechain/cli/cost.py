"""`anechain cost`: what a bundle is predicted to do on the Neural Engine of a chip, from published figures."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from anechain.bundle.manifest import open_bundle
from anechain.cli.console import out, print_json
from anechain.judge.compatibility import chip_name, parse_machine
from anechain.judge.cost import predict


def cost(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="a folder that `anechain bake` made")],
    chip: Annotated[str, typer.Option(help="the chip it is to run on: M4, 'M1 Max', ...")],
    os: Annotated[str, typer.Option(help="the system: macOS15, iOS18; the figures tell none apart")] = "",
    prompt: Annotated[int | None, typer.Option(help="tokens before the answer  [default: 128]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Predict tok/s, prefill and first token of BUNDLE on a Neural Engine. Nothing is measured."""
    machine = replace(parse_machine(os, ""), chip=chip_name(chip))
    record = {"bundle": str(bundle), **predict(open_bundle(bundle), machine, prompt)}
    if as_json:
        print_json(record)
    else:
        show(record)


def show(record: dict[str, Any]) -> None:
    where = ", ".join(part for part in (record["chip"], record["os"]) if part)
    out.print(f"predicted for the Neural Engine of {where}, from published figures (docs/cost.md)")
    decode, prefill, first = record["decode"], record["prefill"], record["first_token"]
    out.print(f"decode       {_span(decode, 'tok_per_s', 'tok/s')}")
    if prefill is not None:
        out.print(f"prefill      {_span(prefill, 'tok_per_s', 'tok/s')}")
        out.print(f"first token  {_span(first, 'ms', 'ms')} after a prompt of {first['prompt']}")
    spent = ", ".join(f"{name} {ms:.1f}" for name, ms in decode["parts_ms"].items() if ms is not None)
    out.print(f"a token      {decode['ms']:.1f} ms: {spent} (of read and compute the longer counts)")
    for text in record["caveats"]:
        out.print(f"note         {text}")
    for source in record["sources"]:
        out.print(f"source       {source}")


def _span(figure: dict[str, Any], key: str, unit: str) -> str:
    return f"{figure[key]:.0f} {unit} ({figure['low']:.0f} to {figure['high']:.0f})"
