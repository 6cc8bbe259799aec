"""Tokens of GGUF files beside those of llama.cpp, for each pre-tokenizer that draftproof knows.

    python scripts/compare_tokenizers.py [NAME ...] [--vocabulary GGUF | --characters] [--freeze PATH] [--json]
    python scripts/compare_tokenizers.py --files GGUF ... [--out OUT]

For each name in the table of `draftproof.models.gguf` it writes a GGUF file with random weights, whose metadata names
that pre-tokenizer, and has the same strings split by llama.cpp (the package llama-cpp-python, which must be importable)
and by draftproof. It prints how many strings differ, and the first of them with both splits.
Exits with 1 if any string differs.

The vocabulary is made for this: merges are learnt without a pre-tokenizer on all pieces of all names and on each two
neighbours, until each is one token. So a piece of llama.cpp's that is not one of ours has other tokens. A few tokens
that no merges make show which names take a word that is a token without looking at merges. With `--vocabulary` the
tokens and merges are those of a file instead; many wrong splits do not show then. With `--characters` the strings are
the characters of all Unicode, each after nine others, and merges join a character's first byte with the one before it.

With `--files` whole tokenizers are compared (`compare_vocabularies.py`): tokens of texts with and without those at both
ends, and texts of token ids, at once and token by token. Files may have a vocabulary alone, as those in llama.cpp's
folder `models` do.

`--freeze` writes the pieces that llama.cpp makes of some strings, which tests/models/test_gguf.py holds, if no string
differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compare_vocabularies
import llama_cpp_tokens
import numpy as np
from common import say
from gguf import GGUFWriter, TokenType
from llama_cpp_tokens import Question
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftproof.backends.loading.tokenization import read_tokenizer
from draftproof.files import whole_file
from draftproof.models.gguf import KNOWN, pre_tokenizer
from draftproof.models.gguf_file import GGUFFile

LETTERS = bytes_to_unicode()
BYTES = {letter: byte for byte, letter in LETTERS.items()}
END = "<|end|>"
WHOLE = ("wholly", " wholly", " \u4e2d\u6587wholly")  # made tokens without merges
WIDTH = 32  # of the model with random weights
BEFORE = ("a", "A", "1", "!", " ", "\n", "\u4e00", "\u00e9", "\u0301")  # what `--characters` puts before each
LARGE = (
    (0x3400, 0x9FFF), (0xAC00, 0xD7A3), (0x12000, 0x146FF), (0x17000, 0x18CFF), (0x20000, 0x31FFF),
)  # fmt: skip
FROZEN = 80  # strings that `--freeze` writes

PARTS: dict[str, tuple[str, ...]] = {
    "words": (
        "the", "Hello", "world", "HTTPServer", "camelCase", "iPhone", "McDonald", "USA", "x", "I", "naïve", "Ünïcode",
        "ÉCOLE", "École", "straße", "ΑΒΓ", "αβγ", "Привет", "МИР", "ǅungla", "ʰaspirated", "ﬁn", "İstanbul", "ſ", "µm",
        "ab_cd", "snake_case", "e\u0301te\u0301", "A\u030angstrom", "ªº", *WHOLE,
    ),
    "contractions": (
        "it's", "IT'S", "don't", "DON'T", "we're", "WE'RE", "I've", "I'VE", "I'm", "I'M", "he'll", "HE'LL", "she'd",
        "SHE'D", "y'all'd've", "'s", "'S", "'tis", "'Re", "'vE", "'lL", "rock'n'roll", "it\u2019s", "'\u017f",
        "a'\u017f", "O'Neil", "'D'", "''s", " 's", "x'sy", "X'LLy",
    ),
    "digits": (
        "0", "7", "12", "123", "1234", "12345", "123456", "1234567", "12345678901", "1,234,567.89", "3.14", "1e-5",
        "0x1F", "2024-01-31", "12:30", "$5", "50%", "a1b22c333d4444", "v1.2.3", " 1", "  12",
        "\u0663\u0664\u0665\u0666", "\u096a\u096b", "\u00bd", "\u00b2\u00b3", "\u2167", "\u2460\u2461",
        "\uff11\uff12\uff13\uff14", "1\u0663 2",
        "\U0001d7d8\U0001d7d9", "1st", "A4", "\u4e8c\u3007",
    ),
    "blanks": (
        " ", "  ", "   ", "    ", "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n", "\r\n\r\n", "\r", " \n", "\n ", " \t ",
        "  \n  \n", "\u00a0", "\u00a0\u00a0", " \u00a0", "\u3000", "\u2009", "\u200b", "\u2028", "\u2029", "\u0085",
        "\v", "\f", "\x1c", "\x1f", "\x00", "\ufeff", " " * 16, " " * 67, "\t" * 9, "\n" * 12, "\r\n" * 5, "\u180e",
        " " * 530, "\u1680", "\u202f",
    ),
    "code": (
        "def f(x):\n    return x**2\n", "for (int i=0;i<10;++i) {\n\ta[i] += 1;\n}", "if x != y && !z: // no\r\n",
        '<div class="a">&nbsp;</div>', "SELECT * FROM t WHERE a>='b';", "#include <vector>\n", "x->y::z", "\\n\\t",
        "/* c */", "a/b/c.py", "https://example.com/?q=a&b=c#d", "user@host", "{'k': [1, 2]}", "#!/bin/sh\n",
        'f"{x}"', "let s = `a${b}`;\n\n", "end\n/\n", "//\n/\r\n",
    ),
    "scripts": (
        "\u4f60\u597d\uff0c\u4e16\u754c\u3002", "\u4e2d\u6587abc", "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
        "\uff76\uff9e\u30fc", "\ud55c\uad6d\uc5b4 \ubb38\uc7a5", "\u0645\u0631\u062d\u0628\u0627 \u0628\u0643",
        "\u0627\u0644\u0633\u0651\u064e\u0644\u0627\u0645\u064f\u060c",
        "\u0939\u093f\u0928\u094d\u0926\u0940 \u0915\u094d\u0937\u093f",
        "\u0928\u092e\u0938\u094d\u0924\u0947\u0964", "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22",
        "\u05e9\u05dc\u05d5\u05dd",
        "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd",
        "\u1019\u103c\u1014\u103a\u1019\u102c", "\u1781\u17d2\u1798\u17c2\u179a",
        "\u0baf\u0bbe\u0bb4\u0bcd", "\u10e5\u10d0\u10e0\u10d7", "\u0531\u0580\u0574", "\ud55c\u4e2d1\u6587",
        "\U00020000\U0002a6d6", "\u3400\u4dbf", "\uf900", "\u2f00", "\u3005\u3006", "\u1100\u1161", "\u31f0", "\u06d4",
        "\u4e2d\u6587\uff01\uff1f", "\u2026\u2026", "\u3001", "\u0e51\u0e52",
    ),
    "pictures": (
        "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fd", "\u2764\ufe0f",
        "\U0001f1e9\U0001f1ea",
        "1\ufe0f\u20e3", "\u2192", "\u221e", "\u20ac5", "\u00a9", "\u00b0C", "\U0001d400\U0001d401", "\u2500\u2500",
    ),
    "signs": (
        "!", "?", "...", "!!!", "?!", ",", ";", ":", "-", "--", "\u2014", "(", ")", "[", "]", "{", "}", "<", ">", "=",
        "==", "+", "*", "**", "/", "//", "\\", "|", "||", "&", "^", "~", "`", "```", "@", "#", "$", "%", "_",
        "__", "'", '"',
        "\u201cq\u201d", "\u00bf", "\u00a7", "\u2022", "(a)", "[b]", "a.b", "!\n", ".\n\n", "?\r\n", "/\n", "!/", " !",
        " (", ".,", "\u0301", "\u0301a", " \u0301", "\u00b4", "^^", "$$", "<=>", "+=",
    ),
}  # fmt: skip
ROWS = ("words", "digits", "contractions", "signs", "blanks", "scripts", "pictures")  # in words that go round


def strings(count: int, seed: int = 0) -> list[str]:
    """Strings of all kinds, always the same ones, each once; those from `PARTS` alone first."""
    dice = random.Random(seed)
    drawn = {part: None for parts in PARTS.values() for part in parts}
    flat = list(drawn)
    while len(drawn) < count:
        kind = dice.randrange(6)
        if kind == 0:  # whatever beside whatever
            made = "".join(dice.choice(flat) for _ in range(dice.randint(2, 6)))
        elif kind == 1:  # a text of words
            made = " ".join(dice.choice(PARTS[dice.choice(ROWS)]) for _ in range(dice.randint(2, 8)))
        elif kind == 2:  # digits in groups
            made = "".join(
                "".join(dice.choices("0123456789", k=dice.randint(1, 8))) + dice.choice(PARTS[dice.choice(ROWS)])
                for _ in range(dice.randint(1, 4))
            )
        elif kind == 3:  # short runs of ASCII
            made = "".join(dice.choices("aAbSsTt1 2'.,!/\n\r\t -_$(", k=dice.randint(3, 14)))
        elif kind == 4:  # characters of all Unicode
            made = "".join(_character(dice) for _ in range(dice.randint(2, 10)))
        else:  # characters of all Unicode beside blanks, letters and digits
            made = "".join(dice.choice((_character(dice), dice.choice(" aA1'!\n"))) for _ in range(dice.randint(3, 12)))
        drawn[made] = None
    return list(drawn)[:count]


def _character(dice: random.Random) -> str:
    """A character that is assigned; half of them from the first plane's alphabets."""
    while True:
        number = dice.randrange(0x3000) if dice.random() < 0.5 else dice.randrange(0x32000)
        if unicodedata.category(chr(number)) not in {"Cn", "Cs", "Co"}:
            return chr(number)


