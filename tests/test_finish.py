"""The pieces of a text are together the whole text, and a block of tokens ends where single tokens would end."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftproof.finish import Cutter, Finish, TextDecoder, overlap
from draftproof.sampling import SamplingParams
from draftproof.server.tools import ToolParams


def wrap(core: Tokenizer) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<|x|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")  # noqa: S106


def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer like that of GPT-2: 256 bytes and a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("ð", "Ł")]
    vocab = {token: i for i, token in enumerate(alphabet + [left + right for left, right in merges])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return wrap(core)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Like that of Llama 2: words with a leading mark, unknown characters as byte tokens, the first space stripped."""
    words = ["<unk>", "▁", "a", "b", "ab", "▁a", "▁ab", "▁▁", ".", "é", "€"]
    vocab = {token: i for i, token in enumerate(words + [f"<0x{byte:02X}>" for byte in range(256)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))  # noqa: S106
    strip = decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return wrap(core)


def metaspace() -> PreTrainedTokenizerFast:
    """A tokenizer like that of T5."""
    words = ["<unk>", "▁", "a", "▁a", "▁ab", "b", "."]
    core = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    core.decoder = decoders.Metaspace()
    return wrap(core)


def word_piece() -> PreTrainedTokenizerFast:
    """A tokenizer like that of BERT: the space belongs to the next word."""
    vocab = {token: i for i, token in enumerate(["[UNK]", "a", "b", "##a", "##b", ".", "é"])}
    core = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))  # noqa: S106
    core.decoder = decoders.WordPiece()
    return wrap(core)


TOKENIZERS = {make.__name__: cache(make) for make in (byte_level, byte_fallback, metaspace, word_piece)}


def whole(tokenizer, ids, *, skip=True) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def pieces(tokenizer, ids, *, skip=True) -> list[str]:
    decoder = TextDecoder(tokenizer, skip_special_tokens=skip)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


def ids_of(tokenizer, *tokens) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(token) for token in tokens]


def some_ids(tokenizer):
    """Ids of the tokenizer, without byte tokens below 0x80, which have their own test."""
    ids = [i for token, i in tokenizer.get_vocab().items() if not ("<0x00>" <= token <= "<0x7F>" and len(token) == 6)]
    return st.lists(st.sampled_from(sorted(ids)), max_size=16)


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_are_the_whole(name, data):
    tokenizer = TOKENIZERS[name]()
    ids, skip = data.draw(some_ids(tokenizer)), data.draw(st.booleans())
    assert "".join(pieces(tokenizer, ids, skip=skip)) == whole(tokenizer, ids, skip=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=12))
def test_any_text_is_the_same_after_encoding_and_decoding(text):
    tokenizer = TOKENIZERS["byte_level"]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids)) == whole(tokenizer, ids) == text
    tokenizer = TOKENIZERS["byte_fallback"]()
    ids = ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in text.encode()))
    assert "".join(pieces(tokenizer, ids)) == text.removeprefix(" ")


def test_an_emoji_appears_with_its_last_byte():
    tokenizer = TOKENIZERS["byte_level"]()
    ids = tokenizer.encode("a😀b", add_special_tokens=False)
    assert len(ids) == 5
    assert pieces(tokenizer, ids) == ["a", "", "", "😀", "b", ""]


def test_a_run_of_byte_tokens_waits_for_its_end():
    tokenizer = TOKENIZERS["byte_fallback"]()
    euro = ["<0xE2>", "<0x82>", "<0xAC>"]
    assert pieces(tokenizer, ids_of(tokenizer, *euro, "a")) == ["", "", "", "€a", ""]
    assert pieces(tokenizer, ids_of(tokenizer, *euro, "<0xFF>", "a")) == ["", "", "", "", "�" * 4 + "a", ""]
    assert pieces(tokenizer, ids_of(tokenizer, *euro, "<|x|>", "<0xFF>")) == [""] * 5 + ["�" * 4]


