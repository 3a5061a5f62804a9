"""The tokenizer inside a GGUF file -> the files of a Hugging Face directory.

Byte-level BPE ("gpt2"): GGUF keeps the vocabulary and the merges, and names how text is cut before merging
(`tokenizer.ggml.pre`); what that name means is the table below. SentencePiece ("llama"): it keeps pieces and scores.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from anechain.bake.gguf_pieces import pieces_tokenizer
from anechain.errors import SourceError

_KEY = "tokenizer.ggml."
_ASK = "use the model's Hugging Face directory, which has a tokenizer.json"

# Control tokens that end a turn by their text: converters leave the key out where a model has two ends (llama.cpp).
_TURN_ENDS = frozenset({"<end_of_turn>", "<|eot_id|>", "<|im_end|>"})


@dataclass(frozen=True)
class Cut:
    """How text is normalised and cut into pieces before byte-level merging, and whether BOS is added by default.

    `whole_first`: a piece that is a token as it stands is not merged up from its bytes.
    """

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    adds_bos: bool = False
    whole_first: bool = False


def _gpt2_with_single_digits() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _digits(most: int) -> pre_tokenizers.PreTokenizer:
    """Words with one character before them, numbers in groups of up to `most` digits, line ends with what precedes."""
    pieces = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        rf"\p{{N}}{{1,{most}}}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
    split = pre_tokenizers.Split(Regex("|".join(pieces)), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


CUTS = {
    "smollm": Cut(_gpt2_with_single_digits),
    "qwen2": Cut(lambda: _digits(1), normalizers.NFC),
    "llama-bpe": Cut(lambda: _digits(3), adds_bos=True, whole_first=True),
}


def check_tokenizer(metadata: Mapping[str, Any], where: str) -> None:
    """Raise SourceError for a tokenizer that `text_files` cannot rebuild, naming all that is not understood."""
    if f"{_KEY}model" not in metadata:
        return
    faults = []
    model, pre = metadata[f"{_KEY}model"], metadata.get(f"{_KEY}pre")
    if model not in ("gpt2", "llama"):
        faults.append(f"{_KEY}model {model!r} is not supported (only 'gpt2', byte-level BPE, and 'llama', pieces, are)")
    elif model == "gpt2" and pre not in CUTS:
        faults.append(f"{_KEY}pre {pre!r} is not supported (only {', '.join(map(repr, CUTS))} are)")
    elif model == "llama" and pre not in (None, "default"):
        faults.append(f"{_KEY}pre {pre!r} is not supported with model 'llama' (only 'default' is)")
    if model != "llama" and metadata.get(f"{_KEY}add_space_prefix"):
        faults.append(f"{_KEY}add_space_prefix = true is not supported")
    needed = ("tokens", "scores" if model == "llama" else "merges", "token_type")
    lists = {name: metadata.get(_KEY + name) for name in needed}
    faults += [f"{_KEY}{name} is missing" for name, value in lists.items() if not isinstance(value, list)]
    if faults:
        raise SourceError(f"{where} has a tokenizer that cannot be rebuilt: {'; '.join(faults)}; {_ASK}.")


def text_files(metadata: Mapping[str, Any], where: str) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja; {} without a tokenizer.

    Raises SourceError when vocabulary, merges and token ids contradict each other.
    """
    if f"{_KEY}model" not in metadata:
        return {}
    tokens: list[str] = metadata[f"{_KEY}tokens"]
    roles = ("bos", "eos", "eot", "eom", "unknown", "padding")
    ids = {role: metadata[key] for role in roles if (key := f"{_KEY}{role}_token_id") in metadata}
    if wild := [f"{role} {token!r}" for role, token in ids.items() if token not in range(len(tokens))]:
        raise SourceError(f"{where} has token ids outside of its {len(tokens)} tokens: {', '.join(wild)}; {_ASK}.")
    of_pieces = metadata[f"{_KEY}model"] == "llama"
    adds_bos = metadata.get(f"{_KEY}add_bos_token", of_pieces or CUTS[metadata[f"{_KEY}pre"]].adds_bos)
    adds_eos = metadata.get(f"{_KEY}add_eos_token", False)
    before = [ids["bos"]] if adds_bos and "bos" in ids else []
    after = [ids["eos"]] if adds_eos and "eos" in ids else []
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(before),
        "add_eos_token": bool(after),
        "clean_up_tokenization_spaces": False,
    }
    config |= {
        f"{short}_token": tokens[ids[role]]
        for role, short in {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}.items()
        if role in ids
    }
    kinds: list[int] = metadata[f"{_KEY}token_type"]
    turns = [i for i, kind in enumerate(kinds) if kind == TokenType.CONTROL and tokens[i] in _TURN_ENDS]
    ends = list(dict.fromkeys([*(ids[role] for role in ("eos", "eot", "eom") if role in ids), *turns]))
    generation = {"bos_token_id": ids.get("bos"), "eos_token_id": ends, "pad_token_id": ids.get("padding")}
    files = {
        "tokenizer.json": _tokenizer(metadata, before, after, where).to_str().encode(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode(),
        "generation_config.json": json.dumps({k: v for k, v in generation.items() if v not in (None, [])}).encode(),
    }
    if template := metadata.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = template.encode()
    return files


def _tokenizer(metadata: Mapping[str, Any], before: list[int], after: list[int], where: str) -> Tokenizer:
    tokens: list[str] = metadata[f"{_KEY}tokens"]
    kinds: list[int] = metadata[f"{_KEY}token_type"]
    # A token of type UNUSED only fills the table up to the model's width: no text is ever encoded to it.
    vocabulary = {text: i for i, text in enumerate(tokens) if i < len(kinds) and kinds[i] != TokenType.UNUSED}
    if len(kinds) != len(tokens) or len(vocabulary) != sum(kind != TokenType.UNUSED for kind in kinds):
        raise SourceError(f"{where} has two tokens of the same text, or not one type for each token; {_ASK}.")
    if metadata[f"{_KEY}model"] == "llama":
        tokenizer = _of_pieces(metadata, vocabulary, where)
    else:
        tokenizer = _byte_level(metadata, vocabulary, where)
    special = [i for i, kind in enumerate(kinds) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    plain = [i for i, kind in enumerate(kinds) if kind == TokenType.USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in special])
    tokenizer.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in plain])
    if before or after:
        single = [*(tokens[i] for i in before), "$A", *(tokens[i] for i in after)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(tokens[i], i) for i in dict.fromkeys((*before, *after))]
        )
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int], where: str) -> Tokenizer:
    cut = CUTS[metadata[f"{_KEY}pre"]]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata[f"{_KEY}merges"]]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut.whole_first))
    except Exception as error:  # the library raises bare Exception
        raise SourceError(f"{where} has merges that its tokens contradict ({error}); {_ASK}.") from None
    if cut.normalizer is not None:
        tokenizer.normalizer = cut.normalizer()
    tokenizer.pre_tokenizer = cut.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _of_pieces(metadata: Mapping[str, Any], vocabulary: dict[str, int], where: str) -> Tokenizer:
    tokens, kinds, scores = (metadata[_KEY + name] for name in ("tokens", "token_type", "scores"))
    if len(scores) != len(tokens):
        raise SourceError(f"{where} has {len(scores)} scores for {len(tokens)} tokens; {_ASK}.")
    if bare := [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]:
        raise SourceError(f"{where} has no token for {len(bare)} of the 256 bytes, {bare[0]} among them; {_ASK}.")
    joinable = [text for text, i in vocabulary.items() if kinds[i] == TokenType.NORMAL]
    unknown = metadata.get(f"{_KEY}unknown_token_id")
    prefix = metadata.get(f"{_KEY}add_space_prefix", True)
    return pieces_tokenizer(vocabulary, joinable, scores, None if unknown is None else tokens[unknown], prefix)
