"""The tokenizer rebuilt from a GGUF file against llama.cpp's own and transformers', and every one that is refused."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from anechain.bake.gguf import GgufSource
from anechain.errors import SourceError
from anechain.run.tokenizer import Tokenizer as BundleTokenizer
from tests.tiny import BOS, CHAT_TEMPLATE, EOS, IM_END, IM_START
from tests.tiny_gguf import (
    demo_path,
    gemma_path,
    gguf_metadata,
    gguf_tensors,
    pieces_vocabulary,
    tiny_vocabulary,
    write_gguf,
    write_tiny_gguf,
)

TEXTS = [
    "Hello world",
    "  two  spaces   three\n\n\nlines\t\ttabs  ",
    "12345 6.789e-10 1st 2nd room101",
    "It's we'll THEY'RE don't I'd 've",
    "naïve café ÀÉ ß Ω Привет мир 你好世界 こんにちは 안녕 हिन्दी עברית العربية",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\ufeff \u00a0nbsp\u3000wide",
    "def f(x):\n    return {'a': [x**2, \"b\"]}  # ok?\n\tif x != 3: pass",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_start|>",
    "<|im_start|><|im_start|> a <|im_end|>b<|im_end",
    "<repo_name>x<file_sep>",
    "",
    "\n",
    " ",
    "\r\n\r\n a\r\n",
    "a\u2028b\u0085c",
    "https://example.com/?q=1&r=%20#x",
    "mixed123abc456 _under_score-dash",
    "\x01\x7f",
    "\u2026\u2014\u2013\u201c\u201d\u2018\u2019",
    "İstanbul ŞIĞ ﬁ ǅ",
    "a" * 50 + " " * 17 + "b",
]
OTHER_NUMERALS = ["½ ² Ⅷ ٣٤ 12½", "x²+y³=①"]  # of Unicode's category N, but not ASCII


@pytest.fixture(scope="module")
def demo() -> GgufSource:
    return GgufSource(demo_path())


def refusal(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        GgufSource(path)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and str(path) in message
    return message


def tokenizer_of(source: GgufSource) -> Tokenizer:
    return Tokenizer.from_str(source.text_files["tokenizer.json"].decode())


@pytest.fixture(scope="module")
def llama_cpp() -> Any:
    return pytest.importorskip("llama_cpp", reason="llama_cpp, whose tokenizer is the reference, is not installed")


def assert_tokenizes_as_llama_cpp(llama_cpp: Any, path: Path, texts: list[str]) -> None:
    reference = llama_cpp.Llama(model_path=str(path), vocab_only=True, verbose=False)
    tokenizer = tokenizer_of(GgufSource(path))
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == reference.tokenize(text.encode(), add_bos=False, special=True), repr(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(texts) >= 20


def test_demo_tokenizes_as_llama_cpp(llama_cpp: Any) -> None:
    assert_tokenizes_as_llama_cpp(llama_cpp, demo_path(), TEXTS + OTHER_NUMERALS)


@pytest.mark.slow
def test_gemma_tokenizes_as_llama_cpp(llama_cpp: Any, tmp_path: Path) -> None:
    """The real vocabulary of 262 144 pieces, in several languages, code, and runs of spaces and line ends."""
    runs = ["\n" * 70 + "x", "\t\t\tx\n\n  y", "ab" * 200, "aaaa aaa aaaaaaa ...... ------ ======", "𐍈𝔘𝔫𝔦 ﷽"]
    turns = ["<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n", Path(__file__).read_text(encoding="utf-8")]
    assert_tokenizes_as_llama_cpp(llama_cpp, gemma_path(tmp_path), TEXTS + OTHER_NUMERALS + runs + turns)


@pytest.mark.slow
def test_demo_tokenizes_as_transformers(demo: GgufSource) -> None:
    """All but OTHER_NUMERALS: transformers does not look at `tokenizer.ggml.pre` and leaves those uncut."""
    theirs = AutoTokenizer.from_pretrained(demo_path().parent, gguf_file=demo_path().name)
    ours = tokenizer_of(demo)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False), text
    assert ours.get_vocab() == theirs.get_vocab() and len(ours.get_vocab()) == 49152


def test_demo_text_files_make_a_directory_that_transformers_opens(demo: GgufSource, tmp_path: Path) -> None:
    for name, content in demo.text_files.items():
        (tmp_path / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.bos_token, theirs.eos_token, theirs.unk_token) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    chat = theirs.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert theirs.encode("Hi 42") == tokenizer_of(demo).encode("Hi 42").ids
    generation = json.loads(demo.text_files["generation_config.json"])
    assert generation == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 2}


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
def test_tiny_tokenizer_as_llama_cpp(llama_cpp: Any, tmp_path: Path, pre: str) -> None:
    # llama.cpp does not normalise; the NFC of Qwen's own tokenizer is tested below.
    texts = [*(text for text in TEXTS if "e\u0301" not in text), "hello the <tool>then</tool>", "the\nhe 1234\n\n\n x"]
    path = write_tiny_gguf(tmp_path / "x.gguf", "llama", tiny_vocabulary(pre))
    assert_tokenizes_as_llama_cpp(llama_cpp, path, texts)


def test_cuts_decide_what_merges(tmp_path: Path) -> None:
    """`\\n` before letters: GPT-2's expression keeps the space with the word, Qwen's takes any one character along."""
    pieces: dict[str, list[str]] = {}
    for pre in ("smollm", "qwen2"):
        source = GgufSource(write_tiny_gguf(tmp_path / f"{pre}.gguf", "llama", tiny_vocabulary(pre)))
        cutter = tokenizer_of(source).pre_tokenizer
        assert cutter is not None
        pieces[pre] = [piece for piece, _ in cutter.pre_tokenize_str("a\nthe 12 (b)\nc \n  d I'LLx")]
    assert pieces["smollm"] == ["a", "Ċ", "the", "Ġ", "1", "2", "Ġ(", "b", ")", "Ċ", "c", "ĠĊĠ", "Ġd", "ĠI", "'", "LLx"]
    assert pieces["qwen2"] == ["a", "Ċ", "the", "Ġ", "1", "2", "Ġ(", "b", ")Ċ", "c", "ĠĊ", "Ġ", "Ġd", "ĠI", "'LL", "x"]


@pytest.mark.parametrize("prefix", [False, True])
def test_pieces_as_llama_cpp(llama_cpp: Any, tmp_path: Path, prefix: bool) -> None:
    """SentencePiece-style, with and without a space before the text; pieces overlap, and most characters are bytes."""
    more = [
        "the reader is in the other one",
        "aaaaaaa aa aaa",
        "threads reheated, head ahead",  # a long piece may come before a short one
        " a  b   c\n\n d",
        "lou<eos> sh<bos>t",
    ]
    rng = random.Random(3)
    more += ["".join(rng.choices("etaoinshrdlu  ,.1\né🙂", k=60)) for _ in range(40)]
    more += ["<start_of_turn>user\nthe<end_of_turn>\n", "<0x41>", "<unused0>"]
    general = pieces_vocabulary() | {"tokenizer.ggml.add_space_prefix": prefix}
    path = write_gguf(tmp_path / "x.gguf", "llama", gguf_tensors("llama"), gguf_metadata("llama"), general)
    reference = llama_cpp.Llama(model_path=str(path), vocab_only=True, verbose=False)
    source = GgufSource(path)
    tokenizer = tokenizer_of(source)
    for name, content in source.text_files.items():
        (tmp_path / name).write_bytes(content)
    ours = BundleTokenizer.load(tmp_path)
    texts = [text for text in TEXTS + OTHER_NUMERALS + more if text]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == reference.tokenize(text.encode(), add_bos=False, special=True), repr(text)
        if not prefix:
            assert ours.decode(ids, skip_special=False) == text
    assert len(texts) >= 60
    assert tokenizer.encode("the").ids[0] == 2 and tokenizer.encode("the", add_special_tokens=False).ids[0] != 2
    assert ours.decode(ours.encode("the one")) == "the one"


def test_pieces_text_files(tmp_path: Path) -> None:
    source = GgufSource(write_tiny_gguf(tmp_path / "x.gguf", "llama"))
    path = write_gguf(tmp_path / "x.gguf", "llama", gguf_tensors("llama"), gguf_metadata("llama"), pieces_vocabulary())
    source = GgufSource(path)
    config = json.loads(source.text_files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<bos>", "<eos>", "<unk>")
    assert config["add_bos_token"] is True
    # A turn's end is an end, too, though no key says so.
    assert json.loads(source.text_files["generation_config.json"])["eos_token_id"] == [1, 5]


@pytest.mark.parametrize(
    "general, words",
    [
        ({"tokenizer.ggml.scores": [0.0] * 319}, "has 319 scores for 320 tokens"),
        (
            {"tokenizer.ggml.tokens": [f"x{i}" for i in range(320)]},
            "has no token for 256 of the 256 bytes, <0x00> among",
        ),
    ],
)
def test_pieces_that_contradict_themselves(tmp_path: Path, general: dict[str, Any], words: str) -> None:
    vocabulary = pieces_vocabulary() | general
    path = write_gguf(tmp_path / "x.gguf", "llama", gguf_tensors("llama"), gguf_metadata("llama"), vocabulary)
    with pytest.raises(SourceError) as caught:
        _ = GgufSource(path).text_files
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_whole_tokens_come_before_merges(tmp_path: Path) -> None:
    """Llama 3's: a word that is a token is that token, even where no merge leads to it; digits go by threes."""
    vocabulary = tiny_vocabulary("llama-bpe")
    tokens = list(vocabulary["tokenizer.ggml.tokens"])
    tokens[264], kinds = "help", list(vocabulary["tokenizer.ggml.token_type"])
    kinds[264] = int(TokenType.NORMAL)
    general = vocabulary | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    tokenizer = tokenizer_of(GgufSource(write_tiny_gguf(tmp_path / "x.gguf", "llama", general)))
    assert tokenizer.encode("help", add_special_tokens=False).ids == [264]
    assert tokenizer.encode("help").ids == [BOS, 264]
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("12345 a")] == ["123", "45", "Ġa"]


