"""The tokenizer against transformers and the `tokenizers` library, on byte-level and on metaspace toy tokenizers."""

import codecs
import json
from functools import cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from anechain.errors import BundleError, RequestError
from anechain.run.detokenizer import byte_token
from anechain.run.tokenizer import Tokenizer

CORPUS = [
    "the capital of France is Paris.",
    "once upon a time there was a naïve café",
    "two plus two equals four  ",
] * 4
BOS, EOS, TOOL = "<s>", "</s>", "<tool_call>"
ADDED = ["<mot clé>", "日", TOOL]  # with characters that stand for no byte in byte-level BPE
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=24) | st.lists(
    st.sampled_from(
        ["the ", "cap", "ital", " France", "é", "日本", "😀", "👩‍👩‍👧", "\u0301", "\n", "  ", "\ufffd", BOS, *ADDED]
    ),
    max_size=8,
).map("".join)


def specials() -> list[AddedToken]:
    return [AddedToken(BOS, special=True), AddedToken(EOS, special=True)]


@cache
def byte_level() -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=specials(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    library.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return library


@cache
def metaspace(strip: bool = True) -> Library:
    """As Llama 2's (`strip`) and Gemma's: `▁` for a space, unknown characters as byte tokens."""
    trained = Library(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=90, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    merges = [tuple(pair) for pair in model["merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    library = Library(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("▁")] if strip else []
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ending = [decoders.Strip(" ", 1, 0)] if strip else []
    inner = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    library.decoder = decoders.Sequence([inner, decoders.Fuse(), *ending])
    library.add_special_tokens([AddedToken("<unk>", special=True), *specials()])
    library.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    library.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return library


@cache
def metaspace_decoder(scheme: str) -> Library:
    library = Library.from_str(metaspace(strip=False).to_str())
    library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return library


LIBRARIES = {
    "byte-level": byte_level,
    "metaspace": metaspace,
    "metaspace, no strip": lambda: metaspace(strip=False),
    "metaspace decoder, first": lambda: metaspace_decoder("first"),
    "metaspace decoder, never": lambda: metaspace_decoder("never"),
}


@cache
def loaded(kind: str) -> Tokenizer:
    with TemporaryDirectory() as directory:
        return written(LIBRARIES[kind](), Path(directory))


def written(library: Library, directory: Path, **files: object) -> Tokenizer:
    """`library` and JSON `files` (by name without suffix) saved to `directory` and loaded from there."""
    library.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return Tokenizer.load(directory)


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special=skip_special)
    return [*(stream.feed(i) for i in ids), stream.flush()]


each_kind = pytest.mark.parametrize("kind", LIBRARIES)


@each_kind
@given(text=TEXTS)
def test_encode_and_decode_equal_transformers(kind: str, text: str) -> None:
    fast = transformers_twin(kind)
    tokenizer = loaded(kind)
    for special in (True, False):
        ids = tokenizer.encode(text, add_special=special)
        assert ids == fast.encode(text, add_special_tokens=special)
        for skip in (True, False):
            expected = fast.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special=skip) == expected
            assert "".join(pieces_of(tokenizer, ids, skip)) == expected


@cache
def transformers_twin(kind: str):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=LIBRARIES[kind](), bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_text_survives_the_round_trip(kind: str) -> None:
    for text in ("The  naïve café, 漢字 😀!\n\n\ttwo", " leading and trailing ", "don 't , do . not ! clean"):
        assert loaded(kind).decode(loaded(kind).encode(text)) == text


@each_kind
@given(data=st.data())
def test_pieces_join_to_the_text_of_any_ids(kind: str, data: st.DataObject) -> None:
    tokenizer, library = loaded(kind), LIBRARIES[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_ids - 1), max_size=24))
    skip = data.draw(st.booleans())
    joined = "".join(pieces_of(tokenizer, ids, skip))
    assert joined == tokenizer.decode(ids, skip_special=skip)
    special = {i for i, token in library.get_added_tokens_decoder().items() if token.special}
    tokens = [library.id_to_token(i) for i in ids if not (skip and i in special)]
    runs = [(is_byte, list(run)) for is_byte, run in groupby(tokens, lambda token: byte_token(token) is not None)]
    broken = [run for is_byte, run in runs if is_byte and not whole(run)]
    if kind == "byte-level" or "decoder" in kind or not broken:
        assert joined == library.decode(ids, skip_special_tokens=skip)
    else:
        parts = [
            bytes(map(byte_token, run)).decode("utf-8", "replace") if is_byte else "".join(run) for is_byte, run in runs
        ]
        text = "".join(
            part if is_byte else part.replace("▁", " ") for part, (is_byte, _) in zip(parts, runs, strict=True)
        )
        assert joined == (text.removeprefix(" ") if kind == "metaspace" else text)