def test_a_line_feed_byte_is_shown_at_once():
    tokenizer = TOKENIZERS["byte_fallback"]()
    assert pieces(tokenizer, ids_of(tokenizer, "a", "<0x0A>", "▁a"))[:3] == ["a", "\n", " a"]
    ids = ids_of(tokenizer, "a", "<0x0A>", "<0xFF>", "b")
    assert "".join(pieces(tokenizer, ids)) == "a\n�b"  # decode gives "a��b": see the docstring of TextDecoder


def test_bytes_that_never_complete_are_flushed():
    tokenizer = TOKENIZERS["byte_level"]()
    assert pieces(tokenizer, ids_of(tokenizer, "a", "ð")) == ["a", "", "�"]


def test_skipped_tokens_do_not_lengthen_the_window():
    tokenizer = TOKENIZERS["byte_level"]()
    decoder = TextDecoder(tokenizer)
    for _ in range(100):
        assert decoder.push(tokenizer.eos_token_id) == ""
    assert not decoder._window


def test_without_a_tokenizer_there_is_no_text():
    assert pieces(None, [1, 2, 3]) == [""] * 4


# --- the cut -------------------------------------------------------------------------------------------------------


def cutter(**params) -> Cutter:
    tokenizer = TOKENIZERS["byte_level"]()
    context_left = params.pop("context_left", None)
    return Cutter(SamplingParams(**params), [tokenizer.eos_token_id], tokenizer, context_left=context_left)


def encode(text: str) -> list[int]:
    return TOKENIZERS["byte_level"]().encode(text, add_special_tokens=False)


EOS = TOKENIZERS["byte_level"]().eos_token_id


def run(ending: Cutter, blocks) -> tuple[list[int], list[str]]:
    """Pass blocks until the end; return the kept tokens and the streamed pieces."""
    kept, streamed = [], []
    for block in blocks:
        cut = ending.cut(block)
        kept += block[: cut.kept]
        streamed.append(cut.text)
        assert (cut.finish, cut.stop_reason) == (ending.finish, ending.stop_reason)
        assert cut.finish is not None or cut.kept == len(block)
        if cut.finish is not None:
            break
    return kept, streamed


def test_eos_is_kept_and_tokens_after_it_are_not():
    ending = cutter()
    kept, streamed = run(ending, [[*encode("xy"), EOS, *encode("zz")]])
    assert kept == [*encode("xy"), EOS]
    assert (streamed, ending.text, ending.finish, ending.stop_reason) == (["xy"], "xy", Finish.STOP, None)
    assert ending.count == 3


def test_ignore_eos_does_not_end_at_eos():
    ending = cutter(ignore_eos=True, max_tokens=4)
    kept, _ = run(ending, [[*encode("xy"), EOS, *encode("zz")]])
    assert (len(kept), ending.text, ending.finish) == (4, "xyz", Finish.LENGTH)


@pytest.mark.parametrize(("include", "text"), [(False, "xy"), (True, "xyz")])
def test_a_stop_token_is_the_stop_reason(include, text):
    (z,) = encode("z")
    ending = cutter(stop_token_ids=[z], include_stop_str_in_output=include)
    kept, _ = run(ending, [encode("xyzq")])
    assert (len(kept), ending.text, ending.finish, ending.stop_reason) == (3, text, Finish.STOP, z)


@pytest.mark.parametrize(("skip", "include", "text"), [(True, True, "x"), (False, False, "x"), (False, True, "x</s>")])
def test_the_text_of_eos_is_shown_only_on_request(skip, include, text):
    ending = cutter(skip_special_tokens=skip, include_stop_str_in_output=include)
    run(ending, [[*encode("x"), EOS]])
    assert ending.text == text


@pytest.mark.parametrize(("include", "text"), [(False, "hello "), (True, "hello world")])
def test_a_stop_string_spans_tokens_and_is_held_back(include, text):
    ending = cutter(stop="world", include_stop_str_in_output=include)
    kept, streamed = run(ending, [[token] for token in encode("hello worn worlds")])
    assert kept == encode("hello worn world")
    assert "wor" not in "".join(streamed[:9])
    assert "".join(streamed) == ending.text == "hello worn " + text.removeprefix("hello ")
    assert ending.stop_reason == "world"


