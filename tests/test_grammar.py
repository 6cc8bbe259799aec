"""Grammars: the output distribution is that of the target with a mask, with every drafter and rule, and answers fit."""

import json
import random
import re
from dataclasses import replace

import pytest
import torch

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.draft import Origin
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.errors import NoTokenError
from draftproof.grammar import Grammars
from draftproof.grammar_compile import use_local_references
from draftproof.stoppers.fixed import FixedLength
from draftproof.testing import TableModel, engine_distribution, total_variation
from draftproof.tree import TokenTree
from support.small_drafters import DRAFTERS, PAIRS, model
from type_checks import checks_off

llguidance = pytest.importorskip("llguidance", reason="the extra serve is not installed")
VOCAB, END = ("a", "b", "ab", "#"), 3
PATTERN = "(ab)*a?b?a"


class Letters:
    """A tokenizer of a few letters."""

    eos_token_id, bos_token_id, special_token_ids = END, None, (END,)
    tokens = tuple(each.encode() for each in VOCAB)

    def __call__(self, text):
        return ["ab".index(chr(each)) for each in text if chr(each) in "ab"]


GRAMMARS = Grammars(llguidance.LLTokenizer(llguidance.TokenizerWrapper(Letters())), len(VOCAB))


def toy(drafter, rule, round_rng, target):
    engine = Engine(target, drafter, make_verifier(rule), eos_token_ids=[END], round_rng=round_rng)
    engine.grammars = GRAMMARS
    return engine


# --- by hand: a token is legal if some text that fits begins with it -------------------------------------------------

TEXTS = [
    text
    for size in range(12)
    for number in range(2**size)
    if re.fullmatch(PATTERN, text := "".join("ab"[number >> place & 1] for place in range(size)))
]


def legal(text):
    """Which tokens may follow a text."""
    found = [any(each.startswith(text + token) for each in TEXTS) for token in VOCAB[:END]]
    return torch.tensor([*found, text in TEXTS])


def row(target, tokens):
    """The target's logits after tokens."""
    session = target.open()
    return target.forward([Feed(session, list(tokens), None)])[0].logits[-1].double()


def by_hand(target, prompt, temperature, most):
    """Answers and their probabilities, by walking through all of them."""
    found, open_ = {}, [((), "", 1.0)]
    while open_:
        answer, text, weight = open_.pop()
        if len(answer) == most or (answer and answer[-1] == END):
            found[answer] = weight
            continue
        logits = row(target, [*prompt, *answer]) / temperature
        probs = logits.masked_fill(~legal(text), -torch.inf).softmax(-1)
        for token, prob in enumerate(probs.tolist()):
            if prob > 0:
                open_.append(((*answer, token), text + VOCAB[token].replace("#", ""), weight * prob))
    return found


@pytest.mark.grid(4)
@pytest.mark.parametrize(("name", "rule"), PAIRS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_distribution_is_the_targets_with_the_mask(name, rule, temperature):
    target, prompt = TableModel(4, 1), [0, 1, 0, 2]
    most = 3 if name == "tree" else 4
    params = SamplingParams(max_tokens=most, temperature=temperature, grammar=f"regex:{PATTERN}")

    def make(round_rng):
        return toy(DRAFTERS[name](), rule, round_rng, target)

    with checks_off():
        found = engine_distribution(make, prompt, params)
    expected = by_hand(target, prompt, temperature, most)
    assert total_variation(found, expected) < 1e-9
    assert len(expected) > 5


class Careless(ModelDrafter):
    """Draws from a draft model that knows nothing of the grammar, and says so in its q."""

    def propose(self, requests, rng):
        return super().propose(
            [replace(each, transforms=replace(each.transforms, constraint=None)) for each in requests], rng
        )


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("rule", "most"), [("block", 3), ("token", 3), ("match", 2), pytest.param("match", 3, marks=pytest.mark.slow)]
)
def test_what_was_drawn_outside_the_grammar_is_judged_and_not_taken_back(rule, most):
    """To end a draft before a token that was drawn would shift the distribution by the share of such tokens."""
    target, prompt = TableModel(4, 1), [0, 1, 0, 2]
    params = SamplingParams(max_tokens=most, grammar=f"regex:{PATTERN}")

    def make(round_rng):
        drafter = Careless(DraftModel(TableModel(4, 9), vocab_size=4), FixedLength(2))
        return toy(drafter, rule, round_rng, target)

    with checks_off():
        found = engine_distribution(make, prompt, params)
    assert total_variation(found, by_hand(target, prompt, 1.0, most)) < 1e-9


