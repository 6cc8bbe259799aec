"""Which tokens two tokenizers share, and how one writes the tokens of another."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof import UserError
from draftproof.backends.loading.tokenization import share_of_text, shared_tokens
from draftproof.backends.translation.token_map import WIDEST, TokenContents, TokenMap, map_tokens
from support.vocabularies import TEXTS, byte_level, sentence_piece, unigram

KINDS = {
    "bytes": byte_level,
    "more bytes": functools.partial(byte_level, 500, ("<eos>", "<bos>", "<|user|>"), TEXTS[:2]),
    "pieces": sentence_piece,
    "unigram": unigram,
}
PAIRS = [(one, other) for one in KINDS for other in KINDS if one != other]


@functools.cache
def made(kind):
    return KINDS[kind]()


@functools.cache
def contents(kind):
    return TokenContents(made(kind))


@functools.cache
def between(target, draft):
    return map_tokens(contents(target), contents(draft))


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_pair_has_the_same_bytes_and_no_token_is_in_two(target, draft):
    tokens, ours, theirs = between(target, draft), contents(draft), contents(target)
    pairs = list(zip(tokens.draft_ids.tolist(), tokens.target_ids.tolist(), strict=True))
    assert len({one for one, _ in pairs}) == len({other for _, other in pairs}) == len(pairs) == len(tokens)
    assert tokens.target_ids.tolist() == sorted(tokens.target_ids.tolist())
    roles = {(ours.eos, theirs.eos), (ours.bos, theirs.bos)}
    for one, other in pairs:
        assert (one in ours.special) == (other in theirs.special)
        assert ours.bytes_of[one] == theirs.bytes_of[other] or (one, other) in roles
    assert (ours.eos, theirs.eos) in pairs
    every_byte = {bytes([each]) for each in range(256)}
    assert every_byte <= {theirs.bytes_of[other] for _, other in pairs}


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_the_draft_writes_every_token_with_its_bytes(target, draft):
    tokens, ours, theirs = between(target, draft), contents(draft), contents(target)
    shared = set(tokens.target_ids.tolist())
    for token, content in theirs.bytes_of.items():
        found = tokens.spelled(token)
        assert 1 <= len(found) <= WIDEST
        assert len(found) == 1 or token not in shared
        if token not in (theirs.eos, theirs.bos) and len(content) <= WIDEST:
            assert b"".join(ours.bytes_of[each] for each in found) == content


@settings(deadline=None, max_examples=40)
@given(st.text(max_size=40), st.sampled_from(PAIRS))
def test_the_bytes_of_any_text_are_the_same_after_translation(text, pair):
    target, draft = pair
    tokens, ours, theirs = between(target, draft), contents(draft), contents(target)
    read = made(target)(text, add_special_tokens=False)["input_ids"]
    read = [each for each in read if each not in theirs.special]
    written = [each for token in read for each in tokens.spelled(token)]
    assert b"".join(ours.bytes_of[each] for each in written) == b"".join(theirs.bytes_of[each] for each in read)


def test_the_bytes_of_tokens_are_those_of_the_text():
    for kind in KINDS:
        read = made(kind)
        for text in TEXTS:
            ids = read(text, add_special_tokens=False)["input_ids"]
            content = b"".join(contents(kind).bytes_of[each] for each in ids).decode()
            assert content.lstrip(" ") == text.lstrip(" ")
            assert kind == "pieces" or content == text


def test_special_tokens_are_shared_by_text_then_by_role():
    tokens = between("bytes", "more bytes")
    pairs = dict(zip(tokens.draft_ids.tolist(), tokens.target_ids.tolist(), strict=True))
    ours, theirs = contents("more bytes"), contents("bytes")
    assert pairs[ours.vocab["<|user|>"]] == theirs.vocab["<|user|>"]
    assert pairs[ours.vocab["<eos>"]] == theirs.vocab["<|end|>"]
    assert ours.vocab["<bos>"] not in pairs  # nothing has this role there
    assert tokens.spelled(10**6)  # no token at all, as a padded vocabulary can draw


def test_a_text_begins_as_the_draft_model_expects():
    assert between("bytes", "pieces").opening == (1,)
    assert between("pieces", "bytes").opening == ()


def test_a_map_is_of_different_tokens():
    with pytest.raises(ValueError, match="as many different target tokens, got 2 and 1"):
        TokenMap({0: 5, 1: 5}, lambda token: [token])
    with pytest.raises(ValueError, match="got 0 and 0"):
        TokenMap({}, lambda token: [token])


def test_a_model_with_fewer_tokens_than_its_tokenizer_is_not_asked_for_them():
    tokens = TokenMap({0: 1, 3: 2, 7: 0}, lambda token: [7, 2] if token == 4 else [7], opening=[7])
    part = tokens.within(4)
    assert part.target_ids.tolist() == [1, 2]
    assert part.opening == ()
    assert [part.spelled(each) for each in (0, 1, 2, 4, 5)] == [(0,), (0,), (3,), (2,), (0,)]


def test_too_few_shared_tokens_are_refused():
    latin, other = byte_level(texts=TEXTS[:2]), byte_level(4000, texts=["".join(map(chr, range(0x4E00, 0x5800)))])
    found = shared_tokens(latin, latin, target_name="t", draft_name="d")
    assert found is None
    shared = shared_tokens(byte_level(), latin, target_name="t", draft_name="d")
    assert 0.3 < share_of_text(shared, byte_level()) < 1
    with pytest.raises(UserError, match=r"d cannot draft for t: .*must share one tokenizer"):
        shared_tokens(big(), other, target_name="t", draft_name="d")


def big():
    """A tokenizer whose tokens are whole words."""
    from draftproof.backends.loading.tokenization import _TEXT

    return byte_level(4000, texts=[_TEXT] * 3)
