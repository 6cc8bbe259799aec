"""Trained target and draft models that ship in the wheel, so that everything can be tried without a download.

`target/` is stories260K (MIT, see LICENSE.stories260K): a Llama of 5 layers, width 64, 8 query and 4 key/value heads, a
vocabulary of 512 and a context of 512, trained on short children's stories. `draft/` is its first 4 layers under the
same norm, embedding and tokenizer; at temperature 1 its first drafted token is accepted 57% of the time (mean of
sum min(p, q) over 32 640 positions of TinyStories). Both are directories in the format of transformers, in float32. A
story ends with token 1 (`<s>`, which also begins the next one), so both models count it as an end token besides token
2 (`</s>`), which was never trained. `scripts/made_once/convert_stories260k.py` made both.

`fast_draft/` imitates the same target with one layer of width 192. It was trained in this project: 73% of its tokens
are accepted, and it costs less than `draft/`. `stories/target` and `stories/draft` are a larger pair, trained in this
project on TinyStories and on stories that stories260K wrote; `draftproof generate` uses this pair by default.
docs/results/trained_pair.md says how these three models were made with `draftproof train drafter`, and gives their
figures. The heads of `draft/` are in `heads/`, those of `stories/draft` in `stories/heads/`.
`smollm2_feature_head/` is a feature head for SmolLM2-135M-Instruct, see docs/guide/train.md.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

__all__ = [
    "draft_dir",
    "fast_draft_dir",
    "feature_head_dir",
    "heads_dir",
    "stories_draft_dir",
    "stories_heads_dir",
    "stories_target_dir",
    "target_dir",
]


def target_dir() -> Path:
    """The directory of the small target, for `from_pretrained`."""
    return _directory("target")


def draft_dir() -> Path:
    """The directory of the small target's draft model, for `from_pretrained`."""
    return _directory("draft")


def fast_draft_dir() -> Path:
    """The directory of the one-layer draft model that was trained to imitate the small target."""
    return _directory("fast_draft")


def feature_head_dir() -> Path:
    """The directory of the feature head for smollm2-135m, which was trained here."""
    return _directory("smollm2_feature_head")


def heads_dir() -> Path:
    """The directory of the heads for `draft_dir`: acceptance, ratio and approximate, named after their stoppers."""
    return _directory("heads")


def stories_target_dir() -> Path:
    """The directory of the larger target."""
    return _directory("stories") / "target"


def stories_draft_dir() -> Path:
    """The directory of the draft model that imitates the larger target."""
    return _directory("stories") / "draft"


def stories_heads_dir() -> Path:
    """The directory of the heads for `stories_draft_dir`, with the same names as in `heads_dir`."""
    return _directory("stories") / "heads"


def _directory(name: str) -> Path:
    return Path(str(resources.files(__name__) / name))
