"""Many clients against `anechain serve`: no wrong word, no leak, no dead worker, and what serving costs.

    python benchmarks/serve_load.py BUNDLE [--clients 16] [--requests 200] [--tokens 24] [--minutes 60]

Starts the server itself. Every prompt is first asked alone; then `clients` threads send `requests` each, of mixed
length, streaming and not, chat and completion, some with a schema, some of whom hang up half way. Every whole answer
must equal the one that was given alone. The resident memory of the server is read on the way; warm-up is the first
fifth. The cost of serving is the pace of one client's stream beside the chain's own, in turns, medians of both.
"""

import argparse
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from anechain.bundle.manifest import TOKENIZER, open_bundle
from anechain.cli.console import open_engine
from anechain.run.chain import Chain
from anechain.run.generate import generate
from anechain.run.sample import Sampling
from anechain.run.tokenizer import Tokenizer

OK = {"ok": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": OK, "required": ["ok"], "additionalProperties": False}
BIAS = {"0": -100, "2": -100}  # the demo model's ends, so that every stream is as long as the next


def jobs(tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """32 requests: route and body, all with an answer that is certain."""
    rng, made = random.Random(1), list[tuple[str, dict[str, Any]]]()
    words = ["river", "stone", "cloud", "lamp", "door", "seven", "quiet", "green", "north", "paper", "wheel", "salt"]
    for number in range(32):
        text = f"{number}. " + " ".join(rng.choices(words, k=rng.choice([2, 8, 30, 90])))
        limit: dict[str, Any] = {"max_tokens": rng.choice([4, tokens // 2, tokens]), "temperature": 0}
        if number % 3 == 0:
            made.append(("/v1/completions", {"prompt": text, **limit}))
        elif number % 3 == 1:
            made.append(("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **limit}))
        else:
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
            body = {"messages": [{"role": "user", "content": text}], **limit, "temperature": 1, "seed": number}
            made.append(("/v1/chat/completions", body | ({"response_format": form} if number % 2 else {})))
    return made


def ask(port: int, route: str, body: dict[str, Any], stream: bool, leave_after: int | None = None) -> str | None:
    """What was said; None for a client that left after so many events. 429 is waited out, anything else is an error."""
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        connection.request("POST", route, json.dumps({**body, "stream": stream}), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 429:
            break
        answer.read()
        connection.close()
        time.sleep(0.2)
    assert answer.status == 200, (answer.status, answer.read())
    if not stream:
        choice = json.loads(answer.read())["choices"][0]
        connection.close()
        return choice["text"] if "text" in choice else choice["message"]["content"]
    said, events = [], 0
    for line in answer:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            choice = event["choices"][0]
            said.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
            events += 1
            if leave_after is not None and events > leave_after:
                connection.close()
                return None
    connection.close()
    return "".join(said)


def load(port: int, server: psutil.Process, clients: int, requests: int, tokens: int, minutes: float) -> dict[str, Any]:
    made = jobs(tokens)
    alone = [ask(port, route, body, stream=False) for route, body in made]
    wrong: list[Any] = []
    left, done, lock = [0], [0], threading.Lock()
    memory: list[tuple[int, int]] = []

    def client(number: int) -> None:
        rng = random.Random(number)
        for _ in range(requests):
            if time.monotonic() > started + 60 * minutes:
                return
            which = rng.randrange(len(made))
            stream, leave = rng.random() < 0.5, rng.randrange(1, 6) if rng.random() < 0.15 else None
            said = ask(port, *made[which], stream, leave if stream else None)
            with lock:
                done[0] += 1
                left[0] += said is None
                if said is not None and said != alone[which]:
                    wrong.append((which, alone[which], said))
                if done[0] % max(1, clients * requests // 40) == 0:
                    memory.append((done[0], server.memory_info().rss))
                    said_so_far = f"{done[0]} of {clients * requests}, {memory[-1][1] / 1e6:.0f} MB, {len(wrong)} wrong"
                    print(said_so_far, file=sys.stderr, flush=True)

    started = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    wall_s = time.monotonic() - started
    warm = [rss for count, rss in memory if count >= done[0] / 5]
    return {
        "clients": clients, "requests": done[0], "left": left[0], "wrong": wrong, "wall_s": wall_s,
        "requests_per_s": done[0] / wall_s, "rss_after_warm_up": warm[0], "rss_at_the_end": warm[-1],
        "rss_growth": warm[-1] / warm[0] - 1, "rss_peak": max(warm),
    }  # fmt: skip


def served_pace(port: int, prompt: str, tokens: int) -> float:
    """Tokens a second of one client's stream, from its first token on.

    The client only notes when bytes come, and reads them when all are there: it has no processor of its own here, and
    what it takes would be taken from the chain.
    """
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "logit_bias": BIAS}
    sent = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    pieces = []
    with socket.create_connection(("127.0.0.1", port), timeout=600) as connection:
        connection.sendall(f"{head}content-length: {len(sent)}\r\n\r\n".encode() + sent)
        while data := connection.recv(1 << 16):
            pieces.append((time.perf_counter(), data))
    at = [when for when, data in pieces for _ in range(data.count(b"data: {"))]
    assert len(at) == tokens, (len(at), pieces)
    return (len(at) - 1) / (at[-1] - at[0])


def own_pace(chain: Chain, tokenizer: Tokenizer, prompt: str, tokens: int) -> float:
    """The same without a server."""
    sampling = Sampling(bias={int(key): float(value) for key, value in BIAS.items()})
    at = [
        time.perf_counter()
        for _ in generate(chain, chain.start(), tokenizer, tokenizer.encode(prompt), sampling, tokens)
    ]
    return (len(at) - 1) / (at[-1] - at[0])


class Others:
    """What share of the processors other processes take, between two looks."""

    def __init__(self, server: psutil.Process) -> None:
        self._ours, self._before = [server, psutil.Process()], (0.0, 0.0)
        self.look()

    def look(self) -> float:
        spent = [process.cpu_times() for process in self._ours]
        machine = psutil.cpu_times()
        at = time.monotonic() * (psutil.cpu_count() or 1)
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        now = at, at - idle - sum(times.user + times.system for times in spent)
        wall, taken = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        return taken / wall


def cost(port: int, server: psutil.Process, bundle: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Pairs of a served stream and the chain's own, each first in turn; the first pair warms up.

    Where other processes took more than --others of the machine during a pair, it is told and not counted.
    """
    chain, tokenizer = Chain(open_bundle(bundle), open_engine(args.engine)), Tokenizer.load(bundle / TOKENIZER)
    prompt = "The history of the lighthouse begins"
    pairs: list[tuple[float, float]] = []
    disturbed = []
    others = Others(server)
    for number in range(4 * args.rounds + 1):
        took = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            took[which] = (
                own_pace(chain, tokenizer, prompt, args.cost_tokens)
                if which
                else served_pace(port, prompt, args.cost_tokens)
            )
        share = others.look()
        said = f"{took[0]:.1f} beside {took[1]:.1f} tok/s, others took {share:.1%} of the machine"
        print(said, file=sys.stderr, flush=True)
        if share > args.others:
            disturbed.append(share)
        elif number:
            pairs.append((took[0], took[1]))
        if len(pairs) == args.rounds:
            break
    ratios = [served / own for served, own in pairs]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "served_tok_per_s": statistics.median(served for served, _ in pairs),
        "own_tok_per_s": statistics.median(own for _, own in pairs),
        "cost": 1 - statistics.median(ratios), "cost_middle_half": [1 - high, 1 - low],
        "cost_least": 1 - max(ratios), "cost_most": 1 - min(ratios), "pairs": len(pairs),
        "pairs_disturbed": len(disturbed), "processors": len(os.sched_getaffinity(0)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=200, help="of each client; 0 measures the cost alone")
    parser.add_argument("--tokens", type=int, default=24, help="the longest answer under load")
    parser.add_argument("--minutes", type=float, default=60, help="no request begins later")
    parser.add_argument("--rounds", type=int, default=21, help="pairs of the cost; 0 for none")
    parser.add_argument("--cost-tokens", type=int, default=192, help="of each stream whose pace is taken")
    parser.add_argument("--others", type=float, default=0.03, help="a pair counts if other processes took less")
    parser.add_argument("--engine", default="cpu")
    args = parser.parse_args()
    command = [sys.executable, "-m", "anechain", "serve", str(args.bundle), "--port", "0", "--json"]
    command += ["--engine", args.engine]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        lines = []
        while not lines or lines[-1].rstrip() != "}":
            lines.append(process.stdout.readline())
        ready = json.loads("".join(lines))
        port = int(ready["url"].rpartition(":")[2])
        record: dict[str, Any] = {"server": ready}
        if args.requests:
            record |= load(port, psutil.Process(process.pid), args.clients, args.requests, args.tokens, args.minutes)
        if args.rounds:
            record |= cost(port, psutil.Process(process.pid), args.bundle, args)
        alive = process.poll() is None
        process.send_signal(signal.SIGTERM)
        stopped = time.monotonic()
        process.wait(10)
        record |= {"alive_at_the_end": alive, "seconds_to_stop": time.monotonic() - stopped}
    finally:
        process.kill()
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
