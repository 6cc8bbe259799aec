"""One request fails and the others do not notice; two threads share an engine and get what each would get alone."""

import gc
import threading

import pytest
import torch

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.errors import RequestError
from draftproof.stoppers.fixed import FixedLength
from draftproof.testing import TableModel
from support.helpers import CONFIGS, engine, random_model

POISON = 4


class Poisoned(TableModel):
    """Logits of one kind after a certain token."""

    def __init__(self, *args, value=float("nan"), **options):
        super().__init__(*args, **options)
        self.value = value

    def logits(self, context):
        row = super().logits(context)
        return torch.full_like(row, self.value) if context[-1] == POISON else row


def prompts_of(count):
    return [[1, 2, number % 4] for number in range(count)]


PARAMS = SamplingParams(max_tokens=12, seed=7, logit_bias={POISON: -100.0})


def made(target, draft=None, **options):
    drafter = None
    if draft is not None:
        drafter = ModelDrafter(DraftModel(draft, vocab_size=target.vocab_size), FixedLength(3))
    return Engine(target, drafter, max_batch=8, **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("who", ["target", "draft"])
def test_bad_logits_of_one_request_end_that_one_alone(who, value):
    target = (Poisoned if who == "target" else TableModel)(6, 1)
    draft = (Poisoned if who == "draft" else TableModel)(6, 2)
    target.value = draft.value = value
    loop = made(target, draft)
    alone = [out.token_ids for out in made(target, draft).generate(prompts_of(3), PARAMS)]
    requests = [
        *loop.add(prompts_of(3)[0], PARAMS),
        *loop.add([1, 2, POISON], PARAMS),
        *loop.add(prompts_of(3)[1], PARAMS),
        *loop.add(prompts_of(3)[2], PARAMS),
    ]
    while loop.busy:
        loop.step()
    bad = requests.pop(1)
    assert isinstance(bad.error, RequestError)
    assert bad.error.request_id == bad.id
    assert f"request {bad.id} failed: the logits of the {'target' if who == 'target' else 'draft'}" in str(bad.error)
    assert bad.chunks[-1].finish_reason == "error"
    assert [tuple(request.output_ids) for request in requests] == alone, "bit for bit as without it"
    with pytest.raises(RequestError):
        loop.output(bad)


def test_on_a_real_model_the_others_go_on_bit_for_bit():
    model = random_model(CONFIGS["llama"]())
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = float("nan")
    params = SamplingParams(max_tokens=12, seed=7, bad_words=(), logit_bias={POISON: -100.0})
    target = HFBackend(model, name="llama", check=False)
    good = [[1, 2, 3], [9] * 20]
    expected = [out.token_ids for out in Engine(target).generate(good, params)]
    loop = Engine(target)
    requests = [*loop.add(good[0], params), *loop.add([1, POISON], params), *loop.add(good[1], params)]
    while loop.busy:
        loop.step()
    assert requests[1].error is not None
    assert [tuple(request.output_ids) for request in (requests[0], requests[2])] == expected


def test_generate_raises_after_the_others_have_finished():
    loop = made(Poisoned(6, 1))
    with pytest.raises(RequestError, match=r"request 1 failed: .*NaN") as caught:
        loop.generate([[1, 2, 0], [1, POISON], [1, 2, 3]], PARAMS)
    first, failed, last = caught.value.outputs
    assert failed is None
    assert [len(out.token_ids) for out in (first, last)] == [12, 12]
    assert not loop.busy


def test_a_stream_raises_what_ended_it():
    with pytest.raises(RequestError, match="NaN"):
        list(made(Poisoned(6, 1)).stream([1, POISON], PARAMS))


@pytest.mark.grid(1)
@pytest.mark.parametrize("where", ["transform", "text"])
def test_a_transform_or_a_decoder_that_raises_fails_its_request(where, monkeypatch):
    loop = engine(draft=None)
    others = [out.token_ids for out in engine(draft=None).generate(["Once", "The dog"], SamplingParams(seed=1))]
    first, bad, last = (
        *loop.add("Once", SamplingParams(seed=1)),
        *loop.add("The cat", SamplingParams(seed=1, frequency_penalty=0.5)),
        *loop.add("The dog", SamplingParams(seed=1)),
    )

    def broken(*_):
        raise LookupError("no such rule in the grammar")

    if where == "transform":
        monkeypatch.setattr("draftproof.sampling._penalise", broken)
    else:
        monkeypatch.setattr(bad.cutter, "cut", broken)
    while loop.busy:
        loop.step()
    assert "no such rule in the grammar" in str(bad.error)
    assert [tuple(request.output_ids) for request in (first, last)] == others


def test_running_out_of_memory_is_nobodys_fault(monkeypatch):
    loop = engine(draft=None)
    (request,) = loop.add("Once", SamplingParams(seed=1))

    def broken(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("draftproof.engine.loop.probabilities", broken)
    with pytest.raises(torch.OutOfMemoryError):
        loop.step()
    assert request.error is None
    monkeypatch.undo()
    while loop.busy:
        loop.step()
    assert request.finished


def test_all_tokens_masked_in_one_request_is_its_own_error():
    loop = engine(draft=None)
    (dead,) = loop.add([1, 300], SamplingParams(seed=1, stop_token_ids=tuple(range(512)), min_tokens=2))
    (other,) = loop.add("Once", SamplingParams(seed=1))
    while loop.busy:
        loop.step()
    assert "every token of row 0 is masked by min_tokens" in str(dead.error)
    assert other.error is None


@pytest.mark.parametrize("prompt", ["a \ud800 b", [{"role": "user", "content": "\udcff"}]])
def test_a_lone_surrogate_is_named(prompt):
    loop = engine(draft=None)
    loop.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    try:
        with pytest.raises(UserError, match=r"character \d of the prompt is a lone surrogate \(U\+D[8C]"):
            loop.generate([prompt])
    finally:
        loop.tokenizer.chat_template = None


# --- threads ----------------------------------------------------------------------------------------------------------


def in_threads(work, arguments):
    """What `work` makes of each argument, all at once."""
    results, errors = {}, []
    ready = threading.Barrier(len(arguments))

    def run(place, argument):
        try:
            ready.wait()
            results[place] = work(argument)
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(arguments)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return [results[place] for place in range(len(arguments))]


LONG = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


@pytest.mark.grid(1)
@pytest.mark.parametrize("shared", ["engine", "backend"])
def test_threads_that_share_an_engine_or_a_backend_get_what_each_gets_alone(shared):
    """The cache grows while others read it: prompts of many lengths, more rows than slots, drafts and rollbacks."""
    target, draft = (LeanBackend(random_model(CONFIGS["llama"](), seed=seed)) for seed in (0, 1))

    def loop():
        drafter = ModelDrafter(DraftModel(draft, vocab_size=target.vocab_size), FixedLength(3))
        return Engine(target, drafter, max_batch=3)

    prompts = [[[(7 * i + row) % 97 for i in range(3 + 30 * row + 50 * part)] for row in range(3)] for part in range(4)]
    expected = [[out.token_ids for out in loop().generate(part, LONG)] for part in prompts]
    one = loop()

    def work(part):
        mine = one if shared == "engine" else loop()
        return [out.token_ids for out in mine.generate(part, LONG)]

    assert in_threads(work, prompts) == expected
    one.forget()
    gc.collect()  # engines that nobody uses any more
    assert target.cache.in_use == 0


def test_threads_may_stream_from_one_engine():
    loop = engine()
    params = SamplingParams(max_tokens=40, seed=3)
    starts = ["Once upon a time", "The little dog", "One day, Tim"]
    expected = [out.text for out in engine().generate(starts, params)]
    assert in_threads(lambda start: "".join(chunk.text for chunk in loop.stream(start, params)), starts) == expected
