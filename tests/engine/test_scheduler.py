"""Chunks of prompts, reuse of prefixes and the memory budget: the same tokens, whoever shares what with whom."""

import functools
import itertools
import random
import statistics
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed, Session, common_prefix
from draftproof.backends.cache import pages, prefix_cache
from draftproof.backends.cache.passes import PREFILL_CHUNK
from draftproof.backends.cache.prefix_cache import PrefixCache
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.generate import PlainBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.lean.snapshots import LeanSnapshotBackend
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.none import NoDrafter
from draftproof.engine.chunked_prefill import EXTRA, FIRST, LEAST, REFRESH, ChunkSize
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.memory import read_bytes
from draftproof.engine.verifier_parts import make_verifier
from draftproof.stoppers.fixed import FixedLength
from support.architectures.tiny import tiny_config, tiny_model
from support.helpers import random_model
from support.word_models import CONFIG, words


@functools.cache
def backend(kind):
    if kind == "snapshot":
        return LeanSnapshotBackend(tiny_model(tiny_config("lfm2")), name="lfm2")
    return {"hf": HFBackend, "lean": LeanBackend}[kind](random_model(CONFIG), name=kind)


@functools.cache
def draft_backend():
    return HFBackend(random_model(CONFIG, seed=1), name="small")


def drafter_for(target, spec):
    if spec == "none":
        return NoDrafter()
    if spec == "model":
        return ModelDrafter(DraftModel(draft_backend(), vocab_size=target.vocab_size), FixedLength(3))
    return make_drafter(spec, target=target, draft=None, stopper="fixed:2")


def made(kind, spec="none", *, size=7, shortest=4, **options):
    """An engine with chunks of one size, which reuses short beginnings too."""
    target = backend(kind)
    built = Engine(target, drafter_for(target, spec), make_verifier("block"), max_batch=3, **options)
    if size:
        built.scheduler.chunk_size = Fixed(size)
    if built.scheduler.prefix_cache.most:
        built.scheduler.prefix_cache.shortest = shortest
    return built


class Fixed:
    """Chunks of one size."""

    def __init__(self, size):
        self._size = size

    def size(self, _decoded, _running, _depth):
        return self._size

    def record_time(self, _seconds, _tokens, _others, _drafting, _depth):
        pass


def params(seed, *, tokens=8, greedy=False, n=1):
    return SamplingParams(
        temperature=0.0 if greedy else 1.0, seed=None if greedy else seed, max_tokens=tokens, ignore_eos=True, n=n
    )


@functools.cache
def alone(kind, spec, prompt, seed, tokens, greedy):
    """What a request gives on an engine of its own, its prompt read at once."""
    plain = made(kind, spec, size=0, prefix_reuse=False)
    return plain.generate([list(prompt)], params(seed, tokens=tokens, greedy=greedy))[0].token_ids


# --- the same tokens --------------------------------------------------------------------------------------------------


@st.composite
def traffic(draw):
    """Requests with shared beginnings: when each one comes, its prompt, its seed, when it leaves."""
    systems = [words(seed, draw(st.integers(3, 40))) for seed in range(2)]
    rows = []
    for number in range(draw(st.integers(2, 6))):
        begin = draw(st.sampled_from([[], *systems, *(prompt for _, prompt, *_ in rows)]))
        prompt = [*begin, *words(100 + number, draw(st.integers(1, 30)))]
        leaves = draw(st.one_of(st.none(), st.integers(0, 6)))
        rows.append((draw(st.integers(0, 12)), prompt, number, leaves, draw(st.booleans())))
    return rows


