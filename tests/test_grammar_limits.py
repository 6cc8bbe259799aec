"""Grammars that take too much: they are refused, end no process, and cost nobody else anything."""

import gc
import json
import os
import random
import re
import signal
import string
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from draftproof import Engine, SamplingParams, UserError, grammar_compile
from draftproof.backends.base import Feed
from draftproof.batch.answering import Answerer
from draftproof.batch.rows import RowOptions
from draftproof.batch.source import Row
from draftproof.errors import NoTokenError
from draftproof.grammar import MOST_CHARACTERS, Grammars
from draftproof.grammar_check import BusyError, Checker
from draftproof.peak import release_freed_memory

llguidance = pytest.importorskip("llguidance", reason="the extra serve is not installed")
PANIC = r"regex:(é|\w)|\w"


@pytest.fixture(scope="module")
def engine():
    return Engine.load("embedded:target", drafter="none")


@pytest.fixture(scope="module")
def grammars(engine):
    return engine.grammars


# --- a depth that ends a process ------------------------------------------------------------------------------------

_CHAINS = """
import json, sys
from draftproof import Engine, UserError

def lark(count, tail, name="r"):
    rules = "".join(f"{name}{n}: {name}{n + 1}{tail}\\n" for n in range(count))
    return f'lark:start: {name}0\\n{rules}{name}{count}: "b"\\n'

def schema(count, link):
    made = {f"d{n}": link({"$ref": f"#/$defs/d{n + 1}"}) for n in range(count)} | {f"d{count}": {"type": "null"}}
    return "json_schema:" + json.dumps({"$ref": "#/$defs/d0", "$defs": made}, separators=(",", ":"))

specs = [
    lark(4500, ' | "a"'), lark(6500, ' "a"'), lark(9000, ""),
    lark(5000, "", "R"),
    schema(1700, lambda ref: {"type": "object", "properties": {"a": ref}}),
    schema(1900, lambda ref: {"anyOf": [ref, {"type": "null"}]}),
    schema(2100, lambda ref: {"type": "array", "items": ref}),
    schema(2900, lambda ref: {"allOf": [ref]}),
    schema(3500, lambda ref: ref),
]
engine = Engine.load("embedded:target", drafter="none")
if sys.argv[1] == "unchecked":
    engine.grammars._checker = None
for spec in specs:
    assert len(spec) < 131072, len(spec)
    try:
        constraint = engine.grammars.constraint(spec)
    except UserError as error:
        print("refused", len(str(error)) < 200)
    else:
        print("compiled", bool(constraint.fresh().allowed([], [()]).any()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("checked", ["checked", "unchecked"])
def test_chains_of_references_end_no_process(checked):
    """On a stack of 8 MB each of these ended the process by a signal."""
    done = subprocess.run([sys.executable, "-c", _CHAINS, checked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    lines = done.stdout.splitlines()
    assert len(lines) == 9
    assert set(lines) <= {"refused True", "compiled True"}
    assert lines.count("compiled True") >= 5


def test_a_depth_beyond_the_large_stack_is_refused(monkeypatch, engine):
    """The process in which grammars are tried ends, and this one goes on."""
    script = (
        f"import sys; sys.argv = ['x']; exec(open({grammar_compile.__file__!r}).read().replace('512 << 20', '1 << 20'))"
    )
    started = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: started([command[0], "-c", script], **options))
    checker = Checker(engine.tokenizer.backend_tokenizer.to_str(), engine.target.vocab_size, engine.eos_token_ids)
    chain = "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(9000)) + 'r9000: "b"\n'
    with pytest.raises(UserError, match="too much memory, or refers too deep"):
        checker.cost("lark", chain)
    assert checker.cost("lark", 'start: "a"').seconds < 1


# --- work and memory --------------------------------------------------------------------------------------------------


def slow(size):
    """Each terminal holds the next one, which is cubic in llguidance."""
    rules = "".join(f"T{n}: T{n + 1} /[a-z]/\n" for n in range(size))
    return f'lark:start: T0\n{rules}T{size}: "b"\n'


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (slow(5000), "takes too long to compile"),
        (f"regex:{'a?' * 60_000}", "too big"),  # took 12.9 GB
        (f"regex:{'a*b*' * 30_000}", "too big"),  # took 100 s
        (rf"regex:{chr(92)}w{{1,3}}" + r"\w" * 60_000, "cannot be"),
        (f"regex:{'a' * (MOST_CHARACTERS + 1)}", "expected at most 131072 characters"),
        ("json_schema:" + "[" * 60_000, "cannot be read"),
        (PANIC, "cannot be read: panic"),
        (f"regex:{'(' * 60_000}", "cannot be read"),
        (f"regex:{'x' * 3000}(", "cannot be read"),
        (f"lark:start: {'x' * 3000}", "cannot be read"),
        ('lark:start: "a" b\nb: ' + '"y" ' * 500 + "nothing", "cannot be read"),
    ],
)
def test_what_takes_too_much_is_refused_in_a_few_words(grammars, spec, message):
    with pytest.raises(UserError, match=message) as error:
        grammars.constraint(spec)
    assert len(str(error.value)) < 200
    assert len(re.findall(r"(.)\1{40}", str(error.value))) == 0, "it quotes the grammar"
    assert grammars.constraint("regex:[ab]c").allowed([], [()]).any()


def test_a_short_grammar_does_not_wait_for_long_ones(grammars):
    threads = [threading.Thread(target=_refused, args=(grammars, slow(5000 + n))) for n in range(3)]
    for each in threads:
        each.start()
    time.sleep(0.3)
    start = time.monotonic()
    grammars.constraint("regex:[ab]{7}c")
    taken = time.monotonic() - start
    assert any(each.is_alive() for each in threads)
    assert taken < 3
    for each in threads:
        each.join()


def _refused(grammars, spec):
    with pytest.raises(UserError):
        grammars.constraint(spec)


@pytest.mark.slow
def test_memory_of_a_pattern_of_twenty_characters(grammars):
    """Each kept 170 MB, for good."""
    release_freed_memory()
    before = _resident()
    for size in range(700, 712):
        try:
            constraint = grammars.constraint(f"regex:((a{{{size}}}){{1000}}){{10}}")
            constraint.allowed([], [()])
        except UserError:
            pass
    gc.collect()
    release_freed_memory()  # as the server does
    assert _resident() - before < 400 << 20


def _resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


HONEST = {
    "1000 values": {"enum": [f"value number {n}" for n in range(1000)]},
    "20000 characters": {"type": "string", "minLength": 100, "maxLength": 20_000},
    "300 properties": {"type": "object", "properties": {f"p{n}": {"type": ["string", "null"]} for n in range(300)}},
    "patterns": {"type": "string", "pattern": r"^[A-Za-z0-9._%+-]{1,64}@([A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,63}$"},
    "200 kinds": {
        "anyOf": [
            {"type": "object", "properties": {f"k{n}": {"const": n}}, "additionalProperties": False} for n in range(200)
        ]
    },
}


@pytest.mark.parametrize("kind", HONEST)
def test_honest_grammars_are_not_refused(grammars, kind):
    constraint = grammars.constraint(f"json_schema:{json.dumps(HONEST[kind])}")
    source, output = random.Random(1), []
    for _ in range(200):
        legal = constraint.allowed(output, [()])[0].nonzero().flatten().tolist()
        token = source.choice(legal)
        if token in (0, *grammars._tokenizer.eos_tokens):
            break
        output.append(token)


def test_a_choice_of_a_thousand_and_words_in_other_scripts(grammars):
    source = random.Random(2)
    words = {"".join(source.choices(string.ascii_lowercase, k=8)) for _ in range(1000)}
    for spec in (f"regex:({'|'.join(words)})", r"regex:(\w+[ ,.]?){1,200}", "regex:[a-z ]{1,5000}"):
        assert grammars.constraint(spec).allowed([], [()]).any()


# --- a lexer that others have filled ----------------------------------------------------------------------------------


@pytest.fixture
def few_states(monkeypatch):
    """Grammars whose lexers have few states."""
    monkeypatch.setitem(grammar_compile.LIMITS, "max_lexer_states", 300)
    monkeypatch.setitem(grammar_compile.LIMITS, "precompute_large_lexemes", False)

    class Letters:
        eos_token_id, bos_token_id, special_token_ids = 2, None, (2,)
        tokens = (b"a", b"b", b"#")

        def __call__(self, text):
            return ["ab".index(chr(each)) for each in text if chr(each) in "ab"]

    return Grammars(llguidance.LLTokenizer(llguidance.TokenizerWrapper(Letters())), 3)


SPEC = "regex:(a|b)*a(a|b){20}"


def wander(constraint, seed, most=400):
    """Follow a constraint at random until it fails; how far it came."""
    source, output = random.Random(seed), []
    for _ in range(most):
        try:
            constraint.allowed(output, [()])
        except NoTokenError:
            break
        output.append(source.randrange(2))
    return len(output)


def test_who_shares_a_grammar_goes_on_when_others_have_filled_its_lexer(few_states):
    stranger, other = few_states.constraint(SPEC), few_states.constraint(SPEC)
    output = [0, 1, 0]
    other.allowed(output, [(), (0,)])
    end = wander(stranger, 1)
    assert 5 < end < 400, "the stranger fails in the end, with a lexer of its own"
    for _ in range(25):
        expected = [[True, True, len(text) > 20 and text[-21] == 0] for text in (output, [*output, 0])]
        assert other.allowed(output, [(), (0,)]).tolist() == expected
        output.append(0)


def test_a_request_that_fills_its_own_lexer_fails_and_the_grammar_is_made_again(few_states):
    alone = few_states.constraint(SPEC)
    kept = few_states._compiled[SPEC]
    end = wander(alone, 1)
    assert end < 400
    later = few_states.constraint(SPEC)
    assert few_states._compiled[SPEC] is not kept
    assert wander(later, 1) == end, "as far as the first one"


def test_slow_masks_wear_a_grammar_out(few_states, monkeypatch):
    monkeypatch.setattr("draftproof.grammar._SLOW_MASK", 0.0)
    monkeypatch.setattr("draftproof.grammar._MOST_GROWTH", 0.0)
    constraint = few_states.constraint("regex:[ab]{3}")
    constraint.allowed([], [()])
    again = few_states.constraint("regex:[ab]{3}")
    assert again._grammar is not constraint._grammar


def test_memory_of_grammars_is_bounded(engine, monkeypatch):
    made = Grammars.of(engine.tokenizer, engine.target.vocab_size, engine.eos_token_ids)
    first = made.constraint("regex:[ab]{3}")
    size = max(first._grammar.cost.size, 1)
    monkeypatch.setattr("draftproof.grammar._MOST_KEPT", 3 * size)
    for number in range(4, 12):
        made.constraint(f"regex:[ab]{{{number}}}")
    assert made._size(made._compiled.values()) <= 3 * size
    monkeypatch.setattr("draftproof.grammar._MOST_HELD", size)
    with pytest.raises(BusyError, match="try again later"):
        made.constraint("regex:[xy]{4}")
    del first
    monkeypatch.undo()
    assert made.constraint("regex:[xy]{4}").allowed([], [()]).any()


# --- the process ------------------------------------------------------------------------------------------------------


def test_a_grammar_is_tried_once(grammars, monkeypatch):
    asked = []
    checker = grammars._checker
    for lane in checker._lanes:
        ask = lane.ask
        monkeypatch.setattr(lane, "ask", lambda kind, text, ask=ask: (asked.append(text), ask(kind, text))[1])
    threads = [threading.Thread(target=checker.cost, args=("regex", "[ab]{11}")) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for _ in range(3):
        with pytest.raises(UserError):
            checker.cost("regex", "(ab){11}(")
    assert asked == ["[ab]{11}", "(ab){11}("]


def test_a_process_that_was_ended_is_started_again(engine):
    made = Grammars.of(engine.tokenizer, engine.target.vocab_size, engine.eos_token_ids)
    made.constraint("regex:a{3}")
    process = made._checker._lanes[0]._free.queue[-1]
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    assert made.constraint("regex:a{4}").allowed([], [()]).any()
    again = made._checker._lanes[0]._free.queue[-1]
    assert again is not process
    running = again._process
    del made, again, process
    gc.collect()
    assert running.wait(10) is not None, "it ends with its owner"


def test_nothing_of_the_current_folder_is_run(tmp_path):
    (tmp_path / "llguidance.py").write_text("open('trap', 'w')")
    (tmp_path / "json.py").write_text("open('trap', 'w')")
    first = {"path": [p for p in sys.path if p], "tokenizer": "byte", "vocab_size": None, "ends": None}
    done = subprocess.run(
        [sys.executable, "-I", grammar_compile.__file__],
        input=json.dumps(first).encode() + b"\n",
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.stdout.startswith(b"{}"), done.stderr
    assert not (tmp_path / "trap").exists()


# --- panics -----------------------------------------------------------------------------------------------------------


class PanicException(BaseException):
    """As pyo3's, which is no Exception."""


