"""Pre-tokenizers of GGUF files by name: the expressions that split a text before tokens are looked for.

A GGUF file has the tokens and merges of a byte-level tokenizer, but only the name of its pre-tokenizer
(`tokenizer.ggml.pre`). Transformers knows some of these names and reads all others as GPT-2's. Here each name demands
what llama.cpp makes of it (`scripts/compare_tokenizers.py` compares the tokens), and a name that is not known is an
error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftproof.errors import UserError
from draftproof.models.gguf_file import GGUFFile

BYTE_LEVEL = "gpt2"  # the model of byte-level tokenizers; others have no pre-tokenizer to name
UNNAMED = "default"  # what llama.cpp takes where a file has no name, or an empty one

_CONTRACTIONS = "(?:'[sStTmMdD]|'[rR][eE]|'[vV][eE]|'[lL][lL])"
_NO_WORD = r"[^\r\n\p{L}\p{N}]?"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MARKED = r"[\p{L}\p{M}]+"
_FROM_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*\z)"  # of a number: groups of three from its end
_ASCII_THREES = "[0-9][0-9][0-9]"


def _words(
    digits: str,
    *,
    before: str = f"{_CONTRACTIONS}|",
    letters: str = r"\p{L}+",
    no_signs: str = r"\s\p{L}\p{N}",
    ends: str = r"[\r\n]*",
    blanks: str = _BLANKS,
) -> str:
    """The expression of Llama 3 and similar models: words with a sign before them, digits, signs, blanks.

    Alternatives `before` come first; `letters` are a word without its sign, and `no_signs` characters that are no
    signs.
    """
    return rf"{before}{_NO_WORD}{letters}|{digits}| ?[^{no_signs}]+{ends}|{blanks}"


def _cases(digits: str, ending: str = f"{_CONTRACTIONS}?", letters: str = r"\p{L}") -> str:
    """The expression of GPT-4o and similar models: words are cut at capitals, of which llama.cpp knows A to Z."""
    upper, lower = f"[{letters}&&[^a-z]]", f"[{letters}&&[^A-Z]]"
    either = f"{upper}*{lower}+{ending}|{_NO_WORD}{upper}+{lower}*{ending}"
    return _words(digits, before="", letters=either, ends=r"[\r\n/]*")


@dataclass(frozen=True)
class _Known:
    """What a name of a pre-tokenizer demands: expressions that split a text, each the pieces of the one before.

    `whole_words`: a word that is a token is taken without looking at merges. `bos`: a text begins with the token for
    that where the file does not say.
    """

    expressions: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False


def _known(*expressions: str, whole_words: bool = False, bos: bool = False) -> _Known:
    return _Known(expressions, whole_words, bos)


_ONES, _THREES = _words(r"\p{N}"), _words(r"\p{N}{1,3}")

# Falcon's signs; `default` has them without the grave accent.
_FALCON = r"[\p{P}$+<=>^~|`]+"

# BLOOM's words; a blank belongs to the word after it.
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

# DeepSeek's. The letters of its first model are a list: those with cases of an early Unicode, without the Georgian and
# some others. Its signs have the letters A to Z among them, and its Chinese ones most alphabets of Asia.
_DEEPSEEK_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2d\ua790-\ua7ff\uab30-\uab6f"
    r"\x{10570}-\x{105bf}\x{10d50}-\x{10d8f}\x{16e40}-\x{16e7f}\x{1d400}-\x{1dfff}]]"
)
_DEEPSEEK_SIGNS = r"[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002]+"
_DEEPSEEK_CHINESE = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff&&\S]+"
_CHINESE = r"[\u4e00-\u9fa5\u3040-\u30ff]+"
_ASCII_SIGNS = r"[!-/:-@\[-`{-~]"


def _deepseek3(no_word: str = "", *, ends: str = r"[\r\n]*", blanks: str = _BLANKS) -> str:
    """The last expression of DeepSeek V3: words of letters and marks, after an ASCII sign of letters alone."""
    words = rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}{no_word}]?{_MARKED}"
    return rf"{words}| ?[\p{{P}}\p{{S}}]+{ends}|{blanks}"


# Scripts without blanks between words, as Trinity (afmoe) takes them apart.
_WITHOUT_BLANKS = (
    r"[\u4e00-\ufaff\u3400-\u4dbf\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    r"\u1780-\u17ff\u1000-\u109f\u1100-\u11ff]+"
)
_YOUTU = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    rf"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_CHINESE}"
)
_HAN = r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\x{20000}-\x{2a6df}\x{2a700}-\x{2ebef}\x{2f800}-\x{2fa1f}"
_JAIS_BLANKS = "|".join(rf"\s{{{1 << power}}}{after}" for after in (r"(?!\S)", "") for power in range(9, -1, -1))

KNOWN = {
    **dict.fromkeys(
        (
            "gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "granite-docling", "gigachat", "a.x-4.0",
            "mellum", "modern-bert", "roberta-bpe", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de",
            "jina-v2-code",
        ),
        _known(_GPT2),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        _known(r"\p{N}", _GPT2),
    ),
    **dict.fromkeys(
        (
            "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
        ),
        _known(_THREES, whole_words=True, bos=True),
    ),
    **dict.fromkeys(("glm4", "glm5"), _known(_THREES, whole_words=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _known(_THREES)),
    "minicpm5": _known(r"\p{N}{1,3}", _THREES, whole_words=True),
    "jais-2": _known(_words(r"\p{N}{1,3}", blanks=rf"\s*[\r\n]+|{_JAIS_BLANKS}")),
    **dict.fromkeys(
        (
            "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "megrez", "bailingmoe", "bailingmoe2",
            "llada-moe", "hunyuan", "grok-2", "solar-open",
        ),
        _known(_ONES),
    ),
    "qwen35": _known(_words(r"\p{N}", letters=_MARKED, no_signs=r"\s\p{L}\p{M}\p{N}")),
    "seed-coder": _known(_words(r"\p{N}", ends="")),
    "ufakzeka": _known(_words(r"\p{N}", before="")),
    "laguna": _known(r"\n+", _ONES),
    "exaone-moe": _known(_words(r"\p{N}", letters=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", ends=r"[\r\n/]?")),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _known(_cases(r"\p{N}{1,3}"))),
    "granite-embed-multi-97m": _known(_cases(r"\p{N}{1,3}", letters=r"\p{L}\p{M}"), whole_words=True),
    "tekken": _known(_cases(r"\p{N}", ""), whole_words=True, bos=True),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"),
        _known(_words(r"\p{N}+", before="", letters=f"{_MARKED}{_CONTRACTIONS}?", ends=r"[\r\n/]*"), _FROM_RIGHT),
    ),
    "youtu": _known(
        _YOUTU,
        _words(r"\p{N}", before="", letters=f"{_MARKED}{_CONTRACTIONS}?", ends=r"[\r\n/]*"),
        whole_words=True,
    ),
    "kimi-k2": _known(
        _words(r"\p{N}{1,3}", before=f"[{_HAN}]+|", letters=rf"[\p{{L}}&&[^{_HAN}]]+{_CONTRACTIONS}?")
    ),
    "deepseek-llm": _known(
        r"[\r\n]", rf"\s?{_DEEPSEEK_LETTERS}+", rf"\s?{_DEEPSEEK_SIGNS}", r"\s+$", _DEEPSEEK_CHINESE, r"\p{N}+"
    ),
    "deepseek-coder": _known(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CHINESE, r"\p{N}"),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _known(r"\p{N}{1,3}", _CHINESE, _deepseek3())
    ),
    "spark2_5": _known(r"\p{N}", _CHINESE, _deepseek3(ends="", blanks=r"[\r\n]|\s+(?!\S)|\s+")),
    "afmoe": _known(r"(?<=\p{N})(?=(?:\p{N}{3})*(?!\p{N}))", _WITHOUT_BLANKS, _deepseek3(r"\p{N}")),
    "falcon": _known(_FALCON, _GPT2, _ASCII_THREES),
    "default": _known(_FALCON.replace("`", ""), _GPT2, r"\p{N}+", _ASCII_THREES),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _known(_BLOOM)),
    "viking": _known(_BLOOM, r"\p{N}"),
    "superbpe": _known(r"\p{N}+", r"(?=([0-9]{3})+(?![0-9]))"),
    "chameleon": _known(
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
        bos=True,
    ),
}  # fmt: skip
"""What names demand, as llama.cpp reads them, also where the model's own tokenizer splits some text otherwise."""


def known_of(file: GGUFFile) -> _Known:
    """What the name in a file with a byte-level tokenizer demands."""
    name = file.get("tokenizer.ggml.pre") or UNNAMED
    if name not in KNOWN:
        raise UserError(
            f"{file.path} names the pre-tokenizer {name!r} (tokenizer.ggml.pre), which is not known here: its numbers, "
            f"blanks and signs could get other tokens than the model was trained with; known are "
            f"{', '.join(sorted(KNOWN))}: take the model's own directory or hub id"
        )
    return KNOWN[name]


def pre_tokenizer(known: _Known) -> Any:
    """What splits a text, of the library `tokenizers`."""
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in known.expressions]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