def run(under_test, rows, check):
    """Play the traffic, and compare what every request gave, whole or in part."""
    requests = {}
    step = 0
    while under_test.busy or len(requests) < len(rows):
        for number, (arrival, prompt, seed, _, greedy) in enumerate(rows):
            if arrival == step:
                requests[number] = under_test.add(prompt, params(seed, greedy=greedy))[0]
        for number, request in requests.items():
            leaves = rows[number][3]
            if leaves is not None and step == rows[number][0] + leaves:
                under_test.abort(request)
        under_test.step()
        step += 1
        assert step < 500, "requests end"
    for number, request in requests.items():
        check(rows[number], tuple(request.output_ids), request.finished)


@pytest.mark.grid(3)
@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("hf", "none"),
        ("hf", "model"),
        ("lean", "model"),
        ("lean", "early_exit:1"),
        ("hf", "ngram:3"),
        ("snapshot", "none"),
        ("snapshot", "model"),
    ],
)
@settings(max_examples=4, deadline=None)
@given(traffic())
def test_shared_beginnings_chunks_and_aborts_change_no_token(kind, spec, rows):
    under_test = made(kind, spec)

    def check(row, found, finished):
        _, prompt, seed, leaves, greedy = row
        expected = alone(kind, spec, tuple(prompt), seed, 8, greedy)
        assert found == expected[: len(found)]
        assert finished or leaves is not None
        assert not finished or found == expected

    run(under_test, rows, check)
    under_test.forget()
    assert under_test.target.cache.in_use == 0


