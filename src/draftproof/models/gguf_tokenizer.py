"""Tokenizers of GGUF files: byte-level ones, SentencePiece's with scores, and Gemma 4's, as llama.cpp reads them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from draftproof.errors import UserError, reason
from draftproof.models.gguf import BYTE_LEVEL, known_of, pre_tokenizer
from draftproof.models.gguf_file import GGUFFile
from draftproof.models.gguf_roles import HIDDEN, WHOLE, TokenType, role_token, token_types
from draftproof.models.gguf_text import (
    BYTES,
    SPACE,
    Scored,
    TextRules,
    Whole,
    Wholes,
    byte_level_piece,
    byte_piece,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SCORED = "llama"  # the model of SentencePiece's tokenizers with scores, whose words begin with SPACE
_MERGED = "gemma4"  # the model of tokenizers with merges of characters, where blanks are SPACE
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # names in chat templates and in the file
_KEEP_BLANKS = ("<unk>", "<s>", "<|endoftext|>")  # of Phi 3: blanks after them are text


@dataclass(frozen=True)
class FileTokenizer:
    """The tokenizer of a file."""

    tokenizer: Tokenizer  # of the library `tokenizers`
    rules: TextRules  # what llama.cpp does otherwise
    eos_token_id: int | None  # as the file names them
    bos_token_id: int | None
    special_tokens: dict[str, str]  # as chat templates get them, `bos_token` and others that are never split
    chat_template: str | None  # in Jinja's language; None where there is none

    def for_transformers(self) -> Any:
        """The same as a tokenizer of transformers."""
        from draftproof.models.gguf_transformers import TransformersTokenizer

        made: Any = TransformersTokenizer(tokenizer_object=self.tokenizer, rules=self.rules, **self.special_tokens)
        made.chat_template = self.chat_template
        return made


def read_file_tokenizer(file: GGUFFile) -> FileTokenizer:
    """The tokenizer of a file.

    Raises:
        UserError: the file has none, or one of a kind that is not read here.
    """
    kinds: dict[str, Callable[[GGUFFile, Sequence[int]], tuple[Tokenizer, Scored | None]]] = {
        BYTE_LEVEL: _byte_level,
        _SCORED: _scored,
        _MERGED: _merged,
    }
    kind = file.get("tokenizer.ggml.model")
    if kind not in kinds:
        named = "no tokenizer" if kind is None else f"the tokenizer {kind!r}"
        raise UserError(
            f"{file.path} has {named} (tokenizer.ggml.model): expected {', '.join(sorted(kinds))} (take the model's "
            "own directory or hub id)"
        )
    for key in ("tokens", "scores" if kind == _SCORED else "merges"):
        if file.get(f"tokenizer.ggml.{key}") is None:
            raise UserError(
                f"{file.path} has a tokenizer {kind!r} without tokenizer.ggml.{key}: expected one that is whole (take "
                "another conversion of the model)"
            )
    try:
        types = token_types(file)
        made, scored = kinds[kind](file, types)
        return _described(made, scored, types, file)
    except UserError:
        raise
    except Exception as cause:  # the library raises no narrower one
        raise UserError(f"cannot make the tokenizer of {file.path}: {reason(cause)}") from cause


def _byte_level(file: GGUFFile, _: Sequence[int]) -> tuple[Tokenizer, None]:
    """Byte-pair encoding of bytes, whose texts are split by an expression that the file names."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    known = known_of(file)
    parts = _vocabulary(file)
    made = Tokenizer(models.BPE(**parts, ignore_merges=known.whole_words))
    made.pre_tokenizer = pre_tokenizer(known)
    if missing := "".join(f"\\x{{{ord(letter):x}}}" for letter in BYTES if letter not in parts["vocab"]):
        # bytes without a token have none, and what stands on both sides of them is not joined
        gaps = pre_tokenizers.Split(Regex(f"[{missing}]"), "removed")
        made.pre_tokenizer = pre_tokenizers.Sequence([made.pre_tokenizer, gaps])
    made.decoder = decoders.ByteLevel()
    return made, None