def test_the_stop_string_completed_first_wins():
    ending = cutter(stop=["d", "lo w", "wor"])
    run(ending, [encode("hello world")])
    assert (ending.text, ending.stop_reason) == ("hel", "lo w")
    ending = cutter(stop=["c", "bc"])
    run(ending, [encode("xbc")])
    assert (ending.text, ending.stop_reason) == ("x", "bc")


def test_the_first_match_wins_inside_one_token():
    ending = cutter(stop=["b", "ab"])
    assert len(encode("ab")) == 1
    run(ending, [encode("xab")])
    assert (ending.text, ending.stop_reason) == ("x", "ab")


@pytest.mark.parametrize(("low", "text"), [(0, "x"), (1, "x"), (2, "x.y"), (3, "x.y"), (4, "x.y.z")])
def test_stop_strings_wait_for_min_tokens(low, text):
    ending = cutter(stop=".", min_tokens=low)
    run(ending, [encode("x.y.z"), [EOS]])
    assert ending.text == text


def test_eos_before_min_tokens_does_not_end():
    ending = cutter(min_tokens=3)
    kept, _ = run(ending, [[*encode("x"), EOS, *encode("y"), EOS, *encode("z")]])
    assert kept == [*encode("x"), EOS, *encode("y"), EOS]
    assert run(cutter(min_tokens=3), [[*encode("xy"), EOS, *encode("z")]])[0] == [*encode("xy"), EOS]


def test_max_tokens_and_the_context_are_limits():
    for params in ({"max_tokens": 3}, {"max_tokens": None, "context_left": 3}, {"max_tokens": 9, "context_left": 3}):
        ending = cutter(**params)
        kept, _ = run(ending, [encode("x😀")])
        assert (len(kept), ending.text, ending.finish, ending.stop_reason) == (3, "x�", Finish.LENGTH, None)
    ending = cutter(max_tokens=None)
    assert len(run(ending, [encode("x" * 300)])[0]) == 300
    assert ending.finish is None


def test_a_stop_at_the_last_token_is_a_stop():
    ending = cutter(max_tokens=2)
    run(ending, [[*encode("x"), EOS]])
    assert ending.finish is Finish.STOP
    ending = cutter(max_tokens=2, stop="y")
    run(ending, [encode("xyz")])
    assert (ending.finish, ending.text) == (Finish.STOP, "x")


def test_nothing_comes_after_the_end():
    ending = cutter(max_tokens=1)
    ending.cut(encode("x"))
    with pytest.raises(ValueError, match=r"expected no token after the end .*, got 3"):
        ending.cut([1, 2, 3])


def test_refusals():
    with pytest.raises(ValueError, match="without a tokenizer"):
        Cutter(SamplingParams(stop="x"))
    with pytest.raises(ValueError, match="expected room for 1 or more tokens after the prompt, got 0"):
        Cutter(SamplingParams(), context_left=0)


def test_without_a_tokenizer_stop_tokens_still_end():
    ending = Cutter(SamplingParams(stop_token_ids=[7]), [2])
    cut = ending.cut([5, 7, 2])
    assert (cut.kept, cut.text, cut.finish, cut.stop_reason) == (2, "", Finish.STOP, 7)
    assert f"{cut.finish}" == "stop"


IDS = st.lists(
    st.sampled_from([*encode("a"), *encode("b"), *encode("ab"), *encode(" a"), *encode("é"), *encode("€"), EOS]),
    max_size=24,
)
# Built inside the tests: the type checks of a test run draw random numbers, which strategies must not.
PARAMS = st.fixed_dictionaries(
    {
        "stop": st.lists(st.text("ab é€�", min_size=1, max_size=4), max_size=3),
        "stop_token_ids": st.sampled_from([(), tuple(encode("a"))]),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "min_tokens": st.integers(0, 6),
        "max_tokens": st.integers(6, 30) | st.none(),
    }
)