@settings(max_examples=8, deadline=None)
@given(traffic())
def test_a_small_memory_changes_no_token_and_is_never_exceeded(rows):
    free = made("lean", "model")
    most = free.scheduler.budget.__class__(None, lambda: [free.target, *free.drafter.backends], lambda: 4)
    longest = max(len(prompt) for _, prompt, *_ in rows) + 8
    under_test = made("lean", "model", kv_memory=most.needed([longest, longest // 2]))
    caches = [under_test.target.cache, draft_backend().cache]
    forward, peaks, found = under_test.target.forward, [], []
    under_test.target.forward = lambda feeds, **options: (
        peaks.append(sum(cache.nbytes for cache in caches)) or forward(feeds, **options)
    )
    try:
        run(under_test, rows, lambda row, tokens, _: found.append((row, tokens)))
    finally:
        del under_test.target.forward
    under_test.forget()
    assert max(peaks, default=0) <= under_test.memory.capacity  # all may leave before anything is read
    for (_, prompt, seed, _, greedy), tokens in found:
        assert tokens == alone("lean", "model", tuple(prompt), seed, 8, greedy)[: len(tokens)]


def test_controls_a_wrong_reuse_changes_tokens(monkeypatch):
    right = PrefixCache.find

    def wrong(self, target, tokens, *more):
        found = right(self, target, tokens, *more)
        if found is not None and found.length > 8:
            found.tokens[:] = tokens[: found.length]
            for store in (found.cache._keys, found.cache._values):
                for buffer in store.values():
                    buffer[found.slot, :, 3:6] = 0.5
        return found

    system = words(1, 40)
    expected = [alone("hf", "none", (*system, *words(9 + i, 3)), i, 8, True) for i in range(4)]
    monkeypatch.setattr(PrefixCache, "find", wrong)
    with torch.inference_mode():
        found = [
            made_once.generate([[*system, *words(9 + i, 3)]], params(i, greedy=True))[0].token_ids
            for made_once in [made("hf")]
            for i in range(4)
        ]
    assert found != expected


# --- reuse ------------------------------------------------------------------------------------------------------------


def read_by(target, monkeypatch):
    """Counts the tokens that a model reads."""
    read = []
    right = target._run

    def counted(feeds, **options):
        read.extend(len(feed) for feed in feeds)
        return right(feeds, **options)

    monkeypatch.setattr(target, "_run", counted)
    return read


@pytest.mark.grid(4)
@pytest.mark.parametrize("kind", ["hf", "lean", "snapshot"])
@pytest.mark.parametrize(("reuse", "others"), [(True, 0), (True, 6), (False, 0)])
def test_a_second_turn_reads_what_is_new(monkeypatch, kind, reuse, others):
    """Also after other requests, such as those for titles and summaries that agents send beside."""
    under_test = made(kind, "model", shortest=32, prefix_reuse=reuse)
    read = read_by(under_test.target, monkeypatch)
    first = words(3, 200)
    (answer,) = under_test.generate([first], params(1))
    if others:
        under_test.generate([words(20 + number, 60) for number in range(others)], params(1))
    before = sum(read)
    kept = under_test.memory.reused_tokens
    turn = [*first, *answer.token_ids, *words(4, 10)]
    (request,) = under_test.add(turn, params(2))
    while not request.finished:
        under_test.step()
    new = sum(read) - before
    assert tuple(request.output_ids) == alone(kind, "model", tuple(turn), 2, 8, False)
    assert new < 80 if reuse else new > 200
    assert request.reused > 190 if reuse else request.reused == 0
    assert (under_test.memory.reused_tokens - kept > 2 * 190) is reuse, "the draft model's session too"


@pytest.mark.parametrize("kind", ["hf", "lean"])
def test_continuations_of_one_prompt_read_it_once(monkeypatch, kind):
    under_test = made(kind, shortest=32)
    read = read_by(under_test.target, monkeypatch)
    prompt = words(5, 150)
    outputs = under_test.generate([prompt], params(7, n=3))
    again = made(kind, size=0, prefix_reuse=False).generate([prompt], params(7, n=3))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in again]
    assert sum(read) < 150 + 3 * 8 + 150 + 3 * 150, "the second engine read it three times"
    assert under_test.scheduler.prefix_cache.reused == 2 * 149


def test_requests_that_come_together_wait_for_the_one_that_reads_their_beginning(monkeypatch):
    under_test = made("lean", shortest=32)
    read = read_by(under_test.target, monkeypatch)
    system = words(6, 700)
    prompts = [[*system, *words(20 + i, 5)] for i in range(3)]
    outputs = under_test.generate(prompts, params(1, greedy=True))
    assert [o.token_ids for o in outputs] == [alone("lean", "none", tuple(p), 1, 8, True) for p in prompts]
    assert sum(length for length in read if length > 8) < 760 + 3 * 710 - 2 * 700 + 3 * 705


def test_a_request_that_failed_lends_nothing():
    target = HFBackend(random_model(CONFIG), name="sick", check=False)
    under_test = Engine(target, max_batch=2)
    prompt = words(8, 60)
    forward = target.forward

    def sick(feeds, **options):
        outputs = forward(feeds, **options)
        for store in (target.cache._keys, target.cache._values):
            for buffer in store.values():
                buffer[feeds[0].session.slot, :, 10] = torch.nan
        return [type(each)(each.logits * torch.nan) for each in outputs]

    target.forward = sick
    with pytest.raises(UserError, match="NaN"):
        under_test.generate([prompt], params(1))
    del target.forward
    assert len(under_test.scheduler.prefix_cache) == 0
    assert target.cache.in_use == 0
    (found,) = under_test.generate([prompt], params(1, greedy=True))
    assert found.token_ids == alone("hf", "none", tuple(prompt), 1, 8, True)


def test_what_a_kept_session_had_beyond_the_reused_part_is_gone():
    target = backend("lean")
    kept, tokens = PrefixCache(shortest=4), words(9, 90)
    session = target.open()
    target.forward([Feed(session, tokens)])
    kept.keep(target, session, tokens)
    found = kept.find(target, [*tokens[:50], 1, 2])
    assert found is session, "few tokens are lost: it is handed over"
    for store in (target.cache._keys, target.cache._values):
        for buffer in store.values():
            assert not buffer[session.slot, :, 50:90].any()
    found.close()


def test_the_least_recently_used_session_goes_first():
    target = backend("hf")
    kept = PrefixCache(2, shortest=4)
    texts = [words(30 + i, 80) for i in range(3)]
    for number, tokens in enumerate(texts):
        session = target.open()
        target.forward([Feed(session, tokens)])
        kept.keep(target, session, tokens)
        if number == 1:
            copied = kept.find(target, [*texts[0][:10], 3])
            assert copied.length == 10
            copied.close()
    assert len(kept) == 2
    assert [kept.find(target, [*tokens, 1], ()) is not None for tokens in (texts[0], texts[2])] == [True, True]
    assert kept.find(target, [*texts[1], 1]) is None
    kept.clear()


def test_kept_sessions_take_a_quarter_of_what_is_free_at_most(monkeypatch):
    """A session of a large model must fit, or each turn of an agent would be read anew."""
    gib = 1 << 30
    for free, room in ((40 * gib, 10 * gib), (2 * gib, gib), (None, gib)):
        monkeypatch.setattr(prefix_cache, "available", lambda _device, free=free: free)
        assert made("hf").scheduler.prefix_cache.most_nbytes == room
    assert made("hf", kv_memory="3GiB").scheduler.prefix_cache.most_nbytes == 3 * gib


def test_a_session_that_was_forgotten_gives_its_slot_back():
    target = backend("hf")
    before = target.cache.in_use
    session: Session | None = target.open()
    assert target.cache.in_use == before + 1
    session = None
    assert session is None
    assert target.cache.in_use == before


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_common_prefixes(left, right):
    size = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    assert common_prefix(left, right) == size


# --- chunks of prompts ------------------------------------------------------------------------------------------------


def test_a_prompt_alone_is_read_in_the_passes_of_before(monkeypatch):
    target = backend("lean")
    read = read_by(target, monkeypatch)
    prompt = words(11, 2 * PREFILL_CHUNK + 100)
    session = target.open()
    target.forward([Feed(session, prompt)])
    session.close()
    expected, read[:] = list(read), []
    under_test = made("lean", size=0, prefix_reuse=False)
    under_test.add(prompt, params(1, tokens=1))
    while under_test.busy:
        under_test.step()
    assert read == expected == [PREFILL_CHUNK, PREFILL_CHUNK, 100]


def test_long_prompts_beside_a_stream_are_read_in_turns_and_never_more_than_a_chunk_a_round(monkeypatch):
    under_test = made("lean", size=20)
    under_test.max_batch = 4
    read = read_by(under_test.target, monkeypatch)
    (stream,) = under_test.add(words(1, 10), params(1, tokens=200))
    under_test.step()
    longs = [under_test.add(words(12 + i, 400), params(2 + i))[0] for i in range(2)]
    (short,) = under_test.add(words(20, 90), params(9))
    order = []
    while not all(each.finished for each in (*longs, short)):
        size, committed = len(read), len(stream.tokens)
        under_test.step()
        assert sum(read[size:]) <= 20 + 4, "a chunk, and one token of each request"
        assert len(stream.tokens) > committed, "no round passes a request by that is decoded"
        order += [name for name, each in (("short", short), ("first", longs[0])) if each.place and name not in order]
    assert order == ["short", "first"], "the short prompt does not wait for the long ones"
    for number, each in enumerate(longs):
        expected = alone("lean", "none", tuple(each.tokens[: each.prompt_length]), 2 + number, 8, False)
        assert tuple(each.output_ids) == expected
    under_test.abort(stream)


def test_an_abort_in_the_middle_of_a_prompt_frees_its_memory():
    under_test = made("lean", size=16, prefix_reuse=False)
    (stream,) = under_test.add(words(1, 10), params(1, tokens=50))
    under_test.step()
    before = under_test.target.cache.nbytes
    (long,) = under_test.add(words(2, 900), params(2))
    for _ in range(20):
        under_test.step()
    assert 0 < long.session.length < 899
    assert under_test.target.cache.nbytes > before
    under_test.abort(long)
    assert under_test.target.cache.nbytes <= before + 4096 * 16
    under_test.abort(stream)


def play(sizes, decoded, running, rounds, *, base=0.010, row=0.0, token, slow=()):
    """Rounds with chunks on a clock of its own; some of them take ten times as long. Returns the sizes."""
    made = []
    for number in range(rounds):
        size = sizes.size(decoded, running)
        taken = base + row * decoded + token * size
        sizes.record_time(10 * taken if number in slow else taken, size, decoded)
        made.append(size)
    return made


def test_the_size_of_a_chunk_follows_what_rounds_take():
    sizes = ChunkSize()
    assert sizes.size(1, 2) == FIRST
    for _ in range(10):
        sizes.record_time(0.010, 0, 1)
    grown = play(sizes, 1, 2, 20, token=0.0001)
    assert all(later <= 2 * size for size, later in itertools.pairwise(grown)), "never much more than was read before"
    assert grown[-1] == int(EXTRA * 0.010 / 0.0001)
    assert play(sizes, 1, 2, 20, token=0.0001, slow={3, 4, 11})[-1] == grown[-1], "a slow round changes nothing"
    assert play(sizes, 1, 2, 30, token=0.005)[-1] == LEAST


def test_the_requests_whose_prompts_are_read_count_in_a_usual_round():
    """Else a chunk beside one request would get shorter, the more of the others have begun in the meantime."""
    sizes = ChunkSize()
    for rows in (1, 4, 16):
        sizes.record_time(0.010 + 0.003 * rows, 0, rows)
    play(sizes, 1, 2, 20, row=0.003, token=0.001)
    most = (1 + EXTRA) * (0.010 + 0.003 * 16)
    for decoded in (1, 2, 3, 8, 15):
        size = play(sizes, decoded, 16, 4, row=0.003, token=0.001)[-1]
        assert 0.010 + 0.003 * decoded + 0.001 * size == pytest.approx(most, abs=0.0011)
    assert sizes.size(1, 2) <= 12, "and only those that run"


def test_drafts_of_all_lengths_are_not_taken_for_chunks():
    sizes, source = ChunkSize(), random.Random(1)
    for number in range(60):
        size, drafted = (sizes.size(1, 2) if number > 20 else 0), source.randrange(12)
        sizes.record_time(0.010 + 0.002 * (1 + drafted + size), size, 1 + drafted, 0.005 * drafted)
    usual = 0.010 + 0.002 * 2 + 0.005 * 5.5
    assert sizes.size(1, 2) == pytest.approx((1 + EXTRA * usual / 0.002), rel=0.4)


@pytest.mark.parametrize("even", [100, 500, 20000])
def test_a_chunk_deep_in_a_long_prompt_is_as_much_shorter_as_its_tokens_cost_more(even):
    """Rounds of 10 ms without chunks; the time for a token doubles `even` tokens deep."""

    def read(first, last):
        """What rounds take that read a prompt from one depth to another, over the least that is legal there."""
        ratios, depth = [], first
        while depth < last:
            size, token = sizes.size(1, 2, depth), 0.0005 * (1 + depth / even)
            sizes.record_time(0.010 + token * size, size, 1, depth=depth)
            ratios.append((0.010 + token * size) / max((1 + EXTRA) * 0.010, 0.010 + token * LEAST))
            depth += max(size, 1)
        return ratios

    sizes = ChunkSize()
    sizes.record_time(0.010, 0, 1)
    for first, last in ((0, 1000), (7000, 7300), (0, 300), (3000, 3100), (7300, 7500), (100, 200)):
        assert len([each for each in read(first, last) if each > 1.25]) <= 1, "one where no such depth was read before"
        assert statistics.median(read(last, last + 50)) == pytest.approx(1, rel=0.2), "as much is read as may be"


def test_a_round_without_a_chunk_shows_now_and_then_what_a_usual_round_takes():
    sizes = ChunkSize()
    sizes.record_time(0.010, 0, 1)
    made = play(sizes, 1, 2, 4 * REFRESH, base=0.030, token=0.0001)
    assert made.count(0) == 3, "decoding has become slower while a long prompt was read"
    assert made[-1] == pytest.approx(EXTRA * 0.030 / 0.0001, abs=1)


def together(under_test, now, count):
    """Times to the first token, and between tokens, of requests that come while the first one is read."""
    rows, begun = under_test.add(words(100 * count, 15), params(1, tokens=40)), now[0]
    under_test.step()
    rows += [under_test.add(words(100 * count + number, 15), params(1, tokens=40))[0] for number in range(1, count)]
    firsts, pauses, seen = {rows[0]: now[0] - begun}, [], dict.fromkeys(rows, now[0])
    while under_test.busy:
        places = {row: row.place for row in rows}
        under_test.step()
        for row in rows:
            if row.place > places[row]:
                pauses += [now[0] - seen[row]] if row in firsts else []
                firsts.setdefault(row, now[0] - begun)
                seen[row] = now[0]
    return sorted(firsts.values()), pauses


def test_prompts_that_come_together_are_read_soon_and_nobody_waits_long(monkeypatch):
    """On a clock of its own: passes take 15 ms, and 1.5 ms for each token."""
    under_test, now = made("lean", size=0, prefix_reuse=False), [0.0]
    under_test.max_batch, forward = 16, under_test.target.forward

    def timed(feeds, **options):
        now[0] += 0.015 + 0.0015 * sum(map(len, feeds))
        return forward(feeds, **options)

    monkeypatch.setattr(under_test.target, "forward", timed)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for count in (1, 4, 16):
        together(under_test, now, count)
    usual = 0.015 + 0.0015 * 16
    firsts, pauses = together(under_test, now, 16)
    assert max(pauses) <= (1 + EXTRA) * usual + 0.0015
    least = 15 * 16 * 0.0015 / ((1 + EXTRA) * usual - 0.015 - 0.0015 * 8)  # rounds, if each was as long as it may be
    assert firsts[-1] <= 1.5 * least * (1 + EXTRA) * usual
    firsts, pauses = together(under_test, now, 4)
    assert max(pauses) <= (1 + EXTRA) * (0.015 + 0.0015 * 4) + 0.0015


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "found"),
    [(None, None), (1000, 1000), ("1000", 1000), ("2GiB", 2 << 30), ("1.5 kB", 1500), ("3 mib", 3 << 20), ("7B", 7)],
)
def test_sizes_are_read(given, found):
    assert read_bytes(given) == found