def test_qwen2_normalises(tmp_path: Path) -> None:
    by_pre = {}
    for pre in ("smollm", "qwen2"):
        source = GgufSource(write_tiny_gguf(tmp_path / f"{pre}.gguf", "llama", tiny_vocabulary(pre)))
        by_pre[pre] = tokenizer_of(source).encode("e\u0301").ids
    assert by_pre == {"smollm": list("e\u0301".encode()), "qwen2": list("\u00e9".encode())}


def test_tiny_text_files(tmp_path: Path) -> None:
    source = GgufSource(write_tiny_gguf(tmp_path / "x.gguf", "llama"))
    files = source.text_files
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    assert files["chat_template.jinja"].decode() == CHAT_TEMPLATE
    assert json.loads(files["generation_config.json"]) == {"bos_token_id": BOS, "eos_token_id": [EOS, IM_END]}
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<|startoftext|>", "<|endoftext|>")
    assert config["add_bos_token"] is False and config["clean_up_tokenization_spaces"] is False
    tokenizer = tokenizer_of(source)
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert added == {
        "<|im_start|>": True, "<|im_end|>": True, "<|endoftext|>": True, "<|startoftext|>": True, "<tool>": False,
    }  # fmt: skip
    assert tokenizer.token_to_id("<|im_start|>") == IM_START and tokenizer.get_vocab_size() == 264
    assert tokenizer.encode("[PAD0]").ids == list(b"[PAD0]")  # a filler is no token
    assert tokenizer.encode("hello t<tool><|im_end|>").ids == [261, ord("l"), ord("o"), 262, 263, IM_END]
    assert tokenizer.decode([261, 263, IM_END]) == "hel<tool>"