def characters() -> tuple[list[str], Vocabulary]:
    """Strings in which each character stands after each of `BEFORE`, and a vocabulary that shows where they are cut.

    Of alphabets of thousands of characters, whose characters are alike, one of 61 is taken.
    """
    assigned = [
        chr(number)
        for number in range(0x80, 0x32000)
        if unicodedata.category(chr(number)) not in {"Cn", "Cs", "Co"}
        and (number % 61 == 0 or not any(first <= number <= last for first, last in LARGE))
    ]
    pairs = [before + each for before in BEFORE for each in assigned]
    texts = ["\n@\n".join(part) for part in (pairs[at : at + 16] for at in range(0, len(pairs), 16))]
    firsts = sorted({LETTERS[each.encode()[0]] for each in assigned})
    lasts = sorted({LETTERS[before.encode()[-1]] for before in BEFORE})
    joined = [last + first for last in lasts for first in firsts]
    return texts, Vocabulary([*sorted(BYTES), *joined, END], [" ".join(each) for each in joined])


def pieces(name: str, text: str) -> list[str]:
    """What draftproof splits a text into, before merges."""
    return [text[start:end] for _, (start, end) in pre_tokenizer(KNOWN[name]).pre_tokenize_str(text)]


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and merges as a GGUF file has them."""

    tokens: Sequence[str]
    merges: Sequence[str]

    @classmethod
    def of(cls, path: Path) -> Vocabulary:
        """Those of a file."""
        file = GGUFFile(path)
        return cls(file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.merges"))

    @classmethod
    def learnt(cls, words: Iterable[str]) -> Vocabulary:
        """One in which each word is a token that merges make, but those of `WHOLE` are tokens without merges."""
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        trainer = trainers.BpeTrainer(
            vocab_size=10**7, min_frequency=0, initial_alphabet=sorted(BYTES), show_progress=False
        )
        made.train_from_iterator(words, trainer)
        learnt = json.loads(made.to_str())["model"]
        whole = {_in_letters(word) for word in WHOLE}
        merges = [" ".join(pair) for pair in learnt["merges"] if "".join(pair) not in whole]
        return cls([*dict.fromkeys([*learnt["vocab"], *sorted(whole)]), END], merges)


def _in_letters(text: str) -> str:
    """A text in the letters that stand for bytes in tokens."""
    return "".join(LETTERS[byte] for byte in text.encode())


def write_model(path: Path, pre: str, vocabulary: Vocabulary) -> None:
    """A model of one layer with random weights, and a tokenizer."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary.tokens)
    kinds = [TokenType.CONTROL if token == END else TokenType.NORMAL for token in vocabulary.tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(len(vocabulary.tokens) - 1)
    writer.add_eos_token_id(len(vocabulary.tokens) - 1)
    dice = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", dice.standard_normal((len(vocabulary.tokens), WIDTH), dtype=np.float32))
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{part}.weight", dice.standard_normal((WIDTH, WIDTH), dtype=np.float32))
    for part in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{part}.weight", np.ones(WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def theirs(path: Path, texts: Sequence[str]) -> tuple[str, list[list[int]]] | None:
    """The build of llama.cpp and its tokens, last those of the first text with special tokens; None: no such file."""
    found = llama_cpp_tokens.ask(Question(str(path), texts, texts[:1]))
    return None if found is None else (found.build, [*found.texts, *found.special])


def ours(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of draftproof, last those of the first text with special tokens."""
    made = read_tokenizer(GGUFFile(path))
    assert made is not None
    return [*(made(text, add_special_tokens=False)["input_ids"] for text in texts), made(texts[0])["input_ids"]]


def shown(tokens: Sequence[int], vocabulary: Vocabulary) -> list[str]:
    """The tokens as texts; a part of a character is shown as an escape."""
    texts = [vocabulary.tokens[each] for each in tokens]
    words = (text.encode() if text == END else bytes(BYTES[letter] for letter in text) for text in texts)
    return [word.decode(errors="backslashreplace") for word in words]


def compare(name: str, texts: Sequence[str], vocabulary: Vocabulary, folder: Path) -> dict[str, Any]:
    """How many strings differ, the first of them with both splits, and llama.cpp's pieces of all."""
    path = folder / "model.gguf"
    write_model(path, name, vocabulary)
    asked = theirs(path, texts)
    if asked is None:
        return {"name": name, "differ": len(texts), "refused": True}
    build, right = asked
    found = ours(path, texts)
    wrong = [at for at in range(len(right)) if right[at] != found[at]]
    made: dict[str, Any] = {"name": name, "build": build, "differ": len(wrong)}
    if wrong:
        splits = {"llama.cpp": shown(right[wrong[0]], vocabulary), "draftproof": shown(found[wrong[0]], vocabulary)}
        made["first"] = {"text": [*texts, texts[0]][wrong[0]], **splits}
    return {**made, "bos": len(right[-1]) > len(right[0]), "pieces": [shown(each, vocabulary) for each in right[:-1]]}


def frozen(found: Sequence[dict[str, Any]], texts: Sequence[str]) -> dict[str, Any]:
    """The pieces of all names in some short strings, as a small file: names whose pieces are the same share them.

    The strings are first those that tell names apart that all before them do not, then those that follow in length.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        kept = [pieces for text, pieces in zip(texts, each["pieces"], strict=True) if not _whole(text)]
        groups.setdefault(json.dumps(kept), []).append(each)
    every = [group[0]["pieces"] for group in groups.values()]
    order = sorted((at for at, text in enumerate(texts) if not _whole(text)), key=lambda at: len(texts[at]))
    chosen, classes = [], [""] * len(every)
    for at in order:
        finer = [before + json.dumps(pieces[at]) for before, pieces in zip(classes, every, strict=True)]
        if len(set(finer)) > len(set(classes)):
            chosen.append(at)
            classes = finer
    chosen += [at for at in order if len(texts[at]) > 12 and at not in chosen][: FROZEN - len(chosen)]
    splits = []
    for at in chosen:
        ways: dict[str, list[int]] = {}
        for group, pieces in enumerate(every):
            ways.setdefault(json.dumps(pieces[at]), []).append(group)
        splits.append([{"pieces": json.loads(way), "groups": of} for way, of in ways.items()])
    whole = texts.index(WHOLE[1])
    return {
        "made_by": found[0]["build"],
        "groups": [[each["name"] for each in group] for group in groups.values()],
        "whole_words": [each["name"] for each in found if len(each["pieces"][whole]) == 1],
        "bos": [each["name"] for each in found if each["bos"]],
        "splits": splits,
    }


def _whole(text: str) -> bool:
    """Whether a text holds one of the tokens that no merges make, whose tokens are no pieces."""
    return any(word.strip() in text for word in WHOLE)


def _parsed() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="pre-tokenizers; all that are known without any")
    parser.add_argument("--strings", type=int, default=2000, metavar="N", help="how many are compared")
    parser.add_argument("--seed", type=int, default=0, help="of the strings")
    parser.add_argument("--vocabulary", type=Path, metavar="GGUF", help="takes the tokens and merges of this file")
    parser.add_argument("--characters", action="store_true", help="compares characters of all Unicode")
    parser.add_argument("--freeze", type=Path, metavar="PATH", help="writes the pieces of some strings of each kind")
    parser.add_argument("--files", type=Path, nargs="+", metavar="GGUF", help="compares whole tokenizers of files")
    parser.add_argument("--out", type=Path, help="with --files: writes OUT.md and OUT.json")
    parser.add_argument("--json", action="store_true", help="prints the figures as JSON")
    parser.add_argument("-q", "--quiet", action="store_true", help="prints no progress")
    options = parser.parse_args()
    if options.files is not None and (options.names or options.characters or options.freeze or options.vocabulary):
        parser.error("--files compares whole tokenizers: leave out names, --characters, --freeze and --vocabulary")
    if unknown := [name for name in options.names if name not in KNOWN]:
        parser.error(f"not known: {', '.join(unknown)}; known are {', '.join(sorted(KNOWN))}")
    if options.characters and (options.freeze or options.vocabulary):
        parser.error("--characters has strings and a vocabulary of its own: leave out --freeze and --vocabulary")
    return options


def main() -> int:
    """Compare as the command line says."""
    options = _parsed()
    names = options.names or sorted(KNOWN)
    texts = strings(options.strings, options.seed)
    if options.files is not None:
        return compare_vocabularies.main(options, texts)
    if options.characters:
        texts, vocabulary = characters()
    elif options.vocabulary is None:
        say(options, "learning merges")
        made = [pieces(name, text) for name in {KNOWN[name]: name for name in names}.values() for text in texts]
        words = {each for every in made for each in (*every, *map("".join, itertools.pairwise(every)))}
        vocabulary = Vocabulary.learnt(sorted(words))
    else:
        vocabulary = Vocabulary.of(options.vocabulary)
    say(options, f"{len(texts)} strings, {len(vocabulary.tokens)} tokens")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found.append(compare(name, texts, vocabulary, Path(folder)))
            if not options.json:
                print(line(found[-1]), flush=True)
    if options.json:
        shorter = [{key: value for key, value in each.items() if key != "pieces"} for each in found]
        print(json.dumps({"names": shorter}))
    differ = any(each["differ"] for each in found)
    if options.freeze is not None and not differ:
        with whole_file(options.freeze) as path:
            path.write_text(json.dumps(frozen(found, texts), indent=None, separators=(",", ":")) + "\n")
    return int(differ)


def line(found: dict[str, Any]) -> str:
    """What is printed about a name."""
    if found.get("refused"):
        return f"{found['name']}: llama.cpp does not load it"
    said = f"{found['name']}: {found['differ']} differ"
    return (
        said
        if not found["differ"]
        else said + "".join(f"\n    {key}: {found['first'][key]!r}" for key in found["first"])
    )


if __name__ == "__main__":
    sys.exit(main())
