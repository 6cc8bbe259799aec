"""Drafters over four tokens, one of each kind, and the rules that constraints of outputs are enumerated with."""

from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.sampled_tree import SampledTreeDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.stoppers.fixed import FixedLength
from draftproof.testing import TableModel

VOCAB = 4


def model(**options):
    return ModelDrafter(DraftModel(TableModel(VOCAB, 9), vocab_size=VOCAB, **options), FixedLength(2))


DRAFTERS = {
    "none": lambda: None,
    "model": model,
    "hot": lambda: model(temperature=3.0),
    "suffix": lambda: SuffixDrafter(3, threshold=0.0, shared=False),
    "tree": lambda: SampledTreeDrafter(DraftModel(TableModel(VOCAB, 9), vocab_size=VOCAB), FixedLength(1), chains=2),
}
PAIRS = [
    ("none", "block"),
    ("model", "block"),
    ("model", "token"),
    ("hot", "block"),
    ("suffix", "block"),
    ("suffix", "token"),
    ("tree", "trie_block"),
]
