"""Ids back to text, one at a time: what a tokenizer's decoder does, as bytes per token, so that it can stream.

A decoder is read as rules: what replaces what inside a token, how the token then becomes bytes, and what is dropped at
the very beginning of the text. The bytes of all tokens are one UTF-8 stream. A character appears when its last byte is
there; bytes that cannot become a character any more appear as one U+FFFD (the longest broken prefix counts as one, as
in the Unicode Standard, section 3.9, "U+FFFD Substitution of Maximal Subparts").

The `tokenizers` library gives the same text, with one exception: in a run of byte tokens (`<0x41>`) of which some are
broken it writes U+FFFD for every byte of the run. Here the run's whole characters stay: they were already shown.
"""

import codecs
import json
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Tokenizer as Library

from anechain.errors import BundleError, RequestError

Form = Literal["text", "byte-level", "byte-fallback"]
KNOWN = "ByteLevel, ByteFallback, Fuse, Metaspace, Replace of a string, Strip at the start"


def _byte_level_table() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte: itself if visible in Latin-1, else 256 and up, in order.

    Radford et al. 2019 (GPT-2).
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF = _byte_level_table()


@dataclass(frozen=True)
class Rules:
    """What a decoder does. `first_drops` is removed from the first token, `strip` (character, most) from the start."""

    separator: str = ""  # between tokens
    first_drops: str = ""
    replacements: tuple[tuple[str, str], ...] = ()
    form: Form = "text"
    strip: tuple[str, int] = ("", 0)

    def token_bytes(self, token: str, first: bool) -> bytes:
        """The bytes that `token` adds to the text; `first` when no token came before it."""
        text = token
        if first and self.first_drops:
            text = text.replace(self.first_drops, "")
        for old, new in self.replacements:
            text = text.replace(old, new)
        if self.form == "byte-level" and all(char in BYTE_OF for char in text):
            return bytes(BYTE_OF[char] for char in text)
        if self.form == "byte-fallback" and (byte := byte_token(text)) is not None:
            return bytes([byte])
        return ("" if first else self.separator).encode() + text.encode()


def byte_token(token: str) -> int | None:
    """The byte that `<0x41>` stands for; None for any other token."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    digits = token[3:5]
    return int(digits, 16) if all(d in "0123456789abcdefABCDEF" for d in digits) else None


def rules_of(library: Library, where: str) -> Rules:
    """The rules of the library's decoder; BundleError, naming all unknown steps, for one that cannot be streamed."""
    if library.decoder is None:
        return Rules(separator=" ")
    pending: list[dict[str, Any]] = [json.loads(library.decoder.__getstate__())]
    steps: list[dict[str, Any]] = []
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = [*step["decoders"], *pending]
        else:
            steps.append(step)
    form: Form = "text"
    drops, strip, fused, unknown = "", ("", 0), False, []
    replacements: list[tuple[str, str]] = []
    for step in steps:
        kind, plain = step["type"], form == "text" and not fused
        if kind == "Replace" and plain and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace" and plain and not replacements:
            drops = "" if step["prepend_scheme"] == "never" else step["replacement"]
            replacements.append((step["replacement"], " "))
        elif kind == "ByteLevel" and plain:
            form, fused = "byte-level", True
        elif kind == "ByteFallback" and plain:
            form = "byte-fallback"
        elif kind == "Fuse" and not fused:
            fused = True
        elif kind == "Strip" and fused and not strip[1] and not step["stop"]:
            strip = (step["content"], step["start"])
        else:
            unknown.append(kind)
    if unknown:
        raise BundleError(
            f"the decoder in {where} has steps that cannot be streamed ({', '.join(unknown)} in "
            f"{' > '.join(s['type'] for s in steps)}): known, in this order, are {KNOWN}."
        )
    return Rules("", drops, tuple(replacements), form, strip)


class Vocabulary:
    """Token strings by id, which of them are special, and the decoder's rules."""

    def __init__(self, library: Library, where: str) -> None:
        self._library = library
        self.rules = rules_of(library, where)
        self.special_ids = frozenset(i for i, t in library.get_added_tokens_decoder().items() if t.special)
        self.n_ids = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)

    def has(self, token_id: int) -> bool:
        """Whether there is such an id; the numbers need not be without gaps."""
        return 0 <= token_id < self.n_ids and self._library.id_to_token(token_id) is not None

    def token(self, token_id: int) -> str:
        """The token's string; RequestError for an id that the tokenizer does not have."""
        token = self._library.id_to_token(token_id) if 0 <= token_id < self.n_ids else None
        if token is None:
            raise RequestError(f"token id {token_id} is not in the tokenizer, whose ids end at {self.n_ids - 1}.")
        return token


class Detokenizer:
    """The text of a growing list of ids. `feed` and `flush` give pieces that joined are the text of all ids at once."""

    def __init__(self, vocabulary: Vocabulary, skip_special: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        self._to_strip = vocabulary.rules.strip[1]

    def feed(self, token_id: int) -> str:
        """The characters that `token_id` completes, possibly none. Raises RequestError for an unknown id."""
        token = self._vocabulary.token(token_id)
        if self._skip_special and token_id in self._vocabulary.special_ids:
            return ""
        data = self._vocabulary.rules.token_bytes(token, self._first)
        self._first = False
        return self._strip(self._utf8.decode(data))

    def flush(self) -> str:
        """What is left when no more ids come: U+FFFD if the last character is incomplete, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != self._vocabulary.rules.strip[0]:
                self._to_strip = 0
            else:
                text, self._to_strip = text[1:], self._to_strip - 1
        return text
