"""What one client learns of another: nothing by drafts, times or counts, unless the server is told to share."""

import json
from dataclasses import replace

import httpx
import pytest

from draftproof import Engine, SamplingParams
from draftproof.backends.base import Feed
from draftproof.backends.cache.prefix_cache import PrefixCache
from draftproof.drafters.suffix import SuffixDrafter
from support.raw_http import KEY, OTHER
from support.serving import running, small_engine
from support.suffix_drafts import drafted, request

NUMBER = "uncle Bob is nine four two seven and nobody else knows it"
GUESS = "uncle Bob is"
LETTER = "Dear Lily, once upon a time there was a big red dog who lived in a small house near the park. " * 2


@pytest.fixture(scope="module")
def suffix():
    return lambda: Engine.load("embedded:stories", drafter="suffix:8", check=False)


def ask(base, key, prompt, **body):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"{base}/v1/completions", json={"prompt": prompt, **body}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def drafts(base, key, prompt, **body):
    """Number of tokens that are drafted after a prompt, as `return_drafts` reads them out."""
    made = ask(base, key, prompt, max_tokens=8, temperature=0, stream=True, return_drafts=True, **body)
    first = next(line for line in made.text.splitlines() if line.startswith("data: {"))
    return json.loads(first[6:])["choices"][0]["draft"]["drafted"]


@pytest.mark.parametrize(
    ("keys", "options", "mine", "theirs"),
    [
        ((KEY, OTHER), {}, True, False),
        ((KEY, OTHER), {"share_between_clients": True}, True, True),
        ((), {}, False, False),
        ((), {"share_between_clients": True}, True, True),
    ],
    ids=["keys", "keys, shared", "no keys", "no keys, shared"],
)
def test_texts_of_other_clients_are_not_drafted(suffix, keys, options, mine, theirs):
    one, other = keys or (None, None)
    with running(suffix(), keys=keys, **options) as (base, _):
        assert drafts(base, one, GUESS) == 0, "nothing is known yet"
        ask(base, one, NUMBER, max_tokens=1)
        assert (drafts(base, other, GUESS) > 0) is theirs
        assert (drafts(base, one, GUESS) > 0) is mine or theirs


def test_a_salt_keeps_requests_of_one_key_apart(suffix):
    with running(suffix(), keys=(KEY,)) as (base, _):
        ask(base, KEY, NUMBER, max_tokens=1, cache_salt="one")
        assert drafts(base, KEY, GUESS, cache_salt="two") == 0
        assert drafts(base, KEY, GUESS) == 0
        assert drafts(base, KEY, GUESS, cache_salt="one") > 0


def test_a_salt_joins_requests_without_keys(suffix):
    with running(suffix()) as (base, _):
        ask(base, None, NUMBER, max_tokens=1, cache_salt="one")
        assert drafts(base, None, GUESS, cache_salt="two") == 0
        assert drafts(base, None, GUESS, cache_salt="one") > 0


def test_the_salt_of_one_key_is_not_the_salt_of_another(suffix):
    with running(suffix(), keys=(KEY, OTHER)) as (base, _):
        ask(base, KEY, NUMBER, max_tokens=1, cache_salt="one")
        assert drafts(base, OTHER, GUESS, cache_salt="one") == 0


@pytest.mark.parametrize(
    ("keys", "options", "shared"),
    [((KEY, OTHER), {}, False), ((KEY, OTHER), {"share_between_clients": True}, True), ((), {}, True)],
    ids=["keys", "keys, shared", "no keys"],
)
def test_prompts_of_other_clients_are_read_anew(keys, options, shared):
    one, other = keys or (None, None)
    with running(small_engine(), keys=keys, **options) as (base, server):

        def hits(key, **body):
            before = server.metrics.prefix_hits._value.get()
            ask(base, key, LETTER, max_tokens=1, **body)
            return server.metrics.prefix_hits._value.get() - before

        assert hits(one) == 0
        assert (hits(other) > 0) is shared
        assert hits(one) > 0
        assert hits(one, cache_salt="x") == 0
        assert hits(one, cache_salt="x") > 0


TURN = [{"role": "user", "content": "Tell me of the letter. " * 6}]