def test_unknown_token_is_special_and_every_end_token_is_kept(tmp_path: Path) -> None:
    kinds = tiny_vocabulary()["tokenizer.ggml.token_type"]
    kinds[EOS] = int(TokenType.UNKNOWN)
    general = {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eom_token_id": IM_START}
    source = GgufSource(write_tiny_gguf(tmp_path / "x.gguf", "llama", general))
    assert tokenizer_of(source).encode("a<|endoftext|>").ids == [ord("a"), EOS]
    assert json.loads(source.text_files["generation_config.json"])["eos_token_id"] == [EOS, IM_END, IM_START]


@pytest.mark.parametrize("bos, eos", [(True, False), (False, True), (True, True), (False, False)])
def test_added_bos_and_eos(tmp_path: Path, bos: bool, eos: bool) -> None:
    general = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    source = GgufSource(write_tiny_gguf(tmp_path / "x.gguf", "llama", general))
    tokenizer = tokenizer_of(source)
    assert tokenizer.encode("a").ids == [BOS] * bos + [ord("a")] + [EOS] * eos
    assert tokenizer.encode("a", add_special_tokens=False).ids == [ord("a")]
    config = json.loads(source.text_files["tokenizer_config.json"])
    assert (config["add_bos_token"], config["add_eos_token"]) == (bos, eos)


def test_file_without_a_tokenizer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "llama", gguf_tensors("llama"), gguf_metadata("llama"))
    assert GgufSource(path).text_files == {}