CALLS = """
start: TEXT | before call
before[lazy]: TEXT "aa"
call: "b" ("a" | "bb")
TEXT: /[ab]*/
"""  # in the form of the server's grammar for tools: text, or text that ends at a marker and then a call


def called(text):
    """Whether a text fits: no marker in it, or the first one before a call at the end."""
    if "aa" not in text:
        return True
    _, _, call = text.partition("aa")
    return call in ("ba", "bbb")


def begins(text):
    """Whether a text that fits begins so."""
    _, marker, call = text.partition("aa")
    return not marker or "ba".startswith(call) or "bbb".startswith(call)


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("name", "rule", "most"),
    [
        ("model", "block", 4),
        ("model", "token", 4),
        ("suffix", "block", 5),
        pytest.param("model", "block", 5, marks=pytest.mark.slow),
        pytest.param("model", "token", 5, marks=pytest.mark.slow),
    ],
)
def test_the_distribution_where_a_call_may_begin_in_any_text(name, rule, most):
    target, prompt = TableModel(4, 1), [0, 1, 0, 2]
    params = SamplingParams(max_tokens=most, grammar=f"lark:{CALLS}")

    def make(round_rng):
        return toy(DRAFTERS[name](), rule, round_rng, target)

    def plain(round_rng):
        return toy(None, "block", round_rng, target)

    with checks_off():
        found, expected = (engine_distribution(one, prompt, params) for one in (make, plain))
    assert total_variation(found, expected) < 1e-12
    texts = ["".join(VOCAB[each] for each in answer) for answer in expected]
    assert any("aabbb" in text for text in texts)
    assert any("aa" not in text for text in texts)
    for text in texts:
        assert called(text[:-1]) if text.endswith("#") else begins(text)


def test_a_mask_for_committed_contexts_only_shows_in_the_distribution():
    """What engines do that apply the grammar at the root of a draft and nowhere else."""
    target, prompt = TableModel(4, 1), [0, 1, 0, 2]
    params = SamplingParams(max_tokens=3, grammar=f"regex:{PATTERN}")

    def make(round_rng):
        engine = toy(model(), "block", round_rng, target)
        compiled = GRAMMARS.constraint(params.grammar)

        class RootOnly:
            def fresh(self):
                return self

            def allowed(self, outputs, paths):
                try:
                    masks = compiled.allowed(outputs, paths)
                except NoTokenError:  # an answer that is outside the grammar already
                    return torch.ones(len(paths), len(VOCAB), dtype=torch.bool)
                masks[[bool(path) for path in paths]] = True
                return masks

        class Broken:
            def constraint(self, _):
                return RootOnly()

        engine.grammars = Broken()
        return engine

    with checks_off():
        found = engine_distribution(make, prompt, params)
    assert total_variation(found, by_hand(target, prompt, 1.0, 3)) > 0.1  # it is 0.89


@pytest.mark.parametrize("rule", ["mixture:0.5", "last_token", "typical"])
def test_a_lossy_rule_keeps_no_looked_up_token_outside_the_grammar(rule):
    """Rules that may keep a token of probability 0 are not shown one."""
    target, prompt = TableModel(4, 1), [0, 0, 0, 1, 1, 1, 0]
    params = SamplingParams(max_tokens=5, grammar=f"regex:{PATTERN}")

    def make(round_rng):
        return toy(DRAFTERS["suffix"](), rule, round_rng, target)

    with checks_off():
        found = engine_distribution(make, prompt, params)
    for answer in found:
        text = "".join(VOCAB[token] for token in answer if token != END)
        assert legal(text).any() if END not in answer else legal(text)[END], text
    assert found


