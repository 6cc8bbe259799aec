"""Random programs of session calls that every backend must get right, and the mistakes that they must find."""

import copy
import random

import torch

from draftproof.backends.base import Feed, unread
from draftproof.backends.cache import layout
from draftproof.backends.cache.sessions import SlotSession
from draftproof.tree import ROOT, TokenTree
from support.helpers import plain_rows


def off(found, expected):
    """The largest difference, as a share of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


class Program:
    """Runs operations on several sessions of one backend and checks every row; a second record of what was read.

    A row may be off by more than the tolerance only where transformers' own row is as far from float64's: two orders of
    float32 sums cannot agree better than that.
    """

    def __init__(self, under_test, *, tolerance=2e-5):
        self.backend = under_test
        self.tolerance = tolerance
        self.sessions = {}
        self.records = {}  # name -> (stem tokens, tail tokens, tail parents)
        self.rows = 0

    def session(self, name):
        if name not in self.sessions:
            self.sessions[name] = self.backend.open()
            self.records[name] = ([], [], [])
        return self.sessions[name]

    def forward(self, feeds, *, hidden=False):
        """feeds: (session name, chain tokens, node tokens, parents counted over the whole tail)."""
        made, expected = [], []
        for name, chain, nodes, parents in feeds:
            session = self.session(name)
            stem, tail, above = self.records[name]
            tree = TokenTree(torch.tensor(nodes), tuple(parents), known=len(tail)) if nodes else None
            made.append(Feed(session, chain, tree))
            stem += chain
            tail += nodes
            above += parents
            paths = [list(stem)] if chain else []
            paths += [
                stem + [tail[i] for i in path_to(above, node)] for node in range(len(tail) - len(nodes), len(tail))
            ]
            expected.append(paths)
        outputs = self.backend.forward(made, hidden=hidden)
        sequences = [path for paths in expected for path in paths]
        rows = plain_rows(self.backend.model, sequences)
        self.close_to(torch.cat([output.logits for output in outputs]), rows, 0, sequences)
        if hidden:
            self.close_to(torch.cat([output.hidden for output in outputs]), rows, 1, sequences)
        assert [len(output.logits) for output in outputs] == [len(paths) for paths in expected]
        self.rows += len(sequences)
        for name, *_ in feeds:
            self.agrees(name)

    def close_to(self, found, rows, which, sequences):
        """Whether rows are those of transformers, of logits (0) or of hidden states (1)."""
        expected = rows[which]
        assert found.shape == expected.shape
        error = off(found, expected)
        if error >= self.tolerance:
            exact = plain_rows(copy.deepcopy(self.backend.model).double(), sequences)[which]
            assert off(found, exact) < 1.5 * off(expected, exact), f"a row is off by {error:.2g}"

    def agrees(self, name):
        stem, tail, above = self.records[name]
        session = self.sessions[name]
        assert session.tokens == stem + tail
        assert (session.stem, session.length, session.tail) == (len(stem), len(stem) + len(tail), tuple(above))

    def keep(self, name, base, nodes=()):
        stem, tail, _ = self.records[name]
        self.sessions[name].keep(base, nodes)
        self.records[name] = (stem[:base] + [tail[node] for node in nodes], [], [])
        self.agrees(name)

    def close(self, name):
        self.sessions.pop(name).close()
        del self.records[name]

    def close_all(self):
        for name in list(self.sessions):
            self.close(name)


def path_to(parents, node):
    path = []
    while node != ROOT:
        path.insert(0, node)
        node = parents[node]
    return path


def read_somehow(program, draw, vocab, names):
    """One forward pass over some sessions in some order: chains where legal, new trees, or more of a tree."""
    feeds = []
    for name in draw.sample(range(names), draw.randint(1, names)):
        program.session(name)
        stem, tail, _ = program.records[name]
        size = 0 if tail else draw.choice([0, 1, 1, 2, 5, 9]) if stem else draw.randint(1, 12)
        nodes = draw.choice([0, 1, 3, 6]) if size else draw.randint(1, 6)
        parents = [draw.randint(ROOT, len(tail) + i - 1) for i in range(nodes)]
        if draw.random() < 0.3:
            parents = [len(tail) + i - 1 for i in range(nodes)]
        tokens = [draw.randrange(vocab) for _ in range(size + nodes)]
        feeds.append((name, tokens[:size], tokens[size:], parents))
    program.forward(feeds, hidden=draw.random() < 0.3)


def roll_back_somehow(program, draw, vocab):
    """keep(base), keep(base, path), unread of a related sequence, or close."""
    if not program.sessions:
        return
    name = draw.choice(list(program.sessions))
    stem, tail, parents = program.records[name]
    kind = draw.choice(["base", "path", "path", "unread", "close"])
    if kind == "base":
        program.keep(name, draw.randint(0, len(stem)))
    elif kind == "path":
        program.keep(name, len(stem), path_to(parents, draw.randint(ROOT, len(tail) - 1)))
    elif kind == "close":
        program.close(name)
    elif stem:
        tokens = [*stem[: draw.randint(0, len(stem))], *(draw.randrange(vocab) for _ in range(draw.randint(1, 3)))]
        rest = unread(program.sessions[name], tokens)
        kept = len(tokens) - len(rest)
        program.records[name] = (tokens[:kept], [], [])
        program.agrees(name)
        program.forward([(name, rest, [], [])])


def run_program(seed, under_test, *, steps=8, names=4, tolerance=2e-5):
    draw = random.Random(seed)
    program = Program(under_test, tolerance=tolerance)
    try:
        for _ in range(steps):
            read_somehow(program, draw, under_test.vocab_size, names)
            for _ in range(draw.randint(0, 3)):
                roll_back_somehow(program, draw, under_test.vocab_size)
    finally:
        program.close_all()
    return program.rows


class Mistakes:
    """Ways to get masks, positions and moves wrong, to show that the programs see each."""

    @staticmethod
    def mask_one_slot_short(patch):
        right = layout.Layout._limits
        patch.setattr(layout.Layout, "_limits", lambda self, row: [max(end - 1, 0) for end in right(self, row)])

    @staticmethod
    def mask_one_slot_far(patch):
        right = layout.Layout._limits
        patch.setattr(layout.Layout, "_limits", lambda self, row: [end + 1 for end in right(self, row)])

    @staticmethod
    def siblings_seen(patch):
        seen = property(lambda tree: torch.ones(len(tree), len(tree), dtype=torch.bool).tril())
        patch.setattr(TokenTree, "visible", seen)

    @staticmethod
    def nodes_positioned_by_slot(patch):
        patch.setattr(
            layout, "feed_depths", lambda feed: [len(feed.session.tail) + i + 1 for i in range(len(feed.tree or ()))]
        )

    @staticmethod
    def path_left_where_it_was(patch):
        patch.setattr(SlotSession, "_gather", lambda *_: None)

    @staticmethod
    def window_one_too_wide(patch):
        right = layout.Layout.mask
        patch.setattr(layout.Layout, "mask", lambda self, window, dtype: right(self, window and window + 1, dtype))