@pytest.mark.parametrize("given", ["much", "-1", "0", "2 gallons", 0, -5, "", True])
def test_other_sizes_are_refused(given):
    with pytest.raises(
        UserError, match=r"kv_memory: expected a number of bytes above 0, or a text such as 2GiB .*, got "
    ):
        read_bytes(given)


def test_sequences_take_what_they_hold_and_give_it_back():
    target = HFBackend(random_model(CONFIG), name="sizes", check=False)
    assert target.sequences_nbytes([10]) == 0, "unknown before the first token"
    sessions = [target.open() for _ in range(32)]
    lengths = [2000, *[200] * 31]
    for session, length in zip(sessions, lengths, strict=True):
        target.forward([Feed(session, words(session.slot, length))])
    cache = target.cache
    own = cache.token_nbytes * sum(lengths)
    assert cache.is_paged
    assert own <= cache.nbytes == cache.batch_nbytes(lengths) <= 1.3 * own
    sessions[0].close()
    assert cache.nbytes == cache.batch_nbytes(lengths[1:])
    for session in sessions[1:]:
        session.close()
    assert cache.nbytes == 0
    assert cache.peak == cache.batch_nbytes(lengths)


def test_requests_wait_for_memory_and_the_rest_is_refused_with_numbers():
    free = made("lean")
    one = free.scheduler.budget._measured()[0].sequences_nbytes([150])
    under_test = made("lean", kv_memory=one)
    first, second = (under_test.add(words(i, 100), params(i))[0] for i in range(2))
    under_test.step()
    assert (len(under_test.scheduler.running), len(under_test.scheduler.waiting)) == (1, 1)
    assert under_test.memory.used <= under_test.memory.capacity == one
    while under_test.busy:
        under_test.step()
    assert [tuple(each.output_ids) for each in (first, second)] == [
        alone("lean", "none", tuple(words(i, 100)), i, 8, False) for i in range(2)
    ]
    with pytest.raises(UserError, match=r"needs up to .* for 2000 tokens, but kv_memory is .*, enough for \d+ tokens"):
        under_test.add(words(3, 1990), params(3, tokens=10))
    with pytest.raises(UserError, match=r"kv_memory: expected at least .*, for one token and its draft, got 10 bytes"):
        made("lean", kv_memory=10)
    (open_ended,) = under_test.add(words(4, 100), SamplingParams(max_tokens=None, ignore_eos=True))
    assert open_ended.max_tokens < 200, "without a number of its own it gets what there is"
    under_test.abort(open_ended)