def test_masks_are_those_found_by_hand_wherever_the_matcher_was_before():
    constraint = GRAMMARS.constraint(f"regex:{PATTERN}")
    contexts = [[], [0], [0, 1], [2], [2, 0], [0, 1, 0], [0], [2, 2], [], [2, 0, 0], [0, 1, 0, 1]]
    for context in contexts:
        for split in range(len(context) + 1):
            text = "".join(VOCAB[token] for token in context)
            found = constraint.allowed(context[:split], [context[split:], context[split:]])
            if any(each.startswith(text) for each in TEXTS):
                assert found.tolist() == [legal(text).tolist()] * 2
            else:
                raise AssertionError(f"{text} is a bad example")
    constraint.allowed([2, 0, END], [()])
    assert constraint.allowed([2], [()])[0].tolist() == legal("ab").tolist(), "an end token is taken back too"


@pytest.mark.parametrize("pattern", [PATTERN, "ababab", "a(bab)*bb", "(abab|abba)a*"])
def test_a_mask_depends_on_its_context_alone(pattern):
    moved = GRAMMARS.constraint(f"regex:{pattern}")
    contexts = [[], [0], [0, 1], [2], [0, 1, 0, 1], [0, 1], [2, 2], [0], [2, 0, 1], [], [0, 1, 2]]
    for context in contexts:
        fresh = GRAMMARS.constraint(f"regex:{pattern}").allowed(context, [()])
        assert torch.equal(moved.allowed(context, [()]), fresh)
        assert torch.equal(moved.allowed([], [context]), fresh)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_the_distribution_where_forced_tokens_are_drafted(rule):
    target, prompt, origins = TableModel(4, 1), [0, 1, 0, 2], set()
    params = SamplingParams(max_tokens=5, grammar="regex:(abba|bab)(bab)?")

    def make(round_rng):
        drafter = SuffixDrafter(3, threshold=0.0, shared=False)
        propose = drafter.propose

        def noting(requests, rng):
            drafts = propose(requests, rng)
            origins.update(draft.origin for draft in drafts if len(draft))
            return drafts

        drafter.propose = noting
        return toy(drafter, rule, round_rng, target)

    def plain(round_rng):
        return toy(None, "block", round_rng, target)

    with checks_off():
        found, expected = (engine_distribution(one, prompt, params) for one in (make, plain))
    assert total_variation(found, expected) < 1e-12
    assert Origin.GRAMMAR in origins


# --- grammars that cannot take tokens back ----------------------------------------------------------------------------


CANNOT_GO_BACK = {
    "max_tokens": 'start: x "bb"\nx[max_tokens=2]: /[ab]*/\n',
    "max_tokens, lazy": 'start: x "ab"\nx[max_tokens=2, lazy]: /[ab]*b/\n',
    "max_tokens of a rule": 'start: y "bb"\ny[max_tokens=3]: ("a" "b")+\n',
    "stop": 'start: x "ab"\nx[stop="b"]: /a*/\n',
    "stop of two": 'start: x ("a" | "ba")\nx[stop="bb"]: /[ab]*/\n',
    "twice": 'start: x y\nx[max_tokens=1]: /[ab]*/\ny[stop="b"]: /[ab]*/\n',
}


class Replayed:
    """The reference: a new matcher for each context, which has read nothing else."""

    def __init__(self, spec):
        self._spec = spec

    def fresh(self):
        return self

    def allowed(self, outputs, paths):
        return torch.cat([self._one([*outputs, *path]) for path in paths])

    def _one(self, context):
        for size in range(len(context), -1, -1):  # the nearest legal context above
            matcher = GRAMMARS.constraint(self._spec)._grammar.matcher()
            if matcher.try_consume_tokens(context[:size]) == size:
                return torch.tensor([list(map(bool, matcher.compute_logit_bias()))])[:, : len(VOCAB)]
        raise AssertionError

    def forced(self, outputs):
        return GRAMMARS.constraint(self._spec).forced(outputs)


