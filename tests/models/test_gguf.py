"""Tokenizers of GGUF files: each known pre-tokenizer gives the original's tokens, an unknown one a warning."""

import logging
import struct

import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from gguf import GGUFWriter, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from draftproof.backends.loading.tokenization import load_tokenizer
from draftproof.errors import UserError
from draftproof.models.gguf import KNOWN, names

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


def file_of(folder, pre, model="gpt2"):
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
    if pre is not None:
        writer.add_tokenizer_pre(pre)
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


def ids(tokenizer):
    return [list(tokenizer(text)["input_ids"]) for text in TEXTS]


@pytest.mark.parametrize("pre", ORIGINALS)
def test_a_known_name_gives_the_originals_tokens(pre, tmp_path, caplog):
    path, right = file_of(tmp_path, pre), ORIGINALS[pre]()
    expected = [right.encode(text).ids for text in TEXTS]
    assert ids(load_tokenizer(str(path))) == expected
    assert "pre-tokenizer" not in caplog.text
    alone = ids(AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name))
    assert (alone != expected) == (pre in WRONG), "a control"


@pytest.mark.parametrize("pre", [None, "default", "deepseek-llm", "a-new-one"])
def test_an_unknown_name_is_a_warning_that_says_what_to_do(pre, tmp_path, caplog):
    path = file_of(tmp_path, pre)
    with caplog.at_level(logging.WARNING, "draftproof"):
        load_tokenizer(str(path))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "draftproof.models.gguf"]
    assert repr(pre or "none") in line
    assert "take the model's own directory or hub id" in line


@pytest.mark.parametrize("pre", sorted(KNOWN.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_expressions_are_those_that_transformers_has_too(pre):
    assert KNOWN[pre].expression == GGUF_PRE_TOKENIZER_SPLITS[pre]


def test_the_names_are_read_wherever_they_stand(tmp_path):
    assert names(file_of(tmp_path, "smollm")) == {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    assert names(file_of(tmp_path, None, "llama")) == {"tokenizer.ggml.model": "llama"}


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
    with pytest.raises(UserError, match=r"cannot read the metadata of .*: is it a whole GGUF file"):
        names(path)
