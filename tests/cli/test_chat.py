"""`draftproof chat`: one message without a terminal, a conversation on one, and what is shown of it."""

import json
import re
import signal
import sys

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from typer.testing import CliRunner

from draftproof import Engine, SamplingParams
from draftproof.cli import app
from draftproof.cli import chat as command
from draftproof.cli._chat_commands import completions, is_open
from draftproof.cli._chat_input import LineReader
from draftproof.cli._conversation import AnswerEnd, Conversation, Notice
from draftproof.cli.chat import DraftedText, Screen, converse, status
from draftproof.draft import Origin
from draftproof.engine.request import Chunk
from draftproof.errors import UserError
from support.commands import call, environment
from support.reasoning_models import OPENED, thinking_engine
from support.serving import CHAT, STORY, small_engine
from support.terminal import Terminal

QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
MAIN = [sys.executable, "-c", "from draftproof.cli import main; main()"]


@pytest.fixture(scope="module")
def engine():
    """A model without a draft model, with a chat template."""
    made = Engine.load("embedded:target", drafter="ngram:4")
    made.prompts.use_template(CHAT)
    return made


@pytest.fixture
def warm(engine, monkeypatch):
    """The command gets this engine."""
    monkeypatch.setattr(Engine, "load", lambda *_, **__: engine)
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)


@pytest.fixture
def template(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(CHAT)
    return str(file)


# --- one message -----------------------------------------------------------------------------------------------------


def chat(*args, stdin=None):
    result = CliRunner().invoke(app, ["chat", *args], input=stdin, prog_name="draftproof")
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.usefixtures("warm")
def test_a_message_is_answered_and_the_line_says_how_fast(engine, template):
    args = ("--chat-template", template, "--seed", "1", "--max-tokens", "8", "--system", "Be kind.")
    found = chat(*args, stdin=STORY + "\n")
    (expected,) = engine.generate(
        [[{"role": "system", "content": "Be kind."}, {"role": "user", "content": STORY}]],
        SamplingParams(seed=1, max_tokens=8),
    )
    assert found.stdout == expected.text + "\n"
    assert re.search(
        r"8 tokens \| .* tokens/s \| .* tokens per target call \| \d+ of \d+ prompt tokens reused", found.stderr
    )
    assert chat(*args, STORY).stdout == chat(*args, "-", stdin=STORY).stdout == found.stdout
    quiet = chat(*args, "--quiet", STORY)
    assert quiet.stderr == "draftproof: cut off after 8 tokens (max_tokens)\n"
    assert chat(*args, "--show-drafts", STORY).stdout == found.stdout, "no colours but on a terminal"


@pytest.mark.usefixtures("warm")
def test_a_command_on_stdin_is_a_message(template):
    assert "tokens/s" in chat("--chat-template", template, "--max-tokens", "2", stdin="/exit\n").stderr


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["Once", "upon"], 2, "expected one MESSAGE, got 2 words (put them in quotes)"),
        ([""], 1, "the prompt is empty"),
        ([STORY], 1, "embedded:target has no chat template: name a file with one (--chat-template FILE)"),
        ([STORY, "--chat-template", "/nowhere/x"], 1, "cannot read /nowhere/x"),
        ([STORY, "--top-p", "7"], 2, "top_p: expected 0 < top_p <= 1, got 7.0"),
        ([STORY, "--n", "2"], 2, "No such option"),
    ],
)
def test_mistakes(args, code, said):
    assert said in call("chat", *args, code=code).stderr


@pytest.mark.usefixtures("warm")
def test_without_a_terminal_the_library_for_input_is_not_needed(engine, template, monkeypatch):
    monkeypatch.setitem(sys.modules, "draftproof.cli._chat_input", None)
    assert chat("--chat-template", template, "--max-tokens", "2", stdin="Once").stdout
    talk = Conversation(engine, {})
    with pytest.raises(ImportError, match="_chat_input"):
        converse(talk, Screen(talk, show_drafts=False, quiet=True), None, quiet=True)


# --- what is shown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(), ("the",)])
def test_the_drafted_part_of_a_text_is_that_of_the_accepted_tokens(engine, stop):
    split, pieces, drafted = DraftedText(Conversation(engine, {})), [], []
    for chunk in engine.stream(STORY, SamplingParams(temperature=0, max_tokens=160, stop=stop)):
        drafted += [at < chunk.accepted for at in range(len(chunk.token_ids))]
        found = split.split(chunk)
        assert "".join(text for text, _ in found) == chunk.text
        pieces += found
        output = chunk.output
    assert "".join(text for text, _ in pieces) == output.text
    if not stop:
        texts = [engine.tokenizer.decode([token]).strip() for token in output.token_ids]
        expected = [text for text, known in zip(texts, drafted, strict=True) if known and text]
        assert [text.strip() for text, known in pieces if known and text.strip()] == expected
        assert expected


def test_an_answer_that_fails_ends_its_line(engine, capsys):
    def events():
        yield Chunk("Once", (1,))
        raise UserError("the logits hold NaN")

    talk = Conversation(engine, {})
    command._do(talk, Screen(Conversation(engine, {}), show_drafts=False, quiet=False), events())
    found = capsys.readouterr()
    assert (found.out, found.err) == ("Once\n", "draftproof: error: the logits hold NaN\n")


