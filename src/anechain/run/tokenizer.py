"""Text to ids and back, with the tokenizer that lies in the bundle. All ids come from its files, none from the code."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from anechain.errors import BundleError, RequestError
from anechain.run.detokenizer import Detokenizer, Vocabulary

# The named special tokens that chat templates may refer to, as in tokenizer_config.json.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Tokenizer:
    """A bundle's tokenizer.

    `n_ids` is one more than the highest id, added tokens included: logits from there on belong to no token. `eos_ids`
    end a generation. `special_tokens` maps `bos_token` and its kin to their text, `chat_templates` a name ("default")
    to a Jinja template.
    """

    library: Library
    vocabulary: Vocabulary
    eos_ids: frozenset[int]
    bos_id: int | None
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]

    @staticmethod
    def load(directory: Path) -> "Tokenizer":
        """Reads tokenizer.json and, where they are, tokenizer_config.json, generation_config.json, config.json and
        chat_template.jinja. Raises BundleError."""
        path = directory / "tokenizer.json"
        try:
            library = Library.from_str(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"{path} cannot be read ({error}): bake again from a checkpoint that has it.") from None
        except Exception as error:  # the library raises nothing narrower
            raise BundleError(f"{path} is not a tokenizer ({error}): bake again from an intact checkpoint.") from None
        # A training-time length limit in the file would silently shorten prompts.
        library.no_truncation()
        library.no_padding()
        config = _json(directory / "tokenizer_config.json")
        special = _special_tokens(config, directory)
        vocabulary = Vocabulary(library, str(path))
        return Tokenizer(
            library,
            vocabulary,
            _eos_ids(library, vocabulary, special, directory),
            library.token_to_id(special["bos_token"]) if "bos_token" in special else None,
            special,
            _chat_templates(config, directory),
        )

    @property
    def n_ids(self) -> int:
        return self.vocabulary.n_ids

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """The ids of `text`; with `add_special`, what the tokenizer's own post-processor adds (often a first token).

        A special token that is spelled out in `text` becomes that token. Raises RequestError for broken Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            where = error.start + 1
            raise RequestError(f"character {where} of the text is not valid Unicode: correct its encoding.") from None
        return list(self.library.encode(text, add_special_tokens=add_special).ids)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`, spaces untouched. Raises RequestError for an unknown id."""
        stream = self.stream(skip_special=skip_special)
        return "".join([*(stream.feed(i) for i in ids), stream.flush()])

    def stream(self, context: Iterable[int] = (), skip_special: bool = True) -> Detokenizer:
        """A Detokenizer whose text continues that of `context`: a space that only a text's start loses is kept."""
        stream = Detokenizer(self.vocabulary, skip_special)
        for token_id in context:
            stream.feed(token_id)
        return stream


def _json(path: Path) -> dict[str, Any]:
    """The object in `path`, {} if there is no such file; raises BundleError."""
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read ({error}): bake again from an intact checkpoint.") from None
    if not isinstance(data, dict):
        raise BundleError(f"{path} is not a JSON object: bake again from an intact checkpoint.")
    return data


def _special_tokens(config: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """Name -> text; a token is written as its text, as an object with the text as `content`, or as null."""
    entries = {name: config[name] for name in NAMED if config.get(name) is not None}
    texts: dict[str, Any] = {name: e.get("content") if isinstance(e, dict) else e for name, e in entries.items()}
    faults = [f"{name} = {entries[name]!r}" for name, text in texts.items() if not isinstance(text, str)]
    if faults:
        raise BundleError(
            f"{directory / 'tokenizer_config.json'}: {'; '.join(faults)} names no token: write the token's text."
        )
    return texts


def _eos_ids(library: Library, vocabulary: Vocabulary, special: Mapping[str, str], directory: Path) -> frozenset[int]:
    """All ids that any file calls the end: models whose files disagree stop at each of them."""
    ids, faults = set(), []
    for name in ("generation_config.json", "config.json"):
        entry = _json(directory / name).get("eos_token_id")
        for value in entry if isinstance(entry, list) else [] if entry is None else [entry]:
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocabulary.n_ids:
                ids.add(value)
            else:
                faults.append(f"{name} says eos_token_id {value!r}")
    if "eos_token" in special:
        token_id = library.token_to_id(special["eos_token"])
        if token_id is None:
            faults.append(f"tokenizer_config.json says eos_token {special['eos_token']!r}")
        else:
            ids.add(token_id)
    if faults:
        raise BundleError(
            f"{directory}: {'; '.join(faults)}, which tokenizer.json does not have: correct the checkpoint."
        )
    return frozenset(ids)


def _chat_templates(config: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """chat_template.jinja, else what tokenizer_config.json holds: one template, or a list of named ones."""
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return {"default": path.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"{path} cannot be read ({error}): bake again from an intact checkpoint.") from None
    entry = config.get("chat_template")
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list) and all(
        isinstance(t, dict) and isinstance(t.get("name"), str) and isinstance(t.get("template"), str) for t in entry
    ):
        return {t["name"]: t["template"] for t in entry}
    raise BundleError(
        f"{directory / 'tokenizer_config.json'}: chat_template is neither text nor a list of "
        "{name, template}: correct the checkpoint."
    )
