"""`anechain run`: a prompt, and what follows it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from anechain.bundle.manifest import TOKENIZER, open_bundle
from anechain.cli.console import err, open_engine, open_grammar, print_json
from anechain.run.chain import Chain
from anechain.run.generate import generate
from anechain.run.grammar import Grammars
from anechain.run.sample import Sampling
from anechain.run.tokenizer import Tokenizer


def run(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="a folder that `anechain bake` made")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="the text to go on from")],
    engine: Annotated[str, typer.Option(help="cpu, openvino, reference or coreml")] = "cpu",
    fast: Annotated[bool, typer.Option(help="cpu: quicker and coarser")] = False,
    compute_units: Annotated[str, typer.Option(help="coreml: cpu-and-ne (the default), all, cpu-and-gpu, cpu")] = "",
    max_tokens: Annotated[int, typer.Option(help="the longest answer")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token")] = 0.0,
    top_k: Annotated[int, typer.Option(help="draw from the k likeliest, 0 for all")] = 0,
    top_p: Annotated[float, typer.Option(help="draw from the likeliest that hold this probability")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="the same seed draws the same tokens")] = None,
    schema: Annotated[Path | None, typer.Option(help="a JSON schema that the answer keeps to")] = None,
    regex: Annotated[str | None, typer.Option(help="a regex that the whole answer matches")] = None,
    grammar: Annotated[Path | None, typer.Option(help="a Lark grammar that the answer keeps to")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Generate text after PROMPT, from the packages of BUNDLE."""
    sampling = Sampling(temperature, top_k, top_p, seed)
    wanted = open_grammar(schema, regex, grammar)
    opened = open_bundle(bundle)
    tokenizer = Tokenizer.load(opened.path / TOKENIZER)
    constraint = Grammars(tokenizer).start(wanted) if wanted else None
    if engine == "coreml":  # these two load what bakes as well, which takes longer than to open a bundle
        from anechain.cli.doctor import this_machine
        from anechain.judge.measured import refuse_diverged

        refuse_diverged(opened, this_machine())
    chain = Chain(opened, open_engine(engine, fast=fast, compute_units=compute_units))
    tokens, ids = [], tokenizer.encode(prompt)
    for token in generate(chain, chain.start(), tokenizer, ids, sampling, max_tokens, constraint=constraint):
        tokens.append(token)
        if not as_json:
            sys.stdout.write(token.text)
            sys.stdout.flush()
    rest_ms = sum(t.ms for t in tokens[1:])
    speed = (len(tokens) - 1) / rest_ms * 1e3 if len(tokens) > 1 else None
    if as_json:
        print_json(
            {
                "text": "".join(t.text for t in tokens),
                "ids": [t.id for t in tokens],
                "finish": tokens[-1].finish,
                "engine": chain.engine.name,
                "handoff": chain.engine.handoff,
                "first_token_ms": tokens[0].ms,
                "decode_tok_per_s": speed,
            }
        )
        return
    sys.stdout.write("\n")
    pace = f", then {speed:.1f} tok/s" if speed else ""
    err.print(f"{chain.engine.name}: {len(tokens)} tokens, the first after {tokens[0].ms:.0f} ms{pace}")
    if chain.engine.name == "coreml":
        err.print(f"hand-off: {chain.engine.handoff}")
