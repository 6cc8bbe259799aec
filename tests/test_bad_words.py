"""Bad words: the tree finds what a search through all of them finds, and they are encoded once for many prompts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof import SamplingParams
from draftproof.bad_words import BadWords
from support.serving import STORY, small_engine

TOKENS = st.integers(0, 3)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=6), max_size=30)


def search(words, seen):
    """The tokens that complete a word of several tokens, one word at a time."""
    return {
        word[-1] for word in words if 1 < len(word) <= len(seen) + 1 and seen[len(seen) - len(word) + 1 :] == word[:-1]
    }


@settings(max_examples=500)
@given(WORDS, st.lists(TOKENS, max_size=12), st.integers(0, 12))
def test_the_tree_finds_what_a_search_finds(words, seen, split):
    found = BadWords(words).completing(seen[:split], seen[split:])
    assert len(set(found)) == len(set(search(words, seen)))
    assert set(found) == search(words, seen)


def test_the_longest_words_that_share_all_but_their_end():
    """A tree by recursion, or one that copies beginnings, would not end."""
    longest = list(range(5000))
    words = BadWords([longest[: size + 2] for size in range(4000)])
    assert words.completing(longest[:2000]) == [2000]
    many = BadWords([[*longest, each] for each in range(4000)])
    assert sorted(many.completing(longest)) == list(range(4000))
    assert many.completing(longest[1:]) == []


def test_what_a_set_of_them_says():
    words = BadWords([[5], [1, 2], [5], [9, 4, 3]])
    assert words.sequences == ((5,), (1, 2), (9, 4, 3))
    assert (words.single, words.several, words.longest, words.bounds) == ((5,), True, 2, (1, 9))
    assert not BadWords()
    assert BadWords().completing([1, 2]) == []


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_they_are_encoded_once_for_all_prompts(call, monkeypatch):
    engine = small_engine()
    read, plain = [], engine.prompts.plain
    monkeypatch.setattr(engine.prompts, "plain", lambda text: read.append(text) or plain(text))
    params = SamplingParams(bad_words=["upon a time", "girl", "little"], max_tokens=8, seed=1)
    if call == "generate":
        outputs = engine.generate([STORY] * 5, params)
        assert len({each.text for each in outputs}) == 1
        assert not {" girl", "little"} & {*outputs[0].text.split()}
    else:
        for _ in range(3):
            list(engine.stream(STORY, SamplingParams(bad_words=params.bad_words, max_tokens=2)))
    assert sorted(read) == sorted([*params.bad_words, *(f" {word}" for word in params.bad_words)])
