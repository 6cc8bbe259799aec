"""A conversation without a terminal: its history, its commands, what is read again, and answers that are stopped."""

import json

import pytest

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import common_prefix
from draftproof.cli._chat_commands import COMMANDS, completions, is_open, take
from draftproof.cli._conversation import AnswerEnd, Conversation, Notice
from draftproof.cli._sampling import CHAT_SAMPLING
from draftproof.engine.request import Chunk
from support.reasoning_models import OPENED, thinking_engine
from support.serving import small_engine

LONG = "Once upon a time there was a little girl who liked to play in the park with her big red ball and her dog."


@pytest.fixture(scope="module")
def engine():
    return small_engine()


@pytest.fixture
def talk(engine):
    """A conversation with short answers."""
    engine.forget()
    return Conversation(engine, {"max_tokens": 12, "temperature": 0.0})


def done(events):
    """The text of an answer, and how it ended."""
    text = ""
    for event in events:
        if isinstance(event, Chunk):
            text += event.text
        if isinstance(event, AnswerEnd):
            return text, event
    return text, None


def said(talk, line):
    """What is shown for a command."""
    return "\n".join(event.text for event in take(talk, line) if isinstance(event, Notice))


def wrong(talk, line):
    """The error of a line, which changes nothing."""
    before = list(talk.messages), dict(talk.sampling)
    with pytest.raises(UserError) as caught:
        done(take(talk, line))
    assert (talk.messages, talk.sampling) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def roles(talk):
    return " ".join(message["role"] for message in talk.messages)


# --- answers ---------------------------------------------------------------------------------------------------------


def test_messages_and_answers_are_the_history(talk, engine):
    talk.set_system("Be kind.")
    text, end = done(talk.say("Once"))
    assert talk.messages[-1] == {"role": "assistant", "content": text}
    assert end.request.prompt == "system: Be kind.\nuser: Once\nassistant:"
    _, end = done(talk.say("And then?"))
    assert end.request.prompt == f"system: Be kind.\nuser: Once\nassistant: {text}\nuser: And then?\nassistant:"
    (alone,) = engine.generate([talk.messages[:-1]], SamplingParams(max_tokens=12, temperature=0))
    assert talk.messages[-1]["content"] == alone.text


@pytest.mark.parametrize("reuse", [True, False])
def test_the_next_turn_reads_only_what_is_new(reuse):
    talk = Conversation(small_engine(prefix_reuse=reuse), {"max_tokens": 24, "temperature": 0.0})
    _, first = done(talk.say(LONG))
    _, second = done(talk.say("And then?"))
    before, prompt = first.request.tokens, second.request.tokens[: second.request.prompt_length]
    known = min(common_prefix(before, prompt), len(before) - 1)  # the last token was never read
    assert first.request.reused == 0
    assert known > first.request.prompt_length + 20
    assert second.request.reused == (known if reuse else 0)


def test_an_answer_has_a_limit_unless_none_is_asked_for(engine):
    assert Conversation(engine, {}).params.max_tokens == 4096
    assert Conversation(engine, {"max_tokens": None}).params.max_tokens is None
    assert Conversation(engine, {"max_tokens": 5}).params.max_tokens == 5


def test_a_limit_that_cuts_an_answer_off_is_said(talk):
    _, end = done(talk.say("Once"))
    assert end.note == "cut off after 12 tokens (max_tokens)"


def test_a_full_context_is_said_and_the_conversation_goes_on(engine):
    talk = Conversation(engine, {"ignore_eos": True, "temperature": 0.0})
    _, end = done(talk.say(LONG))
    assert end.note.startswith(f"cut off: the context is full ({engine.target.max_positions} tokens); /undo removes")
    assert talk.context().endswith(", 0 left")
    shown = wrong(talk, "And then?")
    assert "prompt: expected 1 to 511 tokens, by the context of embedded:target, got " in shown
    assert "; /undo removes the last exchange" in shown
    said(talk, "/undo")
    talk.set("max_tokens", {"max_tokens": 2})
    assert done(talk.say("Once"))[1].request.finished
    assert roles(talk) == "user assistant"


def test_a_message_too_long_for_the_context_is_not_kept(talk):
    assert "/clear all of them" in wrong(talk, "once " * 600)
    assert talk.messages == []


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came(engine):
    talk = Conversation(engine, {"ignore_eos": True})
    text, events = "", talk.say("Once")
    for event in events:
        if isinstance(event, AnswerEnd):
            break
        text += event.text
        if len(text) > 20:
            talk.stop()
    assert event.stopped
    assert event.note == "stopped: the text so far is kept"
    assert talk.messages[-1] == {"role": "assistant", "content": text}
    assert not engine.busy
    assert not done(talk.say("Now?"))[1].stopped, "the next answer runs"


def test_an_answer_that_is_stopped_before_it_begins_leaves_nothing(talk, engine, monkeypatch):
    monkeypatch.setattr(engine, "step", talk.stop)
    text, end = done(talk.say("Once"))
    assert (text, end.stopped, talk.messages) == ("", True, [])
    assert end.note == "stopped before the answer began: nothing is kept"


