"""What the server answers without a seed, and with one where no text is promised: the target's distribution."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from scipy.stats import chi2

from draftproof.backends.base import Feed
from draftproof.sampling import SamplingParams, probabilities
from support.raw_http import connected, raw
from support.serving import STORY, post, running, small_engine

FALSE_ALARM = 1e-6
SHAPE = {"temperature": 0.8, "top_k": 5}
COUNT, AT_ONCE = 48, 40


def exact(engine, most, **shape):
    """The distribution of the next tokens, by reading every continuation."""
    params = SamplingParams(**shape)
    found = {(): 1.0}
    for _ in range(most):
        longer = {}
        for tokens, weight in found.items():
            session = engine.target.open()
            ids = [*engine.encode(STORY)[1], *tokens]
            logits = engine.target.forward([Feed(session, ids, None)])[0].logits[-1:]
            session.close()
            bound = params.bind(vocab_size=engine.target.vocab_size, eos_token_ids=engine.eos_token_ids)
            with torch.inference_mode():
                row = probabilities(logits, bound)[0]
            longer |= {(*tokens, token): weight * row[token].item() for token in row.nonzero().flatten().tolist()}
        found = longer
    return found


def alarm(counts, expected):
    """Pearson's test, with rare outcomes together: the probability of such counts or worse."""
    total = sum(counts.values())
    cells = [(counts.get(key, 0), total * weight) for key, weight in expected.items() if total * weight >= 8]
    cells.append((total - sum(seen for seen, _ in cells), total - sum(mean for _, mean in cells)))
    cells = [(seen, mean) for seen, mean in cells if mean > 0 or seen > 0]
    statistic = sum((seen - mean) ** 2 / max(mean, 1e-9) for seen, mean in cells)
    return chi2.sf(statistic, len(cells) - 1)


@pytest.mark.parametrize(
    ("parts", "seeded"),
    [
        pytest.param({"drafter": "model", "stopper": "fixed:2", "verifier": "block"}, False, marks=pytest.mark.slow),
        pytest.param({"drafter": "model", "stopper": "fixed:2", "verifier": "token"}, True, marks=pytest.mark.slow),
        ({}, False),
    ],
)
def test_answers_have_the_targets_distribution(parts, seeded):
    """In a batch with others, some of whose clients leave. False alarms: one in a million for each set of parts."""
    engine = small_engine(**parts)
    expected = exact(small_engine(drafter="none"), 2, **SHAPE)
    counts = Counter()

    def one(base, number):
        if number % 8 == 7:
            with connected(base) as connection:
                connection.sendall(raw(prompt=STORY, max_tokens=50, stream=True))
                connection.recv(100)
            return
        body = {"max_tokens": 2, "ignore_eos": True, "n": COUNT, "return_token_ids": True, **SHAPE}
        made = post(base, **body, **({"seed": number} if seeded else {}))
        counts.update(tuple(choice["token_ids"]) for choice in made.json()["choices"])

    with running(engine, max_waiting=1000) as (base, _), ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: one(base, number), range(AT_ONCE)))
    assert sum(counts.values()) == COUNT * AT_ONCE * 7 // 8
    assert alarm(counts, expected) > FALSE_ALARM
    # Negative control. At 1.2 so many answers pass less than once in 1e11 runs; at 1.0 they would in 3 of 100.
    wrong = exact(small_engine(drafter="none"), 2, temperature=1.2, top_k=5)
    assert alarm(counts, wrong) < FALSE_ALARM


def test_a_seed_gives_one_text_alone_and_in_a_crowd_whose_clients_leave():
    """With the default parts, where it is promised."""
    engine = small_engine(max_batch=6)
    expected = {
        seed: small_engine().generate(STORY, SamplingParams(seed=seed, max_tokens=30))[0].text for seed in (1, 2)
    }

    def one(base, number):
        if number % 3 == 2:
            with connected(base) as connection:
                connection.sendall(raw(prompt=STORY, max_tokens=200, ignore_eos=True, stream=True, seed=number))
                connection.recv(200)
            return None
        return number % 2 + 1, post(base, seed=number % 2 + 1, max_tokens=30).json()["choices"][0]["text"]

    with running(engine) as (base, _), ThreadPoolExecutor(16) as pool:
        made = [each for each in pool.map(lambda number: one(base, number), range(48)) if each]
    assert all(text == expected[seed] for seed, text in made)
    assert len(made) == 32