class Unheeded(Replayed):
    """The fault: whether tokens could be taken back is not looked at, and then everything is legal."""

    def __init__(self, spec):
        super().__init__(spec)
        self._matcher, self._read = GRAMMARS.constraint(spec)._grammar.matcher(), []

    def fresh(self):
        return Unheeded(self._spec)

    def _one(self, context):
        same = 0
        while same < min(len(self._read), len(context)) and self._read[same] == context[same]:
            same += 1
        if same < len(self._read):
            self._matcher.rollback(len(self._read) - same)
            del self._read[same:]
        rest = context[same:]
        taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self._read += rest[:taken]
        if taken < len(rest):
            return torch.ones(1, len(VOCAB), dtype=torch.bool)
        return torch.tensor([list(map(bool, self._matcher.compute_logit_bias()))])[:, : len(VOCAB)]

    def forced(self, outputs):
        self._one(list(outputs))
        return list(self._matcher.compute_ff_tokens())


def of_constraint(drafter, rule, spec, constraint, most=4):
    """The distribution of answers with a drafter and a constraint; None is the engine's own."""
    target, prompt = TableModel(4, 1), [0, 1, 0, 2]

    class Given:
        def constraint(self, _):
            return constraint(spec)

    def make(round_rng):
        engine = toy(DRAFTERS[drafter](), rule, round_rng, target)
        if constraint is not None:
            engine.grammars = Given()
        return engine

    with checks_off():
        return engine_distribution(make, prompt, SamplingParams(max_tokens=most, grammar=spec))


@pytest.mark.grid(2)
@pytest.mark.parametrize("kind", CANNOT_GO_BACK)
def test_the_distribution_of_a_grammar_that_cannot_take_tokens_back(kind):
    spec = f"lark:{CANNOT_GO_BACK[kind]}"
    expected = {most: of_constraint("none", "block", spec, Replayed, most) for most in (3, 4)}
    assert len(expected[4]) > 2
    cases = [("none", "block", 4), ("model", "block", 4), ("suffix", "block", 4), ("tree", "trie_block", 3)]
    for drafter, rule, most in cases:
        found = of_constraint(drafter, rule, spec, None, most)
        assert total_variation(found, expected[most]) < 1e-12, (drafter, rule)


@pytest.mark.parametrize("kind", ["max_tokens", "stop"])
def test_a_matcher_whose_failed_rollback_goes_unheeded_shows_in_the_distribution(kind):
    spec = f"lark:{CANNOT_GO_BACK[kind]}"
    expected = of_constraint("none", "block", spec, Replayed)
    distances = [
        total_variation(of_constraint(name, "block", spec, Unheeded), expected) for name in ("model", "suffix")
    ]
    assert max(distances) > 0.01


@pytest.mark.parametrize("kind", CANNOT_GO_BACK)
def test_masks_without_rollback_are_those_of_a_new_matcher(kind):
    spec = f"lark:{CANNOT_GO_BACK[kind]}"
    moved, reference, source = GRAMMARS.constraint(spec), Replayed(spec), random.Random(3)
    output, legal_seen = [], 0
    for _ in range(300):
        mask = reference.allowed(output, [()])[0]
        choices = [token for token in mask.nonzero().flatten().tolist() if token != END]
        if not choices or len(output) > 5 or source.random() < 0.2:
            output = output[: source.randrange(len(output) + 1)]  # as after a round that failed
            continue
        paths = [[source.randrange(END) for _ in range(source.randrange(4))] for _ in range(3)]
        assert torch.equal(moved.allowed(output, [(), *paths]), reference.allowed(output, [(), *paths]))
        legal_seen += 1
        output.append(source.choice(choices))
    assert legal_seen > 50


