"""What `anechain bench --peers` asks of a script: flags, one JSON object, exit code 3 where a library is not there."""

import argparse
import hashlib
import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    if not (given.source / "config.json").is_file():
        not_there(f"{given.source} is no Hugging Face directory on this machine")
    return given


def not_there(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    sys.exit(3)


def converted(source: Path, suffix: str) -> Path:
    """Where a converted model is kept between runs."""
    folder = Path(tempfile.gettempdir()) / "anechain-peers"
    folder.mkdir(exist_ok=True)
    return folder / (hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:16] + suffix)


def report(settings: str, load_s: float, prefill_s: float, decode_s: float, prompt: int, tokens: int) -> None:
    record: dict[str, Any] = {
        "settings": settings,
        "load_ms": load_s * 1e3,
        "prefill_tok_per_s": prompt / prefill_s,
        "first_token_ms": prefill_s * 1e3,
        "decode_tok_per_s": tokens / decode_s,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
    }
    print(json.dumps(record))