def whole(run: list[str]) -> bool:
    try:
        bytes(map(byte_token, run)).decode()
    except UnicodeDecodeError:
        return False
    return True


@given(data=st.binary(max_size=12))
def test_each_byte_shows_all_that_is_whole_and_nothing_that_is_half(data: bytes) -> None:
    for kind in ("byte-level", "metaspace"):
        tokenizer, library = loaded(kind), LIBRARIES[kind]()
        ids = [library.token_to_id(name) for name in byte_names(kind, data)]
        oracle = codecs.getincrementaldecoder("utf-8")("replace")
        expected = [*(oracle.decode(bytes([byte])) for byte in data), oracle.decode(b"", final=True)]
        if kind == "metaspace" and (first := next((i for i, piece in enumerate(expected) if piece), None)) is not None:
            expected[first] = expected[first].removeprefix(" ")
        assert pieces_of(tokenizer, ids) == expected


def byte_names(kind: str, data: bytes) -> list[str]:
    if kind == "metaspace":
        return [f"<0x{byte:02X}>" for byte in data]
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + others.index(byte)) for byte in data]


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        ("😀".encode(), ["", "", "", "😀", ""]),
        (b"\xe2\x82a", ["", "", "\ufffda", ""]),  # a half character is given up when the next byte does not fit
        (b"\xff\xe2\x82\xac", ["\ufffd", "", "", "€", ""]),
        (b"\xe2\x82", ["", "", "\ufffd"]),
        (b"\xe2\x82\xac\xff", ["", "", "€", "\ufffd", ""]),  # what was shown stays
        ("\ufffd".encode(), ["", "", "\ufffd", ""]),  # the character itself is no fault
    ],
)
def test_half_and_broken_characters(kind: str, data: bytes, pieces: list[str]) -> None:
    ids = [LIBRARIES[kind]().token_to_id(name) for name in byte_names(kind, data)]
    assert None not in ids
    assert pieces_of(loaded(kind), ids) == pieces
    stream = loaded(kind).stream()
    assert [*map(stream.feed, ids), stream.flush(), stream.flush()] == [*pieces, ""]


def test_a_stream_continues_its_context() -> None:
    tokenizer = loaded("metaspace")
    prompt, answer = tokenizer.encode("capital of France is"), tokenizer.encode("Paris", add_special=False)
    assert len(answer) > 1
    for context, expected in ((prompt, " Paris"), ([], "Paris")):
        stream = tokenizer.stream(context)
        assert "".join([*map(stream.feed, answer), stream.flush()]) == expected


def test_a_decoder_of_null_puts_spaces_between(tmp_path: Path) -> None:
    library = Library(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = written(library, tmp_path)
    assert tokenizer.decode([0, 1, 1]) == library.decode([0, 1, 1]) == "a b b"


def test_ids_go_up_to_the_added_tokens() -> None:
    tokenizer = loaded("byte-level")
    assert tokenizer.n_ids == byte_level().get_vocab_size() == 1 + byte_level().token_to_id(TOOL)
    assert tokenizer.decode([tokenizer.n_ids - 1]) == TOOL
    for unknown in (tokenizer.n_ids, -1):
        with pytest.raises(RequestError, match=f"token id {unknown} is not in the tokenizer, whose ids end at 3"):
            tokenizer.decode([unknown])


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"generation_config": {"eos_token_id": 7}}, {7}),
        ({"generation_config": {"eos_token_id": [7, 9]}, "config": {"eos_token_id": 8}}, {7, 8, 9}),
        ({"generation_config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": EOS}}, {1}),
        (
            {"config": {"eos_token_id": [0]}, "tokenizer_config": {"eos_token": {"content": EOS, "special": True}}},
            {0, 1},
        ),
    ],
)
def test_every_file_has_a_say_in_the_end(files: dict[str, object], expected: set[int], tmp_path: Path) -> None:
    assert written(byte_level(), tmp_path, **files).eos_ids == expected


