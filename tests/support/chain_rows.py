"""Logits of chains of tokens, and the promise that their bits do not depend on how the tokens are read."""

import torch

from draftproof.backends.base import Feed
from draftproof.tree import TokenTree


def chain(tokens):
    """A draft of these tokens; None without any."""
    return TokenTree.chain(torch.tensor(tokens)) if tokens else None


def read(target, session, tokens, drafts=()):
    """Logits after the last token and after each draft."""
    return target.forward([Feed(session, tokens, chain(list(drafts)))])[0].logits


def off(found, expected):
    """The norm of the difference, as a share of that of what is expected."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def assert_same_bits(target, ids):
    """At least ten tokens have the same logits one by one, as a chain, and beside chains of other lengths."""
    whole = read(target, target.open(), ids[:1], ids[1:])
    session = target.open()
    assert torch.equal(torch.cat([read(target, session, [token]) for token in ids]), whole), "one by one"
    sessions, cuts = [target.open() for _ in range(4)], (0, 1, 4, 9)
    for session, cut in zip(sessions[1:], cuts[1:], strict=True):
        read(target, session, ids[:cut])
    feeds = [Feed(each, ids[cut : cut + 1], chain(ids[cut + 1 :])) for each, cut in zip(sessions, cuts, strict=True)]
    for cut, output in zip(cuts, target.forward(feeds), strict=True):
        assert torch.equal(output.logits, whole[cut:]), "beside others, of other lengths"