class Panicking:
    """A constraint whose masks panic."""

    def __init__(self, inner):
        self._inner = inner

    def fresh(self):
        return Panicking(self._inner.fresh())

    def allowed(self, output_ids, paths):  # noqa: ARG002 - as Constraint
        raise PanicException("called `Option::unwrap()` on a `None` value")

    def forced(self, output_ids):  # noqa: ARG002 - as Constraint
        raise PanicException("called `Option::unwrap()` on a `None` value")


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_a_panic_in_a_mask_is_an_error_of_its_request(drafter):
    made = Engine.load("embedded:target", drafter=drafter)
    params = SamplingParams(grammar="regex:[ab]{5}", max_tokens=8, seed=1)
    (bad,) = made.add("Once", params, constraint=Panicking(made.grammars.constraint(params.grammar)))
    (good,) = made.add("Once", params)
    while not (bad.finished and good.finished):
        made.step()
    assert "unwrap" in str(bad.error)
    assert good.error is None


def test_a_matcher_that_panics_fails_as_others_do(grammars, monkeypatch):
    constraint = grammars.constraint("regex:[ab]{6}")

    class Matcher:
        def __getattr__(self, name):
            raise PanicException("index out of bounds")

    monkeypatch.setattr(constraint, "_matcher", Matcher())
    monkeypatch.setattr(constraint._grammar, "matcher", Matcher)
    for call in (lambda: constraint.allowed([1], [()]), lambda: constraint.forced([1])):
        with pytest.raises(NoTokenError, match="index out of bounds"):
            call()