@pytest.mark.parametrize(
    "general, words",
    [
        (
            {"tokenizer.ggml.pre": "banana"},
            "tokenizer.ggml.pre 'banana' is not supported (only 'smollm', 'qwen2', 'llama-bpe' are)",
        ),
        ({"tokenizer.ggml.pre": "default"}, "tokenizer.ggml.pre 'default' is not supported"),
        (
            {"tokenizer.ggml.model": "t5"},
            "tokenizer.ggml.model 't5' is not supported (only 'gpt2', byte-level BPE, and 'llama', pieces, are)",
        ),
        ({"tokenizer.ggml.add_space_prefix": True}, "tokenizer.ggml.add_space_prefix = true is not supported"),
        ({"tokenizer.ggml.merges": []}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}, "tokenizer.ggml.scores is missing"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.pre 'smollm' is not supported with model 'llama'"),
    ],
)
def test_tokenizers_that_are_refused(tmp_path: Path, general: dict[str, Any], words: str) -> None:
    message = refusal(write_tiny_gguf(tmp_path / "x.gguf", "llama", general))
    assert words in message
    assert message.endswith("; use the model's Hugging Face directory, which has a tokenizer.json.")


@pytest.mark.parametrize(
    "general, words",
    [
        ({"tokenizer.ggml.eos_token_id": 320}, "has token ids outside of its 320 tokens: eos 320"),
        ({"tokenizer.ggml.merges": ["z z"]}, "has merges that its tokens contradict"),
        ({"tokenizer.ggml.token_type": [1] * 319}, "or not one type for each token"),
        ({"tokenizer.ggml.tokens": ["a"] * 320}, "has two tokens of the same text"),
    ],
)
def test_tokenizers_that_contradict_themselves(tmp_path: Path, general: dict[str, Any], words: str) -> None:
    source = GgufSource(write_tiny_gguf(tmp_path / "x.gguf", "llama", general))
    with pytest.raises(SourceError) as caught:
        _ = source.text_files
    assert words in str(caught.value) and "\n" not in str(caught.value)
