"""`anechain bench`: how fast a bundle is on this machine."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from anechain.bundle.manifest import open_bundle
from anechain.cli.console import megabytes, out, print_json, progress
from anechain.errors import RequestError
from anechain.judge.bench import own, peers, run_bench

ENGINES = ("cpu", "openvino", "reference")
PEERS = Path(__file__).parents[3] / "benchmarks" / "peers"  # in a checkout


def bench(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="a folder that `anechain bake` made")],
    engine: Annotated[str, typer.Option(help="cpu, openvino or reference")] = "cpu",
    fast: Annotated[bool, typer.Option(help="cpu: its fast mode")] = False,
    prompt: Annotated[int, typer.Option(help="tokens of the prompt")] = 128,
    tokens: Annotated[int, typer.Option(help="tokens after it")] = 64,
    runs: Annotated[int, typer.Option(help="fresh processes; medians are shown")] = 3,
    calm: Annotated[bool, typer.Option("--calm", help="repeat a run that other processes disturbed")] = False,
    curves: Annotated[
        bool, typer.Option("--curves", help="also by context, by length of the prompt and by stage")
    ] = False,
    with_peers: Annotated[bool, typer.Option("--peers", help="other engines in turn, on the same weights")] = False,
    peers_python: Annotated[str, typer.Option(help="the Python that has the peers' libraries")] = sys.executable,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Measure BUNDLE on this machine in fresh processes: decode, prefill, first token, load, memory."""
    if engine not in ENGINES:
        raise RequestError(f"--engine {engine} is not known here: use {', '.join(ENGINES)}.")
    opened = open_bundle(bundle)
    if runs < 1 or prompt < 1 or tokens < 1 or prompt + tokens > opened.context:
        raise RequestError(
            f"{prompt} tokens and {tokens} after them, {runs} times, cannot be measured: use at least 1 of each and at "
            f"most the context of {opened.context} together."
        )
    contenders = [own(opened, engine, "fast" if fast else "exact", prompt, tokens)]
    if with_peers:
        contenders.append(own(opened, "openvino", "fast" if fast else "exact", prompt, tokens))
        contenders += peers(PEERS, peers_python, opened.source_ref, prompt, tokens)
    with progress("bench") as report:
        record = run_bench(opened, contenders, runs, curves, report, calm)
    if as_json:
        print_json(record)
    else:
        show(record)


def show(record: dict[str, Any]) -> None:
    table = Table(box=None)
    heads = ("engine", "decode tok/s", "prefill tok/s", "first token ms", "load ms", "start to token ms", "peak MB")
    heads = (*heads, "others' CPU")
    for head in heads:
        table.add_column(head)
    for name, made in record["contenders"].items():
        cells = [made.get("decode_tok_per_s"), made.get("prefill_tok_per_s"), made.get("first_token_ms")]
        cells += [made.get("load_ms"), made.get("start_to_first_token_ms"), (made.get("peak_rss_bytes") or 0) / 1e6]
        shares = [run["cpu_used_by_others"] for run in made["runs"]]
        words = ["" if x is None else f"{x:.1f}" for x in cells]
        table.add_row(made["runs"][0].get("engine", name), *words, f"{min(shares):.0%} to {max(shares):.0%}")
    out.print(table)
    for name, made in record["contenders"].items():
        if "settings" in made["runs"][0]:
            out.print(f"{name}: {made['runs'][0]['settings']}")
    for name, why in record["not_installed"].items():
        out.print(f"{name}: not measured ({why})")
    speed = f"{record['achieved_bytes_per_s'] / 1e9:.1f} GB/s of weights"
    if record["read_bandwidth_bytes_per_s"]:
        share = record["share_of_read_bandwidth"]
        speed += f", {share:.0%} of the {record['read_bandwidth_bytes_per_s'] / 1e9:.1f} GB/s that this machine reads"
    out.print(f"{megabytes(record['weight_bytes_per_token'])} of weights a token: {speed}")
    out.print(f"others used {record['cpu_used_by_others']:.0%} of the processors meanwhile ({record['machine']})")
    for row in record.get("stages", ()):
        kinds = sorted(row.get("kinds_ms", {}).items(), key=lambda kind: -kind[1])
        detail = ", ".join(f"{kind} {ms:.2f}" for kind, ms in kinds if ms >= 0.005)
        out.print(f"{row['stage']:<24}{row['ms']:8.2f} ms a token{f': {detail}' if detail else ''}")
    for title, key, unit in (("decode", "decode_by_context", "context"), ("prefill", "prefill_by_length", "tokens")):
        if key in record:
            out.print(
                f"{title}: " + ", ".join(f"{row[unit]}: {row['tok_per_s']:.0f}" for row in record[key]) + " tok/s"
            )
