"""A SentencePiece vocabulary, pieces with scores, as the tokenizers library's BPE.

SentencePiece joins, again and again, the two neighbours whose joined piece has the highest score (Kudo and Richardson
2018, section 3.1); BPE joins the two that come first in its list of merges. The list of all ways to make each piece of
two others, by falling score, makes them do the same.
"""

from collections.abc import Collection, Mapping

from tokenizers import Tokenizer, decoders, models, normalizers

SPACE = "\u2581"


def pieces_tokenizer(
    vocabulary: Mapping[str, int], joinable: Collection[str], scores: list[float], unknown: str | None, prefix: bool
) -> Tokenizer:
    """`vocabulary` is piece -> id, `joinable` are the pieces that joining may lead to, `scores` are by id.

    A character that no piece has becomes its bytes (`<0x41>`). With `prefix` a space is put before the text.
    """
    model = models.BPE(
        vocab=dict(vocabulary),
        merges=_merges(vocabulary, joinable, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], joinable: Collection[str], scores: list[float]) -> list[tuple[str, str]]:
    parts = set(joinable)
    ranked = sorted(joinable, key=lambda piece: (-scores[vocabulary[piece]], vocabulary[piece]))
    return [
        (piece[:cut], piece[cut:])
        for piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in parts and piece[cut:] in parts
    ]