def _vocabulary(file: GGUFFile) -> dict[str, Any]:
    merges: dict[tuple[str, str], None] = {}  # each once: the first one counts
    for merge in file.get("tokenizer.ggml.merges"):
        cut = merge.index(" ", 1)
        merges.setdefault((merge[:cut], merge[cut + 1 :]))
    return {"vocab": _ids(file.get("tokenizer.ggml.tokens")), "merges": list(merges)}


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    """The id of each token.

    Raises:
        ValueError: a token stands there twice.
    """
    found = {token: number for number, token in enumerate(tokens)}
    if len(found) < len(tokens):
        twice, times = Counter(tokens).most_common(1)[0]
        raise ValueError(f"expected different tokens, got {twice!r} {times} times")
    return found


def _merged(file: GGUFFile, _: Sequence[int]) -> tuple[Tokenizer, None]:
    """Byte-pair encoding of characters; what is no token is bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    made = Tokenizer(models.BPE(**_vocabulary(file), byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return made, None


def _scored(file: GGUFFile, types: Sequence[int]) -> tuple[Tokenizer, Scored | None]:
    """Pairs of tokens that are a token are joined, the best score first: merges in the order of their scores.

    The rule itself comes second, where merges are not enough.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = file.get("tokenizer.ggml.tokens")
    vocab = _ids(tokens)
    unknown = role_token(file, "unknown")
    scores = [float(score) for score in np.asarray(file.get("tokenizer.ggml.scores")).tolist()]
    merges = [(tokens[left], tokens[right]) for *_, left, right in _joins(tokens, scores, vocab)]
    unk = None if unknown is None else tokens[unknown]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    prefixed = _prefixed(file)
    steps = [normalizers.Prepend(SPACE)] if prefixed else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    ends = [decoders.Strip(" ", 1, 0)] if prefixed else []
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return made, Scored(vocab, scores) if _by_ties(vocab, scores, types) else None


def _prefixed(file: GGUFFile) -> bool:
    """Whether the first word of a text gets a blank, too."""
    return file.get("tokenizer.ggml.model") == _SCORED and bool(file.get("tokenizer.ggml.add_space_prefix", True))


def _joins(
    tokens: Sequence[str], scores: Sequence[float], vocab: Mapping[str, int]
) -> list[tuple[float, int, int, int]]:
    """Pairs of tokens that are a token, in the order in which they are joined: least score, token, left and right."""
    found = []
    for number, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[number], number, left, right))
    found.sort()
    return found


def _by_ties(vocab: Mapping[str, int], scores: Sequence[float], types: Sequence[int]) -> bool:
    """Whether tokens with equal scores could be joined in another order by merges than by the rule of scores.

    Runs of one letter, as Llama's blanks are, come out the same in any order. What is found in a text before it is
    split is never joined, but where blanks make it.
    """
    often = {score for score, times in Counter(scores).items() if times > 1}
    tied: dict[float, set[str]] = {}
    for (token, number), score in zip(vocab.items(), scores, strict=True):
        if score in often and (types[number] not in WHOLE or SPACE in token) and _is_joined(token, vocab):
            tied.setdefault(score, set()).add(token)
    return any(len(set().union(*group)) > 1 for group in tied.values() if len(group) > 1)


def _is_joined(token: str, vocab: Mapping[str, int]) -> bool:
    """Whether two other tokens make a token."""
    return any(token[:cut] in vocab and token[cut:] in vocab for cut in range(1, len(token)))


