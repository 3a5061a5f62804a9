"""Deltas as the bodies of the OpenAI API: of a stream chunk by chunk, and of a whole answer, which is their sum."""

import json
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from anechain.run.tokenizer import Tokenizer
from anechain.serve.answer import Delta, Entry, Plan

_encoded = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make an encoder for each event


def event(body: Any) -> bytes:
    """One server-sent event. Escaped to ASCII: clients that split lines as Unicode does would cut at U+2028."""
    return f"data: {_encoded(body)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


@dataclass
class Usage:
    prompt: int
    cached: int = 0
    completion: int = 0

    def add(self, delta: Delta) -> None:
        self.completion += delta.tokens
        self.cached += delta.cached

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": min(self.cached, self.prompt)},
        }


@dataclass
class Bodies:
    """The bodies of one request. `chat` or text completion; `id` is made up, `model` is what is served."""

    chat: bool
    model: str
    plan: Plan
    tokenizer: Tokenizer
    id: str = ""
    created: int = 0
    usage: Usage = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.usage = Usage(sum(map(len, self.plan.prompts)))
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}

    def chunks(self, delta: Delta, with_usage: bool) -> Iterator[dict[str, Any]]:
        """The chunks of a stream for one delta; a choice's first chunk names its role, its last one the reason."""
        begins = delta.choice not in self._begun
        self._begun.add(delta.choice)
        if not self.chat:
            if delta.text or delta.entries or delta.finish:
                choice: dict[str, Any] = {"index": delta.choice, "text": delta.text, "finish_reason": delta.finish}
                choice["logprobs"] = self._legacy_logprobs(delta.choice, delta.entries) if delta.entries else None
                yield self._chunk("text_completion", choice, with_usage)
            return
        parts: list[dict[str, Any]] = [{"role": "assistant", "content": ""}] if begins else []
        if delta.thought:
            parts.append({"reasoning_content": delta.thought})
        if delta.text or delta.entries:
            parts.append({"content": delta.text})
        if delta.calls:
            parts.append({"tool_calls": self._tool_calls(delta, indexed=True)})
        for part in parts:
            logprobs = self._logprobs(delta.entries) if delta.entries and "content" in part and len(part) == 1 else None
            choice = {"index": delta.choice, "delta": part, "logprobs": logprobs, "finish_reason": None}
            yield self._chunk("chat.completion.chunk", choice, with_usage)
        if delta.finish:
            choice = {"index": delta.choice, "delta": {}, "logprobs": None, "finish_reason": delta.finish}
            yield self._chunk("chat.completion.chunk", choice, with_usage)

    def usage_chunk(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._frame(kind) | {"choices": [], "usage": self.usage.body()}

    def whole(self, deltas: Iterable[Delta]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        by_choice: dict[int, list[Delta]] = {}
        for delta in deltas:
            by_choice.setdefault(delta.choice, []).append(delta)
        choices = [self._choice(index, parts) for index, parts in sorted(by_choice.items())]
        kind = "chat.completion" if self.chat else "text_completion"
        return self._frame(kind) | {"choices": choices, "usage": self.usage.body()}

    def _choice(self, index: int, parts: list[Delta]) -> dict[str, Any]:
        text = "".join(part.text for part in parts)
        entries = tuple(entry for part in parts for entry in part.entries)
        choice: dict[str, Any] = {"index": index, "finish_reason": parts[-1].finish, "logprobs": None}
        if not self.chat:
            if self.plan.rank is not None:
                choice["logprobs"] = self._legacy_logprobs(index, entries)
            return choice | {"text": text}
        if self.plan.rank is not None:
            choice["logprobs"] = self._logprobs(entries)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if thought := "".join(part.thought for part in parts):
            message["reasoning_content"] = thought
        if parts[-1].calls:
            message |= {"tool_calls": self._tool_calls(parts[-1], indexed=False), "content": text or None}
        return choice | {"message": message}

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": None
        }  # fmt: skip

    def _chunk(self, kind: str, choice: dict[str, Any], with_usage: bool) -> dict[str, Any]:
        return self._frame(kind) | {"choices": [choice]} | ({"usage": None} if with_usage else {})

    def _tool_calls(self, delta: Delta, indexed: bool) -> list[dict[str, Any]]:
        return [
            ({"index": i} if indexed else {})
            | {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for i, (name, arguments) in enumerate(delta.calls)
        ]

    def _bytes(self, token_id: int) -> bytes:
        vocabulary = self.tokenizer.vocabulary
        text = vocabulary.token(token_id)
        return text.encode() if token_id in vocabulary.special_ids else vocabulary.rules.token_bytes(text, first=False)

    def _logprobs(self, entries: Iterable[Entry]) -> dict[str, Any]:
        def one(token_id: int, logprob: float) -> dict[str, Any]:
            data = self._bytes(token_id)
            return {"token": data.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}

        content = []
        for entry in entries:
            if entry.ranking:
                top = [one(i, value) for i, value in entry.ranking.top]
                content.append(one(entry.id, entry.ranking.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _legacy_logprobs(self, choice: int, entries: Iterable[Entry]) -> dict[str, Any]:
        """Tokens whose bytes are no text are named `bytes:\\x..`, so that no two of them have the same name."""

        def name(token_id: int) -> str:
            data = self._bytes(token_id)
            try:
                return data.decode()
            except UnicodeDecodeError:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

        tokens, values, tops, offsets = [], [], [], []
        offset = self._offsets.get(choice, 0)
        for entry in entries:
            tokens.append(name(entry.id))
            values.append(None if entry.ranking is None else max(entry.ranking.logprob, -9999.0))
            # The token that was taken is always among them, so there may be one more than was asked for.
            best = None if entry.ranking is None else [*entry.ranking.top, (entry.id, entry.ranking.logprob)]
            tops.append(None if best is None else {name(i): max(value, -9999.0) for i, value in best})
            offsets.append(offset)
            offset += len(self._bytes(entry.id).decode(errors="ignore"))
        self._offsets[choice] = offset
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
