"""Counts since the start, as Prometheus reads them (text exposition format, version 0.0.4)."""

from collections import Counter
from dataclasses import dataclass, field

PREFIX = "anechain_"


@dataclass
class Metrics:
    """Written to by the event loop alone."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # route, outcome
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float = 0.0
    first_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0

    def text(self, gauges: dict[str, float]) -> str:
        """All of it, with `gauges` (name -> value) as they are now."""
        lines = [
            f"# HELP {PREFIX}requests_total Requests by route and outcome.",
            f"# TYPE {PREFIX}requests_total counter",
        ]
        for (route, outcome), count in sorted(self.requests.items()):
            lines.append(f'{PREFIX}requests_total{{route="{route}",outcome="{outcome}"}} {count}')
        counters: dict[str, tuple[str, float]] = {
            "prompt_tokens_total": ("Prompt tokens of requests that were worked on.", self.prompt_tokens),
            "cached_tokens_total": ("Of these, tokens whose state was known.", self.cached_tokens),
            "completion_tokens_total": ("Generated tokens.", self.completion_tokens),
            "first_token_seconds_sum": ("Time from arrival to the first token, added up.", self.first_token_s),
            "first_token_seconds_count": ("First tokens.", self.first_tokens),
            "decode_seconds_sum": ("Time from the first to the last token, added up.", self.decode_s),
            "decode_tokens_total": ("Tokens after the first.", self.decode_tokens),
        }
        for name, (about, value) in counters.items():
            lines += [f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} counter", f"{PREFIX}{name} {value:g}"]
        for name, value in gauges.items():
            lines += [f"# TYPE {PREFIX}{name} gauge", f"{PREFIX}{name} {value:g}"]
        return "\n".join(lines) + "\n"