def test_without_pages_a_block_follows_the_longest_sequence(monkeypatch):
    monkeypatch.setattr(pages, "paged", lambda _: False)
    target = HFBackend(random_model(CONFIG), name="block", check=False)
    under_test = Engine(target, max_batch=2, prefix_reuse=False)
    for length, capacity in ((300, 512), (900, 1024), (20, 256)):
        prompts = [words(length, length), words(10, 5)]
        found = under_test.generate(prompts, params(1, greedy=True))
        assert [each.token_ids for each in found] == [alone("hf", "none", tuple(p), 1, 8, True) for p in prompts]
        token = target.cache.token_nbytes
        assert target.cache.peak >= 2 * length * token
        assert not target.cache.is_paged
        assert target.cache.nbytes == 0, "nothing is left when all have ended"
        assert target.sequences_nbytes([length, 10]) == 2 * capacity * token


@pytest.mark.parametrize("pinned", [False, True])
def test_without_pages_slots_of_the_past_take_no_part_in_a_long_sequence(pinned, monkeypatch):
    monkeypatch.setattr(pages, "paged", lambda _: False)
    target = HFBackend(random_model(CONFIG), name="block", check=False)
    target.cache.pinned = pinned
    sessions = [target.open() for _ in range(16)]
    for session in sessions:
        target.forward([Feed(session, words(session.slot, 20))])
    for session in sessions:
        session.close()
    long, short = target.open(), target.open()
    rows = [target.forward([Feed(each, words(7, length))])[0].logits for each, length in ((long, 1500), (short, 20))]
    assert target.cache.nbytes <= 2 * 2048 * target.cache.token_nbytes
    assert target.cache.nbytes <= target.cache.batch_nbytes([1500, 20])
    fresh = HFBackend(random_model(CONFIG), name="fresh", check=False)
    for row, length in zip(rows, (1500, 20), strict=True):
        session = fresh.open()
        assert torch.allclose(row, fresh.forward([Feed(session, words(7, length))])[0].logits, atol=1e-4)