def _described(made: Tokenizer, scored: Scored | None, types: Sequence[int], file: GGUFFile) -> FileTokenizer:
    """A tokenizer with the file's special tokens and its chat template."""
    from tokenizers import AddedToken

    kind, tokens = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.tokens")
    lines = _lines(made, tokens) if kind == _MERGED else {}
    ids = {name: role_token(file, role) for name, role in _ROLES.items()}
    texts = {name: tokens[number] for name, number in ids.items() if number is not None}
    for added, of in ((made.add_special_tokens, HIDDEN), (made.add_tokens, {TokenType.USER_DEFINED})):
        chosen = [token for token, each in zip(tokens, types, strict=True) if each in of]
        added([AddedToken(each, normalized=False) for each in chosen])
    begin, end = _ends(file, ids)
    _add_ends(made, [(tokens[each], each) for each in begin], [(tokens[each], each) for each in end])
    wholes = Wholes(_wholes(file, tokens, types))
    needed = scored is not None or lines or wholes.special
    rules = TextRules(
        functools.cache(_piece(kind, tokens, types)),
        frozenset(number for number, each in enumerate(types) if each in HIDDEN),
        begin,
        end,
        prefixed=_prefixed(file),
        wholes=wholes if needed else None,
        scored=scored,
        lines=lines,
    )
    # some files name an ordinary word as the token for padding, which transformers would make special
    hidden = {name for name, number in ids.items() if number is not None and number in rules.hidden}
    named = {f"{name}_token": text for name, text in texts.items() if name in {"bos", "eos"} | hidden}
    return FileTokenizer(made, rules, ids["eos"], ids["bos"], named, file.get("tokenizer.chat_template"))


def _lines(made: Tokenizer, tokens: Sequence[str]) -> dict[str, int]:
    """Line ends that are a token together, though no merges make it."""
    lines = {token: number for number, token in enumerate(tokens) if token and not token.strip("\n")}
    return {text: number for text, number in lines.items() if made.encode(text).ids != [number]}


def _piece(kind: str, tokens: Sequence[str], types: Sequence[int]) -> Callable[[int], bytes]:
    """The bytes of a token by its id; none where there is no such token, or one without a text."""

    def of(token: int) -> bytes:
        if not 0 <= token < len(tokens):
            return b""
        text, type_ = tokens[token], types[token]
        if type_ in WHOLE:
            return text.encode()
        if type_ == TokenType.BYTE:
            return byte_piece(text)
        if type_ != TokenType.NORMAL:
            return b""
        return byte_level_piece(text) if kind == BYTE_LEVEL else text.replace(SPACE, " ").encode()

    return of


def _wholes(file: GGUFFile, tokens: Sequence[str], types: Sequence[int]) -> list[Whole]:
    """Tokens that are never split. Blanks beside some of them are dropped where llama.cpp knows a model by its name."""
    name, pre = str(file.get("general.name", "")).lower(), str(file.get("tokenizer.ggml.pre", ""))
    after, before = False, ""
    if any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")):
        before = "<mask>"
    elif "phi-3" in name or "phi3" in name:
        after = True
    elif "modern-bert" in name:
        before = "[MASK]"
    return [
        Whole(token, number, token == before, after and token not in _KEEP_BLANKS)
        for number, (token, each) in enumerate(zip(tokens, types, strict=True))
        if each in WHOLE and token
    ]


def _ends(file: GGUFFile, ids: Mapping[str, int | None]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens that stand before and after a text, where the file or else its kind of tokenizer says so."""
    kind = file.get("tokenizer.ggml.model")
    begins = kind != BYTE_LEVEL or known_of(file).bos
    begins = kind == _MERGED or file.get("tokenizer.ggml.add_bos_token", begins)  # Gemma 4's files are not asked
    ends = file.get("tokenizer.ggml.add_eos_token", False)
    bos, eos = ids["bos"] if begins else None, ids["eos"] if ends else None
    return tuple(each for each in (bos,) if each is not None), tuple(each for each in (eos,) if each is not None)


def _add_ends(made: Tokenizer, first: list[tuple[str, int]], last: list[tuple[str, int]]) -> None:
    """Let texts begin and end with tokens."""
    from tokenizers import processors

    if first or last:
        before, after = ([text for text, _ in each] for each in (first, last))
        made.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", "$B", *after], special_tokens=[*first, *last]
        )
