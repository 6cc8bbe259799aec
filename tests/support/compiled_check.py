"""Compiled logits against lean ones, as a program: the compiler cannot see through the type checks that tests run with.

python tests/support/compiled_check.py one|batch
"""

import sys

import torch

from draftproof.backends.base import Feed
from draftproof.backends.lean import compiled
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.lean.compiled import WIDEST, CompiledBackend
from draftproof.tree import TokenTree
from support.helpers import CONFIGS, random_model

TREE = TokenTree(torch.tensor([7, 3, 11, 2]), (-1, -1, 0, 1))
LONG = [(5 * place) % 97 for place in range(WIDEST + 20)]
READS = {
    "one": [[(0, LONG, None)], [(0, [9], None)], [(0, [4], TREE)], [(0, [1, 2, 3], None)], [(0, [6], None)]],
    "batch": [
        [(0, [5, 9, 2], None), (1, [3, 1, 4, 1, 5, 9, 2, 6], None), (2, [8], None)],
        [(0, [9], None), (1, [7], None), (2, [4], None)],
        [(0, [9, 8], TREE), (1, [7], TREE), (2, [4], None)],
        [(0, [9], None), (2, [4], None)],  # no neighbours in the cache
    ],
}
# A prompt is too wide for the program, rows must be neighbours, and all else is its own.
BY_PROGRAM = {"one": [False, True, True, True, True], "batch": [True, True, True, False]}


def main(what):
    """Both read the same feeds: (session number, tokens, tree); tails are forgotten after each."""
    config = CONFIGS["mistral" if what == "one" else "gemma3"]()  # windows of 7 and 6: masks matter
    if what == "one":
        config.num_hidden_layers = 1
    made = CompiledBackend(random_model(config), name="model"), LeanBackend(random_model(config), name="model")
    call, passes = compiled.Program.__call__, []

    def counted(self, layout, cache):
        found = call(self, layout, cache)
        passes.append(layout)
        return found

    compiled.Program.__call__ = counted
    sessions = [[backend.open() for _ in range(3)] for backend in made]
    for read, own_way in zip(READS[what], BY_PROGRAM[what], strict=True):
        passes.clear()
        outputs = [
            backend.forward([Feed(own[number], tokens, tree) for number, tokens, tree in read], hidden=True)
            for backend, own in zip(made, sessions, strict=True)
        ]
        assert bool(passes) is own_way, read
        for found, expected in zip(*outputs, strict=True):
            assert torch.allclose(found.logits, expected.logits, atol=1e-4), read
            assert torch.allclose(found.hidden, expected.hidden, atol=1e-4), read
        for session in [session for own in sessions for session in own]:
            session.keep(session.stem)
    sys.stdout.write("equal\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