def test_texts_with_a_limit_of_tokens_are_inside_the_grammar_with_every_drafter():
    spec = 'lark:start: x "and then he said no."\nx[max_tokens=5]: /[a-z ]*/\n'
    params = [SamplingParams(grammar=spec, max_tokens=60, temperature=1.0, seed=seed) for seed in range(6)]
    for options in ({"drafter": "none"}, {"drafter": "ngram:4"}, {}, {"draft": "embedded:stories-draft"}):
        found = Engine.load("embedded:stories", **options).generate(["Once upon a time"] * len(params), params)
        for each in found:
            assert re.fullmatch("[a-z ]*and then he said no.", each.text), (options, each.text)
            assert each.finish_reason == "stop"


# --- with a real tokenizer --------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SPEC = f"json_schema:{json.dumps(SCHEMA)}"


@pytest.fixture(scope="module")
def engine():
    return Engine.load("embedded:stories", "embedded:stories-draft", drafter="model", stopper="fixed:4")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_fit_their_schema(engine, temperature):
    params = SamplingParams(grammar=SPEC, max_tokens=100, temperature=temperature, seed=1, n=4)
    for output in engine.generate("Once upon a time", params):
        assert output.finish_reason == "stop"
        made = json.loads(output.text)
        assert set(made) == {"name", "age"}
        assert 0 <= made["age"] <= 99


def test_the_text_is_that_of_plain_decoding(engine):
    params = SamplingParams(grammar=SPEC, max_tokens=100, temperature=0)
    plain = Engine.load("embedded:stories", drafter="none")
    prompts = ["Once upon a time", "The little dog"]
    assert [each.text for each in engine.generate(prompts, params)] == [
        each.text for each in plain.generate(prompts, params)
    ]


def test_requests_with_and_without_a_grammar_share_rounds(engine):
    params = [SamplingParams(max_tokens=30, seed=3), SamplingParams(grammar="regex:[0-9]{5}", seed=3)]
    together = engine.generate(["Once", "My number is "], params)
    alone = [engine.generate([one], [own])[0] for one, own in zip(["Once", "My number is "], params, strict=True)]
    assert [each.text for each in together] == [each.text for each in alone]
    assert re.fullmatch("[0-9]{5}", together[1].text)


def test_forced_stretches_cost_few_calls():
    params = SamplingParams(grammar="regex:the answer is forty-two, and nothing else is", temperature=0)
    (made,) = Engine.load("embedded:stories", drafter="suffix").generate("Once", params)
    assert made.text == "the answer is forty-two, and nothing else is"
    assert made.stats.num_target_calls <= made.stats.num_tokens / 3
    assert made.stats.num_accepted_tokens == made.stats.num_draft_tokens


def test_json_of_any_kind_and_lark(engine):
    made = engine.generate("Once", SamplingParams(grammar='lark:start: "yes" | "no"', seed=1))[0]
    assert made.text in ("yes", "no")
    params = SamplingParams(grammar="json_object", seed=2, max_tokens=200, temperature=0.3)
    made = engine.generate("Once", params)[0]
    assert made.text.lstrip().startswith("{")
    assert made.finish_reason == "length" or isinstance(json.loads(made.text), dict)


def referring(reference, **beside):
    """A schema with a reference in a list of alternatives, and the same characters as data and as names."""
    a, b, c, d = ({"$ref": reference} for _ in range(4))
    made = {"anyOf": [{"items": a}], "const": b, "properties": {"$ref": {"type": "string"}, "default": c}}
    return {**made, "$defs": {"a/b": {"type": "integer"}, "c": d}, **beside}