def test_a_text_does_not_move_the_cursor_of_a_terminal(engine, capsys, monkeypatch):
    screen = Screen(Conversation(engine, {}), show_drafts=False, quiet=False)
    screen.show([Chunk("a\x1b[2Jb\tc\nd", (1,)), Notice("e")])
    assert capsys.readouterr().out == "a\x1b[2Jb\tc\nd\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    screen.show([Chunk("a\x1b[2Jb\tc\nd", (1,))])
    assert capsys.readouterr().out == "a\\x1b[2Jb\tc\nd\n"


@pytest.mark.parametrize("show_drafts", [True, False])
def test_drafted_tokens_have_the_colour_of_where_they_came_from(engine, capsys, monkeypatch, show_drafts):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    dog, cat = engine.prompts.plain("dog")[-1], engine.prompts.plain("cat")[-1]
    texts = [engine.tokenizer.decode([token]) for token in (dog, cat)]
    chunk = Chunk("".join(texts), (dog, cat), drafted=3, accepted=1, origin=Origin.LOOKUP)
    Screen(Conversation(engine, {}), show_drafts=show_drafts, quiet=True).show([chunk])
    coloured = f"\x1b[36m{texts[0]}\x1b[0m{texts[1]}\n"
    assert capsys.readouterr().out == (coloured if show_drafts else "".join(texts) + "\n")


def test_a_lossy_answer_is_called_so():
    engine = small_engine(verifier="typical")
    *_, end = Conversation(engine, {"max_tokens": 2}).say("Once")
    assert isinstance(end, AnswerEnd)
    assert "LOSSY" in status(end.request)


# --- what is entered -------------------------------------------------------------------------------------------------


def entered(keys):
    """What is read when keys are pressed."""
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        reader = LineReader(is_open, completions)
        pipe.send_text(keys)
        return reader()


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("Once\r", "Once"),
        ('"""a\rb"""\r', '"""a\nb"""'),
        ("a\x1b\rb\r", "a\nb"),
        ("\x1b[200~a\nb\x1b[201~\r", "a\nb"),  # pasted
    ],
)
def test_lines_that_are_entered(keys, line):
    assert entered(keys) == line


def test_what_was_entered_comes_back():
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        reader = LineReader(is_open, completions)
        pipe.send_text("Once\r")
        assert reader() == "Once"
        pipe.send_text("\x1b[A\r")
        assert reader() == "Once"


@pytest.mark.parametrize(("key", "error"), [("\x03", KeyboardInterrupt), ("\x04", EOFError)])
def test_keys_that_leave(key, error):
    with pytest.raises(error):
        entered(key)


# --- on a terminal ---------------------------------------------------------------------------------------------------


def test_a_conversation_on_a_terminal(template, tmp_path):
    args = ["chat", "Hello", "--chat-template", template, "--seed", "1", "--max-tokens", "8", "--show-drafts"]
    args += ["--target", "embedded:stories", "--drafter", "ngram:4"]
    file = tmp_path / "talk.json"
    with Terminal([*MAIN, *args], environment(**QUIET)) as terminal:
        terminal.until("/help lists the commands")
        terminal.until("prompt tokens reused")
        terminal.until(">>>")
        terminal.press("/set max_tokens none\r")
        terminal.until(">>>", 10)
        terminal.press("/set ignore_eos on\r")
        terminal.until("ignore_eos True")
        terminal.until(">>>")
        terminal.press('"""one\rtwo"""\r')
        terminal.until('two"""')
        terminal.until("\x1b[?2004l")  # the answer begins
        terminal.until(" ")
        terminal.press("\x03")
        terminal.until("stopped: the text so far is kept")
        terminal.until(">>>")
        terminal.press("/sav\t")
        terminal.until("/save")
        terminal.press(f" {file}\r")
        terminal.until("4 messages written")
        terminal.until(">>>")
        terminal.press("/nonsense\r")
        terminal.until("draftproof: error: command: expected one of")
        terminal.until(">>>")
        terminal.press("\x03")
        terminal.until("\x1b[?2004l")  # the first prompt is closed, which is drawn once more before
        terminal.until(">>>")
        terminal.press("\x03")
        terminal.until("Ctrl-D or /exit leaves")
        terminal.until(">>>")
        terminal.press("\x04")
        assert terminal.process.wait(30) == 0
    messages = json.loads(file.read_text())
    assert [message["content"] for message in messages[::2]] == ["Hello", "one\ntwo"]
    assert "Traceback" not in terminal.shown


def test_a_second_ctrl_c_ends_the_program(monkeypatch, engine):
    """Also where a round never ends."""
    talk = Conversation(engine, {})
    before, handlers = signal.getsignal(signal.SIGINT), []

    def endless():
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            handlers.append(signal.getsignal(signal.SIGINT))

    monkeypatch.setattr(engine, "step", endless)
    screen = Screen(Conversation(engine, {}), show_drafts=False, quiet=True)
    with pytest.raises(KeyboardInterrupt):
        command._do(talk, screen, talk.say("Once"))
    assert handlers == [before]
    assert signal.getsignal(signal.SIGINT) is before
    assert not engine.busy
    assert talk.messages == []


@pytest.mark.parametrize("show_drafts", [False, True])
def test_reasoning_stands_before_the_answer(capsys, show_drafts):
    engine = thinking_engine("model", template=OPENED)
    talk = Conversation(engine, {"max_tokens": 20, "seed": 1, "thinking_token_budget": 4})
    Screen(talk, show_drafts=show_drafts, quiet=True).show(talk.say("Who is there?"))
    answer = talk.messages[-1]
    assert capsys.readouterr().out.rstrip("\n") == f"{answer['reasoning_content']}\n\n{answer['content']}".rstrip("\n")
