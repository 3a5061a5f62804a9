"""`anechain chat`: a conversation in the terminal, or one line of standard input a turn."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from anechain.bundle.manifest import TOKENIZER, open_bundle
from anechain.cli.console import err, open_engine, open_grammar, print_json
from anechain.errors import RequestError
from anechain.run.chain import Chain
from anechain.run.conversation import Conversation
from anechain.run.sample import Sampling
from anechain.run.tokenizer import Tokenizer


def chat(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="a folder that `anechain bake` made")],
    system: Annotated[str | None, typer.Option(help="the system prompt, instead of the template's own")] = None,
    engine: Annotated[str, typer.Option(help="cpu, openvino, reference or coreml")] = "cpu",
    fast: Annotated[bool, typer.Option(help="cpu: quicker and coarser")] = False,
    compute_units: Annotated[str, typer.Option(help="coreml: cpu-and-ne (the default), all, cpu-and-gpu, cpu")] = "",
    max_tokens: Annotated[int, typer.Option(help="the longest answer")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token")] = 0.0,
    top_k: Annotated[int, typer.Option(help="draw from the k likeliest, 0 for all")] = 0,
    top_p: Annotated[float, typer.Option(help="draw from the likeliest that hold this probability")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="the same seed draws the same tokens")] = None,
    schema: Annotated[Path | None, typer.Option(help="a JSON schema that every answer keeps to")] = None,
    regex: Annotated[str | None, typer.Option(help="a regex that every answer matches as a whole")] = None,
    grammar: Annotated[Path | None, typer.Option(help="a Lark grammar that every answer keeps to")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object, with all turns")] = False,
) -> None:
    """Talk with BUNDLE. A line is a turn; `/reset` starts anew, `/exit` or the end of the input leaves."""
    sampling = Sampling(temperature, top_k, top_p, seed)
    wanted = open_grammar(schema, regex, grammar)
    opened = open_bundle(bundle)
    tokenizer = Tokenizer.load(opened.path / TOKENIZER)
    if engine == "coreml":  # these two load what bakes as well, which takes longer than to open a bundle
        from anechain.cli.doctor import this_machine
        from anechain.judge.measured import refuse_diverged

        refuse_diverged(opened, this_machine())
    chain = Chain(opened, open_engine(engine, fast=fast, compute_units=compute_units))
    conversation = Conversation(chain, tokenizer, sampling, system, grammar=wanted)
    interactive, turns = sys.stdin.isatty(), list[dict[str, Any]]()
    for line in _lines(interactive):
        if line == "/reset":
            conversation.reset()
            continue
        try:
            turns.append(_turn(conversation, line, max_tokens, quiet=as_json))
        except RequestError as error:
            if not interactive:
                raise
            err.print(f"{error} (/reset starts anew)")
        except KeyboardInterrupt:  # ends the answer, not the conversation
            print()
    if as_json:
        print_json({"bundle": str(bundle), "turns": turns})


def _lines(interactive: bool) -> Iterator[str]:
    """The user's turns, without empty ones."""
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/exit":
            return
        if line:
            yield line


def _turn(conversation: Conversation, text: str, max_tokens: int, quiet: bool) -> dict[str, Any]:
    tokens = []
    for token in conversation.say(text, max_tokens):
        tokens.append(token)
        if not quiet:
            sys.stdout.write(token.text)
            sys.stdout.flush()
    if not quiet:
        sys.stdout.write("\n")
    return {
        "user": text,
        "assistant": "".join(t.text for t in tokens),
        "tokens": len(tokens),
        "finish": tokens[-1].finish,
        "first_token_ms": tokens[0].ms,
    }