def test_references_as_litellm_writes_them():
    """An absolute pointer, without the sign that it is one; data, and what may be something else, stay as they are."""
    schema, expected = referring("/$defs/a~1b"), referring("#/$defs/a~1b", const={"$ref": "/$defs/a~1b"})
    use_local_references(schema)
    assert schema == expected
    for same in (
        referring("/$defs/none"),
        referring("/$defs/a~1b/none"),
        referring("/other/a~1b"),
        referring("#/$defs/a~1b"),
        referring("/$defs/a~1b", **{"$id": "http://a.example"}),
    ):
        before = json.dumps(same)
        use_local_references(same)
        assert json.dumps(same) == before


def test_answers_fit_definitions_in_the_schema(engine):
    schema = {"type": "object", "properties": {"a": {"$ref": "/$defs/A"}}, "required": ["a"]}
    schema |= {"additionalProperties": False, "$defs": {"A": {"enum": [41, 42]}}}
    params = SamplingParams(grammar=f"json_schema:{json.dumps(schema)}", max_tokens=30, seed=1)
    assert json.loads(engine.generate("Once", params)[0].text)["a"] in (41, 42)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("xml", "expected json_object"),
        ("regex:", "expected json_object"),
        (5, "expected json_object"),
        ("regex:a(", "grammar regex cannot be read"),
        ("lark:nothing", "grammar lark cannot be read"),
        ("json_schema:{", "grammar json_schema cannot be read"),
        ("json_schema:[]", "grammar json_schema cannot be read"),
        ('json_schema:{"type": "blub"}', "grammar json_schema cannot be read"),
        ('json_schema:{"$ref": "/$defs/a"}', r"expected every \$ref within the schema, .*, got '/\$defs/a'"),
        ('json_schema:{"$ref": "http://a.example/b"}', r"expected every \$ref within the .*, got 'http://a.example/b'"),
    ],
)
def test_grammars_that_are_none(engine, grammar, message):
    with pytest.raises(UserError, match=message) as error:
        engine.add("Once", SamplingParams(grammar=grammar))
    assert len(str(error.value).splitlines()) == 1


def test_what_does_not_go_with_a_grammar():
    with pytest.raises(UserError, match=r"ignore_eos: expected off with a grammar.*, got True"):
        SamplingParams(grammar="json_object", ignore_eos=True)
    with pytest.raises(UserError, match=r"min_tokens: expected off with a grammar.*, got 3"):
        SamplingParams(grammar="json_object", min_tokens=3)
    with pytest.raises(UserError, match="a tokenizer and an end token"):
        Engine(TableModel(3, 1)).add([0], SamplingParams(grammar="json_object"))


def test_a_grammar_that_leaves_nothing_fails_alone(engine):
    ids = engine.encode("Once")[1]
    (bad,) = engine.add(ids, SamplingParams(grammar="regex:[0-9]", bad_words=[str(n) for n in range(10)]))
    (good,) = engine.add(ids, SamplingParams(max_tokens=3, seed=1))
    while not (bad.finished and good.finished):
        engine.step()
    assert "masked by grammar and bad_words" in str(bad.error)
    assert good.error is None


def test_below_an_illegal_drafted_token_stands_the_mask_above_it():
    constraint = GRAMMARS.constraint("regex:(ab)*")
    chain = TokenTree.chain(torch.tensor([1, 0]))
    paths = [(), *[[chain.ids[node] for node in path] for path in chain.paths]]
    assert constraint.allowed([], paths).tolist() == [[True, False, True, True]] * 3
    assert constraint.allowed([0], [(), (0,), (0, 0)]).tolist() == [[False, True, False, False]] * 3


def test_an_answer_outside_its_grammar_is_refused():
    constraint = GRAMMARS.constraint("regex:(ab)*")
    for output in ([1], [0, 0], [2, 1, 0]):
        with pytest.raises(NoTokenError, match="does not fit its grammar"):
            constraint.allowed(output, [()])
        with pytest.raises(NoTokenError, match="does not fit its grammar"):
            constraint.forced(output)
    assert constraint.allowed([2], [()])[0].tolist() == [True, False, True, True], "it goes on elsewhere"