@settings(max_examples=400, deadline=None)
@given(values=PARAMS, ids=IDS, data=st.data())
def test_blocks_end_where_single_tokens_do(values, ids, data):
    tokenizer, params = TOKENIZERS["byte_level"](), SamplingParams(**values)
    alone, blocked = (Cutter(params, [EOS], tokenizer) for _ in range(2))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    blocks = [ids[i:j] for i, j in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    kept, streamed = run(alone, [[token] for token in ids])
    kept_blocked, streamed_blocked = run(blocked, blocks)
    assert kept == kept_blocked
    for name in ("text", "finish", "stop_reason", "count"):
        assert getattr(alone, name) == getattr(blocked, name)
    assert alone.count == len(kept)
    assert blocked.text.startswith("".join(streamed_blocked))
    if alone.finish is not None:
        assert "".join(streamed) == "".join(streamed_blocked) == alone.text


@settings(max_examples=200, deadline=None)
@given(values=PARAMS, ids=IDS)
def test_the_text_is_that_of_the_kept_tokens_up_to_the_stop(values, ids):
    tokenizer, params = TOKENIZERS["byte_level"](), SamplingParams(**{**values, "min_tokens": 0})
    ending = Cutter(params, [EOS], tokenizer)
    kept, _ = run(ending, [ids])
    text = whole(tokenizer, kept, skip=params.skip_special_tokens)
    assert text.startswith(ending.text)
    body = ending.text
    if params.include_stop_str_in_output and ending.stop_reason in params.stop:
        body = body.removesuffix(ending.stop_reason)
    assert not any(stop in body for stop in params.stop)


# --- forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begins", "text", "ends", "reason"),
    [
        ("", '{"a": 1}', None, None),
        ("<c>", 'say "x" <c>"y"', "say ", '"'),
        ("<c>", 'say <c>"y"', None, None),
        ("<c>", "say <c", "say ", "<c"),
        (r"\A\{", '{"a"', None, None),
        (r"\A\{", 'x {"a"', "x {", '"'),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_stop_strings_count_before_a_form_begins(begins, text, ends, reason, size):
    """However the text is split into tokens."""
    stops = ["<c", "}", '"'] if reason == "<c" else ["}", '"']
    made = ToolParams.of(SamplingParams(stop=stops, max_tokens=None), begins)
    ending = Cutter(made, [EOS], TOKENIZERS["byte_level"]())
    ids = encode(text)
    run(ending, [ids[place : place + size] for place in range(0, len(ids), size)])
    assert ending.text == (text if ends is None else ends)
    assert ending.stop_reason == reason


def test_stop_tokens_count_before_a_form_begins():
    (z,) = encode("z")
    for begins, text in (("", "xzz"), ("y", "x"), ("x", "xzz")):
        made = ToolParams.of(SamplingParams(stop_token_ids=[z], max_tokens=3), begins)
        ending = Cutter(made, [EOS], TOKENIZERS["byte_level"]())
        run(ending, [encode("xzz")])
        assert ending.text == text


def test_with_a_grammar_no_stop_string_counts():
    params = SamplingParams(grammar="json_object", stop=['"', "x"], max_tokens=None)
    ending = Cutter(params, [EOS], TOKENIZERS["byte_level"]())
    _, streamed = run(ending, [[each] for each in encode('{"x": 1}')])
    assert "".join(streamed) == ending.text == '{"x": 1}', "nothing is held back either"
    run(ending, [[EOS]])
    assert ending.finish is Finish.STOP


@settings(max_examples=300, deadline=None)
@given(stop=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3), text=st.text("ab", max_size=40))
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(stop, text):
    ending = cutter(stop=stop, max_tokens=None)
    for token in encode(text):
        cut = ending.cut([token])
        if cut.finish is not None:
            return
        assert len(ending.text) - ending._sent == max(overlap(ending.text, each) for each in stop)


def test_texts_like_their_stop_strings_take_no_longer():
    """Each beginning of each stop string was tried in each round."""
    tried = []

    class Stop(str):
        __slots__ = ()

        def startswith(self, *args):
            tried.append(args)
            return str.startswith(self, *args)

    ending = cutter(stop=["x"], max_tokens=None)
    ending._stops = tuple(Stop("a" * 250 + "b" + "a" * 200) for _ in range(4))
    ending._overlaps = [0] * 4
    for _ in range(500):
        ending.cut(encode("a"))
    assert len(tried) < 4 * 2 * 500 + 10
