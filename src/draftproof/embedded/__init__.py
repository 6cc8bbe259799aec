"""Real trained targets and drafts that ship in the wheel, so that everything can be tried without a download.

Knows: where the files lie. Does not know: how to load them.

`target/` is stories260K (MIT, see LICENSE.stories260K): a Llama of 5 layers, width 64, 8 query and 4 key/value heads, a
vocabulary of 512 and a context of 512, trained on short children's stories. `draft/` is its first 4 layers under the
same norm, embedding and tokenizer; at temperature 1 its first drafted token is accepted 57% of the time (mean of
sum min(p, q) over 32 640 positions of TinyStories). Both are directories in Hugging Face form, in float32. A story ends
with token 1 (`<s>`, which also begins the next one), so both count it as an end token beside the untrained 2 (`</s>`).
`scripts/convert_stories260k.py` made them.

`fast_draft/` imitates the same target in one layer of width 192 and was trained here: 73% of its tokens are accepted,
and it costs less than `draft/`. `stories/target` and `stories/draft` are a larger pair, trained here on TinyStories and
on stories that stories260K wrote; `draftproof generate` uses it where no other is named. docs/results/trained_pair.md
says how all three were made with `draftproof train drafter`, and what they are worth. The heads of `draft/` are in
`heads/`, those of `stories/draft` in `stories/heads/`. `smollm2_feature_head/` drafts for SmolLM2-135M-Instruct.
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
    """The directory of the embedded target, for `from_pretrained`."""
    return _directory("target")


def draft_dir() -> Path:
    """The directory of the embedded draft, for `from_pretrained`."""
    return _directory("draft")


def fast_draft_dir() -> Path:
    """The directory of the one-layer draft that was trained to imitate the embedded target."""
    return _directory("fast_draft")


def feature_head_dir() -> Path:
    """The directory of the feature head for smollm2-135m, which was trained here."""
    return _directory("smollm2_feature_head")


def heads_dir() -> Path:
    """The directory of the draft's heads: acceptance, ratio and approximate, each for the stopper of that name."""
    return _directory("heads")


def stories_target_dir() -> Path:
    """The directory of the target that was trained here."""
    return _directory("stories") / "target"


def stories_draft_dir() -> Path:
    """The directory of the draft that imitates it."""
    return _directory("stories") / "draft"


def stories_heads_dir() -> Path:
    """The directory of that draft's heads, named as in `heads_dir`."""
    return _directory("stories") / "heads"


def _directory(name: str) -> Path:
    return Path(str(resources.files(__name__) / name))