@pytest.mark.grid(2)
@pytest.mark.parametrize("spec", ["early_exit:1", "early_exit:1x3", "quantized:4"])
@pytest.mark.parametrize("kind", ["hf", "lean"])
def test_without_pages_a_self_draft_and_its_target_follow_buffers_that_move(kind, spec, monkeypatch):
    """As on a device: the layers of one cache grow at different times, and shrink to what they were."""
    if spec == "quantized:4" and kind == "hf":
        pytest.skip("transformers' modules quantize on the device or with a package; lean has its own products")
    monkeypatch.setattr(pages, "paged", lambda _: False)
    target = HFBackend(random_model(CONFIG), name="block") if kind == "hf" else backend(kind)
    drafter = make_drafter(spec, target=target, draft=None, stopper="fixed:3")
    rule = make_verifier("trie_block" if drafter.branching else "block")
    under_test = Engine(target, drafter, rule, max_batch=2, prefix_reuse=False)
    plain = Engine(target, max_batch=2, prefix_reuse=False)
    greedy = params(1, tokens=16, greedy=True)
    for length in (300, 20, 250, 900, 20, 300):
        prompts = [words(length, length), words(10, 5)]
        found, wanted = ([each.token_ids for each in built.generate(prompts, greedy)] for built in (under_test, plain))
        assert found == wanted


