"""Pre-tokenizers of GGUF files: each known one splits as llama.cpp does, an unknown one is an error."""

import json
import struct
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from gguf import GGUFWriter, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftproof.backends.loading.tokenization import load_tokenizer, read_tokenizer
from draftproof.errors import UserError
from draftproof.models.gguf import KNOWN, pre_tokenizer
from draftproof.models.gguf_file import GGUFFile

BYTES = list(bytes_to_unicode().values())
SPACE = bytes_to_unicode()[32]
MERGES = [
    ("1", "2"), ("12", "3"), ("0", "0"), (SPACE, "1"), (SPACE + "1", "2"), (SPACE, "a"), ("a", "b"), (SPACE, SPACE),
    ("B", "a"), ("!", "!"), ("'", "s"), (SPACE, "'"),
]  # fmt: skip
WHOLE = "xyz"  # a token that no merges make
TOKENS = list(dict.fromkeys([*BYTES, *("".join(pair) for pair in MERGES), WHOLE, "<|end|>"]))
TEXTS = (
    "in 1200 or 12 3 of 2024, 12345", "a  b   12", "aBa Ba BBa", "it's IT'S 'so", "a!!\n\n b\r\n  c\n", "xyz xyzxyz",
    "\u00e9\u4e2d\u6587 \u0663\u0664 12\u00bd", "<|end|> 12<|end|>",
)  # fmt: skip


def file_of(folder, pre, model="gpt2", bos=None):
    path = folder / f"{pre or 'none'}.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_array("some.texts", ["a", "bc"])
    writer.add_tokenizer_model(model)
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.NORMAL] * (len(TOKENS) - 1) + [TokenType.CONTROL])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_eos_token_id(len(TOKENS) - 1)
    if bos is not None or pre in {"llama-bpe", "qwen2"}:
        writer.add_bos_token_id(len(TOKENS) - 1)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if bos is not None:
        writer.add_add_bos_token(bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


# What the original models' own tokenizer.json files have, written out.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


def original(pre_tokenizer, *, whole_words=False):
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    made = Tokenizer(models.BPE(vocabulary, MERGES, ignore_merges=whole_words))
    made.pre_tokenizer = pre_tokenizer
    made.add_special_tokens([AddedToken("<|end|>", normalized=False, special=True)])
    return made


def split_by(expression):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(expression), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip


def digits():
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])


ORIGINALS = {
    "gpt-2": lambda: original(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": lambda: original(digits()),
    "starcoder": lambda: original(digits()),
    "command-r": lambda: original(digits()),
    "llama-bpe": lambda: original(split_by(LLAMA3), whole_words=True),
    "qwen2": lambda: original(split_by(QWEN2)),
    "smaug-bpe": lambda: original(split_by(LLAMA3)),
}
WRONG = ("smollm", "starcoder", "command-r", "llama-bpe")  # where transformers alone has other tokens


@pytest.mark.parametrize("pre", ORIGINALS)
def test_a_known_name_gives_the_originals_tokens(pre, tmp_path):
    path, right = file_of(tmp_path, pre), ORIGINALS[pre]()
    expected = [right.encode(text).ids for text in TEXTS]
    for tokenizer in (load_tokenizer(str(path)), read_tokenizer(GGUFFile(path))):
        assert [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in TEXTS] == expected
    alone = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert ([list(alone(text)["input_ids"]) for text in TEXTS] != expected) == (pre in WRONG), "a control"


# --- what llama.cpp makes of each name ----------------------------------------------------------------------------

# Which build of llama.cpp made the pieces is in the file ("made_by"). To make them anew:
# python scripts/compare_tokenizers.py --freeze tests/models/llama_cpp_splits.json
FROZEN = json.loads(Path(__file__).with_name("llama_cpp_splits.json").read_text(encoding="utf-8"))
GROUP = {name: number for number, group in enumerate(FROZEN["groups"]) for name in group}


def pieces_of(name):
    """The pieces that llama.cpp makes of each string."""
    return [next(way["pieces"] for way in ways if GROUP[name] in way["groups"]) for ways in FROZEN["splits"]]


def split(name, text):
    return [text[start:end] for _, (start, end) in pre_tokenizer(KNOWN[name]).pre_tokenize_str(text)]


def test_every_known_name_is_frozen():
    assert GROUP.keys() == KNOWN.keys()
    assert FROZEN["made_by"].startswith("llama.cpp in ")


@pytest.mark.grid(59)
@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_name_splits_as_llama_cpp_does(name):
    for pieces in pieces_of(name):
        assert split(name, "".join(pieces)) == pieces
    assert KNOWN[name].whole_words == (name in FROZEN["whole_words"])
    assert KNOWN[name].bos == (name in FROZEN["bos"])


def test_the_strings_tell_all_expressions_apart():
    made = {tuple(map(tuple, pieces_of(name))): KNOWN[name].expressions for name in KNOWN}
    assert len(made) == len({known.expressions for known in KNOWN.values()})


@pytest.mark.parametrize(("pre", "said", "begins"), [
    ("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False), ("qwen2", True, True),
])  # fmt: skip
def test_a_text_begins_as_the_file_or_else_the_name_says(pre, said, begins, tmp_path):
    path = file_of(tmp_path, pre, bos=said)
    tokens = list(read_tokenizer(GGUFFile(path))("a")["input_ids"])
    assert tokens == [len(TOKENS) - 1] * begins + [TOKENS.index("a")]


# --- other names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["a-new-one", "whitespace"])
def test_an_unknown_name_is_an_error_that_says_what_to_do(pre, tmp_path):
    path = file_of(tmp_path, pre)
    for load in (lambda: load_tokenizer(str(path)), lambda: read_tokenizer(GGUFFile(path))):
        with pytest.raises(UserError, match=r"take the model's own directory or hub id$") as caught:
            load()
        line = str(caught.value)
        assert f"the pre-tokenizer {pre!r}" in line
        assert str(path) in line
        assert all(name in line for name in KNOWN)
        assert "\n" not in line


def test_no_name_is_llama_cpps_default(tmp_path):
    unnamed, default = (read_tokenizer(GGUFFile(file_of(tmp_path, pre))) for pre in (None, "default"))
    assert [list(unnamed(text)["input_ids"]) for text in TEXTS] == [list(default(text)["input_ids"]) for text in TEXTS]


DAMAGED = {
    "empty": lambda _: b"",
    "no GGUF": lambda content: b"PK" + content,
    "another version": lambda content: content[:4] + struct.pack("<I", 9) + content[8:],
    "cut": lambda content: content[:200],
    "a text without end": lambda content: content[:24] + struct.pack("<Q", 1 << 60) + content[32:],
    "a type that there is not": lambda content: content[:24] + struct.pack("<Q1sI", 1, b"a", 77),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_file_is_one_error(how, tmp_path):
    path = file_of(tmp_path, None)
    path.write_bytes(DAMAGED[how](path.read_bytes()))
    with pytest.raises(UserError, match=r"cannot read .*: is it a whole GGUF file"):
        GGUFFile(path)