def test_an_answer_that_fails_leaves_the_history_as_it_was(talk, engine, monkeypatch):
    done(talk.say("Once"))
    before = list(talk.messages)

    def broken(*_):
        raise UserError("the logits hold NaN")

    monkeypatch.setattr("draftproof.engine.loop.probabilities", broken)
    assert "the logits hold NaN" in wrong(talk, "Now?")
    assert talk.messages == before
    assert not engine.busy


def test_a_model_without_a_chat_template_is_refused():
    with pytest.raises(UserError, match=r"has no chat template: name a file with one .* draftproof generate"):
        Conversation(Engine.load("embedded:target", drafter="none"), {})


def test_parameters_that_do_not_go_with_each_other_are_refused(engine):
    with pytest.raises(UserError, match="min_tokens: expected 0 <= min_tokens <= max_tokens=2, got 9"):
        Conversation(engine, {"min_tokens": 9, "max_tokens": 2})


# --- commands --------------------------------------------------------------------------------------------------------


def test_help_lists_every_command(talk):
    assert all(f"/{name}" in said(talk, "/help") for name in COMMANDS)


def test_exit(talk):
    assert not talk.closed
    assert said(talk, "/exit") == ""
    assert talk.closed


@pytest.mark.parametrize("command", ["/clear", "/new"])
def test_clear_leaves_the_system_message(talk, command):
    talk.set_system("Be kind.")
    done(talk.say("Once"))
    said(talk, command)
    assert roles(talk) == "system"
    said(talk, "/system")
    assert talk.messages == []


def test_the_system_message_is_one(talk):
    done(talk.say("Once"))
    for text in ("Be kind.", "Be short."):
        said(talk, f"/system {text}")
        assert talk.system == text
        assert roles(talk) == "system user assistant"


def test_undo_removes_an_exchange(talk):
    done(talk.say("Once"))
    before = list(talk.messages)
    done(talk.say("And?"))
    assert said(talk, "/undo") == "removed the last exchange: 2 messages left"
    assert talk.messages == before
    said(talk, "/undo")
    assert wrong(talk, "/undo") == "there is nothing to undo: the conversation has no messages"


@pytest.mark.parametrize("seed", [None, 7, (1 << 63) - 1])
def test_retry_answers_again_with_another_seed(engine, seed):
    talk = Conversation(engine, {"max_tokens": 16, "seed": seed})
    assert wrong(talk, "/retry") == "there is no message to answer again: enter one first"
    answers = [done(talk.say(LONG)), done(take(talk, "/retry")), done(take(talk, "/retry"))]
    assert len({end.request.seed for _, end in answers}) == 3
    assert len({text for text, _ in answers}) == 3
    assert {end.request.prompt for _, end in answers} == {answers[0][1].request.prompt}
    assert roles(talk) == "user assistant"
    assert talk.messages[-1]["content"] == answers[-1][0]


def test_retry_says_that_temperature_0_has_one_answer(talk):
    done(talk.say("Once"))
    assert said(talk, "/retry").startswith("temperature is 0, so the answer will be the same")
    talk.set("temperature", {"temperature": 1.0})
    assert said(talk, "/retry") == ""


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temperature 0.7", "temperature", 0.7),
        ("/set top-k 5", "top_k", 5),
        ("/set max_tokens none", "max_tokens", None),
        ("/set seed 3", "seed", 3),
        ("/set stop END 'two words'", "stop", ("END", "two words")),
        ("/set logit_bias 3=-5 4=1", "logit_bias", {3: -5.0, 4: 1.0}),
        ("/set stop_token_ids 3 4", "stop_token_ids", (3, 4)),
        ("/set ignore_eos on", "ignore_eos", True),
        ("/set ignore_eos False", "ignore_eos", False),
        ('/set grammar json_schema:{"type": "object"}', "grammar", 'json_schema:{"type": "object"}'),
    ],
)
def test_set_reads_a_value_as_the_command_line_does(talk, line, name, value):
    said(talk, line)
    assert getattr(talk.params, name) == value
    said(talk, f"/set {name}")
    assert getattr(talk.params, name) == getattr(SamplingParams(max_tokens=4096), name)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("/set", "expected /set NAME [VALUE]"),
        ("/set nonsense 3", "parameter: expected one of temperature, "),
        ("/set n 2", "got 'n'"),
        ("/set temperature -1", "temperature: expected a finite number >= 0 (0 is greedy), got -1.0"),
        ("/set temperature hot", "temperature: "),
        ("/set top_k 1.5", "top_k: "),
        ("/set top_p 7", "top_p: expected 0 < top_p <= 1, got 7.0"),
        ("/set max_tokens few", "max_tokens: "),
        ("/set ignore_eos maybe", "ignore_eos: expected on or off, got 'maybe'"),
        ("/set logit_bias 3", "expected ID=VALUE"),
        ("/set stop 'END", "stop: No closing quotation"),
        ("/set grammar nonsense", "grammar: expected json_object"),
        ("/set min_tokens 99", "min_tokens: expected 0 <= min_tokens <= max_tokens=12, got 99"),
        ("/clear all", "/clear: expected nothing after it, got 'all'"),
        ("/save", "expected /save FILE"),
        ("/load ", "expected /load FILE"),
        ("/nonsense", "command: expected one of /help, /exit, "),
        ("/", "got / (put a message"),
    ],
)
def test_a_wrong_command_is_an_error_and_changes_nothing(talk, line, why):
    assert why in wrong(talk, line)