# --- log-probabilities of prompts -------------------------------------------------------------------------------------


def asked(seed=None, top=2):
    return SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed, max_tokens=5, prompt_logprobs=top)


def expected_logprobs(kind, prompt):
    """Of the prompt's tokens, by one forward pass of transformers."""
    own = tiny_model(tiny_config("lfm2")) if kind == "snapshot" else random_model(CONFIG)
    with torch.inference_mode():
        logits = own(torch.tensor([prompt])).logits[0]
    return logits[:-1].float().log_softmax(-1)


@pytest.mark.parametrize(
    ("kind", "spec"), [("hf", "none"), ("lean", "none"), ("snapshot", "none"), ("lean", "model"), ("lean", "suffix")]
)
def test_logprobs_of_a_prompt(kind, spec):
    engine = made(kind, spec)
    prompts = [words(seed, length) for seed, length in ((1, 30), (2, 1), (1, 30), (3, 2), (4, 17))]
    wanted = [asked(), asked(), asked(), asked(), SamplingParams(temperature=0.0, max_tokens=5)]
    rows = [engine.add(prompt, one)[0] for prompt, one in zip(prompts, wanted, strict=True)]
    while not all(row.finished for row in rows):
        engine.step()
    outputs = [engine.output(row) for row in rows]
    assert outputs[4].prompt_logprobs is None
    for output, prompt in zip(outputs[:4], prompts[:4], strict=True):
        expected = expected_logprobs(kind, prompt)
        assert output.prompt_logprobs[0] is None
        found = output.prompt_logprobs[1:]
        assert [each.token_id for each in found] == prompt[1:]
        for place, each in enumerate(found):
            assert each.logprob == pytest.approx(expected[place, prompt[place + 1]].item(), abs=1e-4)
            assert [token for token, _ in each.top] == expected[place].topk(2).indices.tolist()
    for output, prompt, one in zip(outputs, prompts, wanted, strict=True):
        plain = made(kind, "none", size=0, prefix_reuse=False)
        assert output.token_ids == plain.generate([prompt], replace(one, prompt_logprobs=None))[0].token_ids


def test_logprobs_of_a_prompt_are_those_of_every_continuation_and_reach_json():
    output = made("lean").generate([words(1, 9)], replace(asked(seed=3), n=2))
    assert output[0].prompt_logprobs == output[1].prompt_logprobs
    entries = output[0].to_dict()["prompt_logprobs"]
    assert entries[0] is None
    assert set(entries[1]) == {"token_id", "logprob", "rank", "top"}


def test_a_request_that_waits_again_reports_each_token_of_its_prompt_once():
    engine = made("lean", size=4)
    engine.add(words(6, 3), params(1, tokens=99))
    engine.step()
    (row,) = engine.add(words(5, 20), asked())
    for _ in range(3):
        engine.step()
    assert 4 <= len(row.prompt_logprobs) < 19
    engine.scheduler._stop_last()
    while not row.finished:
        engine.step()
    assert [each.token_id for each in engine.output(row).prompt_logprobs[1:]] == words(5, 20)[1:]


def test_a_target_that_cannot_read_drafts_refuses_logprobs_of_prompts():
    engine = Engine(PlainBackend(random_model(CONFIG), name="small"))
    with pytest.raises(UserError, match="prompt_logprobs is not supported with this target"):
        engine.add([1, 2], asked())