def test_special_tokens_and_templates_are_read(tmp_path: Path) -> None:
    config = {"bos_token": {"content": BOS}, "eos_token": EOS, "pad_token": None, "chat_template": "inline"}
    tokenizer = written(byte_level(), tmp_path, tokenizer_config=config)
    assert tokenizer.bos_id == 0 and loaded("byte-level").bos_id is None
    assert tokenizer.special_tokens == {"bos_token": BOS, "eos_token": EOS}
    assert tokenizer.chat_templates == {"default": "inline"}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    tokenizer = written(byte_level(), tmp_path, tokenizer_config={"chat_template": named})
    assert tokenizer.chat_templates == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert Tokenizer.load(tmp_path).chat_templates == {"default": "from the file"}


def test_a_length_limit_in_the_file_does_not_shorten_prompts(tmp_path: Path) -> None:
    library = Library.from_str(byte_level().to_str())
    library.enable_truncation(4)
    library.enable_padding(length=64)
    tokenizer = written(library, tmp_path)
    assert tokenizer.encode("the capital of France is Paris.") == loaded("byte-level").encode(
        "the capital of France is Paris."
    )


FAULTS = {
    "eos": (
        {"generation_config": {"eos_token_id": [5, 4000, True]}, "tokenizer_config": {"eos_token": "<end>"}},
        "generation_config.json says eos_token_id 4000; generation_config.json says eos_token_id True; "
        "tokenizer_config.json says eos_token '<end>', which tokenizer.json does not have: correct the checkpoint.",
    ),
    "named": (
        {"tokenizer_config": {"bos_token": 3, "pad_token": {"id": 1}}},
        "tokenizer_config.json: bos_token = 3; pad_token = {'id': 1} names no token: write the token's text.",
    ),
    "template": (
        {"tokenizer_config": {"chat_template": [{"name": "x"}]}},
        "is neither text nor a list of {name, template}",
    ),
    "list": ({"generation_config": [1]}, "generation_config.json is not a JSON object: bake again"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_make_no_sense_are_refused(fault: str, tmp_path: Path) -> None:
    files, message = FAULTS[fault]
    with pytest.raises(BundleError) as caught:
        written(byte_level(), tmp_path, **files)
    assert message in str(caught.value)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BundleError, match=r"tokenizer\.json cannot be read .*: bake again from a checkpoint that has it"
    ):
        Tokenizer.load(tmp_path)
    for damaged in ("{}", "{", ""):
        (tmp_path / "tokenizer.json").write_text(damaged, encoding="utf-8")
        with pytest.raises(BundleError, match=r"tokenizer\.json is not a tokenizer \(.+\): bake again"):
            Tokenizer.load(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xff{")
    with pytest.raises(BundleError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), "(WordPiece in WordPiece)"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]), "(Replace in Fuse > Replace)"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "(Strip in Fuse > Strip)"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0)]), "(Strip in Strip)"),
        (
            decoders.Sequence([decoders.Replace("a", "b"), decoders.Metaspace()]),
            "(Metaspace in Replace > Metaspace)",
        ),
        (
            decoders.Sequence([decoders.ByteFallback(), decoders.ByteLevel()]),
            "(ByteLevel in ByteFallback > ByteLevel)",
        ),
        (decoders.Sequence([decoders.CTC(), decoders.BPEDecoder()]), "(CTC, BPEDecoder in CTC > BPEDecoder)"),
    ],
)
def test_a_decoder_that_cannot_stream_is_refused(decoder: object, named: str, tmp_path: Path) -> None:
    library = Library.from_str(byte_level().to_str())
    library.decoder = decoder
    with pytest.raises(BundleError) as caught:
        written(library, tmp_path)
    assert named in str(caught.value) and "known, in this order, are ByteLevel, ByteFallback" in str(caught.value)


def test_broken_unicode_is_refused() -> None:
    with pytest.raises(RequestError, match="character 3 of the text is not valid Unicode: correct its encoding"):
        loaded("byte-level").encode("ab\ud800c")