def test_show_has_the_parameters_and_the_context(talk, engine):
    assert "0 messages, 0 tokens in the context, 512 left" in said(talk, "/show")
    talk.set_system("Be kind.")
    done(talk.say("Once"))
    said(talk, "/set stop END")
    shown = said(talk, "/show")
    used = len(engine.encode(talk.messages)[1])
    for line in ("temperature 0.0", "max_tokens 12", "seed none", "stop END", "system message: Be kind."):
        assert line in shown.splitlines()
    assert f"3 messages, {used} tokens in the context, {512 - used} left" in shown
    assert "grammar" not in shown


def test_what_is_between_quotes_is_a_message(talk):
    done(take(talk, '"""\n/help\nOnce\n"""\n'))
    assert talk.messages[0]["content"] == "/help\nOnce"
    said(talk, "/clear")
    done(take(talk, '""" Once'))
    assert talk.messages[0]["content"] == '""" Once'


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", False), ("Once", False), ('"""', True), ('"""a', True), ('"""a"""', False), ('"""\na\n""" ', False)],
)
def test_a_message_of_several_lines_is_open_until_it_ends(text, expected):
    assert is_open(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/s", ["/system", "/save", "/set", "/show"]),
        ("/set top", ["top_k", "top_p"]),
        ("/set nonsense", []),
        ("/undo t", []),
        ("Once", []),
        ("set top", []),
    ],
)
def test_completions(text, expected):
    assert completions(text) == expected
    assert set(completions("/set ")) == set(CHAT_SAMPLING.only)


# --- files -----------------------------------------------------------------------------------------------------------


def test_what_is_saved_can_be_loaded(talk, engine, tmp_path):
    talk.set_system("Grüße")
    done(talk.say("Once"))
    file = tmp_path / "a talk.json"
    assert said(talk, f"/save {file}") == f"3 messages written to {file}"
    assert json.loads(file.read_text(encoding="utf-8")) == talk.messages
    assert list(tmp_path.iterdir()) == [file]
    other = Conversation(engine, talk.sampling)
    assert said(other, f"/load {file}").startswith(f"3 messages read from {file}; ")
    assert other.messages == talk.messages
    assert done(other.say("And?"))[0] == done(talk.say("And?"))[0]


def test_a_message_without_an_answer_is_answered_by_retry(talk, tmp_path):
    file = tmp_path / "asked.json"
    file.write_text('[{"role": "user", "content": "Once"}]')
    said(talk, f"/load {file}")
    assert wrong(talk, "And?") == "the last message has no answer: /retry answers it, /undo removes it"
    text, _ = done(take(talk, "/retry"))
    assert talk.messages[-1] == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "line 1: expected UTF-8 text"),
        (b"{}", "expected a list of messages, got dict"),
        (b"[7]", "message 1: expected an object with a role (system, user, assistant), got 7"),
        (b'[{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]', "message 2: expected an object with"),
        (b'[{"role": ["user"], "content": "a"}]', "message 1: expected an object with a role"),
        (b'[{"role": "user"}]', "message 1: expected a text in content, got null"),
        (b'[{"role": "user", "content": [{"type": "image"}]}]', "message 1: expected a text in content"),
        (b'[{"role": "user", "content": "\\ud800"}]', "message 1: expected valid Unicode"),
        (
            b'[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]',
            "expected a system message only as the first message",
        ),
    ],
)
def test_a_file_that_holds_no_messages_is_named(talk, tmp_path, content, why):
    done(talk.say("Once"))
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    shown = wrong(talk, f"/load {file}")
    assert why in shown
    assert str(file) in shown


def test_files_that_cannot_be_read_or_written_are_named(talk, tmp_path):
    assert wrong(talk, "/load /nowhere/talk.json") == "cannot read /nowhere/talk.json: No such file or directory"
    folder = tmp_path / "folder"
    folder.mkdir()
    assert wrong(talk, f"/save {folder}").startswith(f"cannot write {folder}: ")
    assert list(tmp_path.iterdir()) == [folder], "nothing unfinished is left"


def test_what_the_model_reasons_is_kept_apart_and_sent_again(tmp_path):
    engine = thinking_engine("suffix:4", template=OPENED)
    talk = Conversation(engine, {"max_tokens": 20, "seed": 1, "thinking_token_budget": 4})
    list(talk.say("Who is there?"))
    answer = talk.messages[-1]
    assert answer["reasoning_content"]
    assert "think>" not in answer["content"] + answer["reasoning_content"]
    assert f"<think>\n{answer['reasoning_content']}\n</think>\n\n{answer['content']}" in engine.encode(talk.messages)[0]
    talk.save(tmp_path / "chat.json")
    again = Conversation(engine, {})
    again.load(tmp_path / "chat.json")
    assert again.messages == talk.messages
