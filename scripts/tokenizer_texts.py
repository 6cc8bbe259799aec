"""Texts and token ids that a tokenizer is asked about, made of what its vocabulary has."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence

BLANKS = (" ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u2028", "\x0b", "\x0c", "\x1c", "\x85", "\u200b", "\ufeff")
PATTERNS = (
    "=",
    "-",
    "a",
    "0",
    "7",
    "#",
    "*",
    ".",
    "\u2581",
    "_",
    "/",
    "\u4e00",
    "\U0001f600",
    "ab",
    "\n",
    "\n ",
    "\t ",
    " \n",
)
LITERALS = (
    "<0x0A>",
    "<0xE4>",
    "\u2581",
    "\ufffd",
    "\u0120",
    "\u010a",
    "<",
    "|>",
    "</",
    "[UNK]",
    "<unk>",
    "<s>",
    "</s>",
)
CONTROLS = "".join(map(chr, [*range(1, 9), 0x0E, 0x1B, 0x7F, 0x80, 0x9F, 0xAD, 0x200D, 0x202E, 0xFFFE, 0xFFFF]))
OTHERS = (0xE000, 0xF8FF, 0x0378, 0x05FF, 0x1FFFF, 0x2FFFF, 0xE0001, 0xE0100, 0xF0000, 0x10FFFF)  # private, unassigned
JOINED = (
    "\U0001f469\u200d\U0001f469\u200d\U0001f466", "\U0001f3f3\ufe0f\u200d\U0001f308", "\U0001f1eb\U0001f1f7",
    "e\u0301\u0323", "a\u0300\u0301\u0302\u0303",
    "\u0915\u094d\u0937", "\u0e01\u0e33\u0e49", "Z\u0351\u036b\u0343", "\u1112\u1161\u11ab",
)  # fmt: skip


def texts(plain: Sequence[str], marked: Sequence[str], words: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """Texts of all kinds, always the same ones: first those that are given, half of all, then with marks inside.

    Args:
        plain: ordinary texts.
        marked: tokens that are never split.
        words: tokens of the vocabulary, as texts.
        count: how many.
        seed: of the choices.
    """
    dice = random.Random(seed)
    found = dict.fromkeys(["", *plain[: count // 2], *JOINED, *LITERALS, CONTROLS, *map(chr, OTHERS)])
    found |= dict.fromkeys(
        pattern * times for pattern in PATTERNS for times in (2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 66)
    )
    while len(found) < count:
        kind = dice.randrange(7)
        if kind == 0 and marked:  # marks beside blanks and texts
            part = (marked, BLANKS, plain, words, LITERALS)
            made = "".join(dice.choice(dice.choice(part)) for _ in range(dice.randint(2, 7)))
        elif kind == 1 and marked:  # marks that are cut or overlap
            one, two = dice.choice(marked), dice.choice(marked)
            made = one[: dice.randint(0, len(one))] + two[dice.randint(0, len(two)) :] + dice.choice(BLANKS) + one + two
        elif kind == 2:  # words of the vocabulary, joined without anything between them
            made = "".join(dice.choice(words) for _ in range(dice.randint(1, 12)))
        elif kind == 3:  # runs
            made = "".join(dice.choice(PATTERNS) * dice.randint(1, 40) for _ in range(dice.randint(1, 5)))
        elif kind == 4:  # blanks at both ends
            made = (
                dice.choice(BLANKS) * dice.randint(1, 3) + dice.choice(plain) + dice.choice(BLANKS) * dice.randint(1, 3)
            )
        elif kind == 5:  # any characters
            made = "".join(_any(dice) for _ in range(dice.randint(1, 12)))
        else:
            made = dice.choice(JOINED) + dice.choice(plain) + dice.choice(LITERALS) + dice.choice(CONTROLS)
        found[made] = None
    long = [" ".join(plain[:400]), "".join(words[:: max(1, len(words) // 2000)]), "x" * 5000, " " * 3000 + "y"]
    return [*list(found)[: count - len(long)], *long]


def _any(dice: random.Random) -> str:
    """Any character, assigned or not, but half of a pair."""
    while True:
        number = dice.choice((dice.randrange(0x250), dice.randrange(0x3000), dice.randrange(0x110000)))
        if unicodedata.category(chr(number)) != "Cs":
            return chr(number)


def rows(size: int, byte_tokens: dict[int, int], special: Sequence[int], count: int, seed: int = 0) -> list[list[int]]:
    """Rows of token ids: any tokens, bytes of characters that are cut anywhere, bytes that are no characters.

    Args:
        size: of the vocabulary.
        byte_tokens: the token of each byte; empty where not each has one.
        special: tokens that are no ordinary ones.
        count: how many rows.
        seed: of the choices.
    """
    dice = random.Random(seed)
    found: list[list[int]] = [[]]
    while len(found) < count:
        row: list[int] = []
        for _ in range(dice.randint(1, 4)):
            kind = dice.randrange(5 if byte_tokens else 2)
            if kind == 0 or (kind == 1 and not special):
                row += [dice.randrange(size) for _ in range(dice.randint(1, 6))]
            elif kind == 1:
                row += [dice.choice(special) for _ in range(dice.randint(1, 2))]
            elif kind == 2:
                row += [byte_tokens[byte] for byte in "\u00e9\u4f60\U0001f600\n a".encode()]
            elif kind == 3:
                content = "\u00e9\u4f60\n\U0001f600 a".encode()
                start = dice.randrange(len(content))
                row += [byte_tokens[byte] for byte in content[start : start + dice.randint(1, 5)]]
            else:
                row += [byte_tokens[dice.randrange(256)] for _ in range(dice.randint(1, 4))]
        found.append(row)
    return found