@pytest.mark.grid(3)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": TURN, "max_tokens": 1}),
        ("/v1/responses", {"input": TURN, "max_output_tokens": 1}),
        ("/v1/messages", {"messages": TURN, "max_tokens": 1}),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_chats_of_other_clients_are_read_anew_in_every_api(path, body, shared):
    with running(small_engine(), keys=(KEY, OTHER), share_between_clients=shared) as (base, server):

        def hits(key, **more):
            before = server.metrics.prefix_hits._value.get()
            headers = {"x-api-key": key} if path == "/v1/messages" else {"authorization": f"Bearer {key}"}
            answer = httpx.post(base + path, json={**body, **more}, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
            return server.metrics.prefix_hits._value.get() - before

        assert hits(KEY) == 0
        assert (hits(OTHER) > 0) is shared
        assert hits(KEY) > 0
        assert hits(KEY, cache_salt="x") == 0


@pytest.mark.parametrize("salt", ["", "x" * 513, 5, ["a"]])
def test_a_salt_is_a_short_text(suffix, salt):
    with running(suffix()) as (base, _):
        answer = httpx.post(f"{base}/v1/completions", json={"prompt": "x", "cache_salt": salt})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "cache_salt"


# --- in Python --------------------------------------------------------------------------------------------------------


def test_a_salt_changes_what_is_read_and_nothing_else():
    engine, params = small_engine(), SamplingParams(seed=1, max_tokens=20)
    expected = engine.generate(LETTER, params)[0].text
    first = engine.scheduler.prefix_cache.reused
    for number, (salt, reuses) in enumerate([("a", False), ("b", False), ("a", True), ("", True)]):
        before = engine.scheduler.prefix_cache.reused
        assert engine.generate(LETTER, params, cache_salt=salt)[0].text == expected
        assert (engine.scheduler.prefix_cache.reused > before) is reuses, number
    assert first == 0
    assert {each.session.cache_salt for each in engine.scheduler.prefix_cache._entries} == {"", "a", "b"}


def test_the_draft_model_keeps_salts_apart_too():
    """Its sessions are kept beside the target's: they would show a text by the time of drafting."""
    engine = Engine.load("embedded:target", "embedded:draft", drafter="model", stopper="fixed:2")
    params, found = SamplingParams(seed=1, max_tokens=20), []
    find = engine.scheduler.prefix_cache.find

    def noting(backend, tokens, running=(), cache_salt=""):
        session = find(backend, tokens, running, cache_salt)
        found.append((backend is engine.target, cache_salt, session is not None))
        return session

    engine.scheduler.prefix_cache.find = noting
    for salt in ("a", "b", "a"):
        engine.generate(LETTER, params, cache_salt=salt)
    for is_target in (True, False):
        assert [(salt, hit) for each, salt, hit in found if each is is_target] == [
            ("a", False),
            ("b", False),
            ("a", True),
        ]


def test_running_requests_with_other_salts_are_not_copied():
    engine = small_engine(max_batch=4)
    rows = [engine.add(LETTER, SamplingParams(max_tokens=40), cache_salt=salt)[0] for salt in "aab"]
    engine.step()
    engine.step()
    assert [row.reused > 0 for row in rows] == [False, True, False]
    for row in rows:
        engine.abort(row)


def test_a_scored_prompt_keeps_its_salt():
    engine = small_engine()
    engine.generate(LETTER, SamplingParams(max_tokens=2, prompt_logprobs=0), cache_salt="a")
    engine.generate(LETTER, SamplingParams(max_tokens=2))
    assert engine.scheduler.prefix_cache.reused == 0


def test_the_index_of_a_salt_goes_with_its_last_request():
    drafter = SuffixDrafter(4, capacity=20)

    def run(name, salt, tokens):
        asked = replace(request(tokens, name), cache_salt=salt)
        drafter.matches([asked])
        drafter.release(name)

    run(0, "a", range(10))
    run(1, "b", range(10))
    assert set(drafter._memory._indexes) == {"a", "b"}
    assert drafted(drafter, [3, 4], 2) == ()
    drafter.release(2)
    for name in range(3, 9):
        run(name, f"c{name}", range(10))
    assert len(drafter._memory._indexes) <= 3
    assert drafter._memory.size <= 20


def test_a_request_that_does_not_share_its_text_leaves_none():
    drafter = SuffixDrafter(4)
    drafter.matches([replace(request([1, 2, 3, 4, 5], 0), share_text=False)])
    drafter.release(0)
    assert drafted(drafter, [1, 2], 1) == ()
    drafter.matches([request([7, 8, 9, 6], 2)])
    (found,) = drafter.matches([replace(request([7, 8], 3), share_text=False)])
    assert found.tokens == []


def test_kept_sessions_with_another_salt_are_not_closed_for_this_one():
    """The longer text of one client would end the reuse of the other, which shows it."""
    kept, engine = PrefixCache(shortest=4), small_engine()
    tokens = engine.encode(LETTER)[1]
    for salt, length in (("a", 10), ("b", 20), ("", 15)):
        session = kept.open(engine.target, tokens[:length], (), salt)
        engine.target.forward([Feed(session, tokens[session.length : length])])
        kept.keep(engine.target, session, tokens[: length + 1])
    assert sorted(each.session.length for each in kept._entries) == [10, 15, 20]
    kept.clear()