def test_a_row_that_panics_is_a_row_with_an_error(engine, monkeypatch):
    add = engine.add

    def panicking(prompt, *args, **options):
        if prompt == "bad":
            raise PanicException("called `Option::unwrap()` on a `None` value")
        return add(prompt, *args, **options)

    monkeypatch.setattr(engine, "add", panicking)
    answerer = Answerer(engine, RowOptions(sampling={"max_tokens": 3}, chat=False))
    rows = [Row(n, {"prompt": prompt}) for n, prompt in enumerate(["good", "bad", "good"])]
    found = [each for results in answerer(rows) for each in results]
    assert {each.id: each.failed for each in found} == {0: False, 1: True, 2: False}


def test_a_batch_line_with_a_grammar_that_panics_or_goes_deep(engine):
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    answerer = Answerer(engine, RowOptions(lines=True, model="m"))

    def line(name, **body):
        body = {"model": "m", "prompt": "Once", "max_tokens": 3, **body}
        return Row(name, {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})

    rows = [
        line("panic", structured_outputs={"regex": PANIC.partition(":")[2]}),
        line("deep", structured_outputs={"json": "[" * 60_000}),
        line("good", structured_outputs={"regex": "[ab]{3}"}),
    ]
    found = {each.id: each for results in answerer(rows) for each in results}
    assert {name: each.failed for name, each in found.items()} == {"panic": True, "deep": True, "good": False}
    assert found["panic"].rows[0]["response"]["status_code"] == 400


def test_logits_of_the_target_are_what_the_mask_leaves(engine):
    """The mask of a compiled grammar that is handed over with a request is used as it is."""
    constraint = engine.grammars.constraint("regex:[ab]{2}")
    params = SamplingParams(grammar="regex:[ab]{2}", temperature=0)
    (request,) = engine.add("Once", params, constraint=constraint)
    while not request.finished:
        engine.step()
    ids = engine.encode("Once")[1]
    row = engine.target.forward([Feed(engine.target.open(), ids, None)])[0].logits[-1]
    best = row.masked_fill(~constraint.allowed([], [()])[0], -torch.inf).argmax()
    assert request.output_ids[0] == int(best)
