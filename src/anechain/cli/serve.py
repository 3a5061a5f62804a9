"""`anechain serve`: an OpenAI-compatible HTTP server over one bundle."""

import logging
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from anechain.bundle.manifest import TOKENIZER, Bundle, open_bundle
from anechain.cli.console import err, open_engine, print_json
from anechain.errors import RequestError
from anechain.judge.prepare import baseline_file, load_baseline
from anechain.run.chain import Chain
from anechain.run.tokenizer import Tokenizer
from anechain.serve.app import create_app
from anechain.serve.selfcheck import Expected, self_check
from anechain.serve.server import Server
from anechain.serve.service import Service, Settings


def serve(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="a folder that `anechain bake` made")],
    host: Annotated[str, typer.Option(help="the address to listen at; 0.0.0.0 for all")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="the port, 0 for any that is free")] = 8080,
    engine: Annotated[str, typer.Option(help="cpu, reference or coreml")] = "cpu",
    fast: Annotated[bool, typer.Option(help="cpu: bf16 arithmetic where the machine has it")] = False,
    name: Annotated[str, typer.Option(help="what the model is called, by default as the folder")] = "",
    api_key: Annotated[
        str, typer.Option(help="what clients have to send; better in the variable", envvar="ANECHAIN_API_KEY")
    ] = "",
    cors: Annotated[list[str] | None, typer.Option(help="a web page's origin that may ask, * for all")] = None,
    parallel: Annotated[int, typer.Option(min=1, help="requests that take turns, token by token")] = 4,
    queue: Annotated[int, typer.Option(min=0, help="requests that may wait; more get 429")] = 32,
    time_out: Annotated[float, typer.Option(min=0.1, help="seconds that a request may take")] = 600.0,
    body_limit: Annotated[int, typer.Option(min=1, help="KiB that a request's body may have")] = 2048,
    prefix_cache: Annotated[int, typer.Option(min=0, help="MiB for the states of earlier prompts, 0 for none")] = 256,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="write prompts into the log")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object when it is ready")] = False,
) -> None:
    """Serve BUNDLE to OpenAI clients, and a page to talk with it at /. Ends on SIGTERM or Ctrl-C within 10 seconds."""
    if not api_key.isascii():
        raise RequestError("--api-key holds characters that no HTTP header can carry: use ASCII alone.")
    opened = open_bundle(bundle, verify_hashes=True)
    tokenizer = Tokenizer.load(opened.path / TOKENIZER)
    chain = Chain(opened, open_engine(engine, fast=fast))
    cosine = self_check(chain, _expected(opened))
    listening = _listen(host, port)
    settings = Settings(
        name or opened.path.resolve().name, api_key, tuple(cors or ()), body_limit << 10, time_out, parallel, queue,
        prefix_cache << 20, log_prompts,
    )  # fmt: skip
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("anechain.serve").setLevel(logging.INFO)
    service = Service(chain, tokenizer, settings)
    url = f"http://{host}:{listening.getsockname()[1]}"
    if as_json:
        print_json({"url": url, "model": settings.name, "engine": chain.engine.name, "self_check_cosine": cosine})
        sys.stdout.flush()
    else:
        said = "not compared, no logits are recorded" if cosine is None else f"cosine {cosine:.4f} to the original"
        err.print(f"{settings.name} on {chain.engine.name} (self-check: {said}): {url}, API at {url}/v1")
    Server(create_app(service), service, host, port).run([listening])


def _expected(bundle: Bundle) -> Expected | None:
    """The original's answer to the first prompt of the published gate; None where the context is too small for it."""
    if baseline_file("m8") not in bundle.files:
        return None
    baseline = load_baseline(bundle, "m8")
    baseline.check(bundle.fingerprint)
    first = baseline.answers[0]
    return Expected(tuple(first.ids.tolist()), first.logits)


def _listen(host: str, port: int) -> socket.socket:
    """Bound before anything says that it is ready. Raises RequestError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except (OSError, OverflowError) as error:
        listening.close()
        raise RequestError(f"cannot listen at {host} port {port} ({error}): choose another --host or --port.") from None
    return listening
