"""The command line: streams what JSON reports, errs in one line, and times speculation against plain decoding."""

import dataclasses
import errno
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from draftproof import Engine, SamplingParams, UserError, __version__, models, native, sampling
from draftproof.cli import COMMANDS, _compare, app, main
from draftproof.cli._options import field_help
from draftproof.cli._sampling import SAMPLING
from draftproof.embedded import draft_dir, target_dir
from draftproof.engine.drafter_parts import DRAFTERS
from draftproof.engine.stopper_parts import OFFERED_STOPPERS
from draftproof.engine.verifier_parts import VERIFIERS
from draftproof.sampling import MODEL_DEFAULTS
from support.commands import environment
from support.docs_pages import every_command

QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
ENV = os.environ | QUIET
STORY = "Once upon a time"
loaded = functools.cache(Engine.load)


def run(*args, stdin=None, code=0):
    """A call in this process; checks the exit code, and that an error is one line that does not show the prompt."""
    result = CliRunner().invoke(app, list(args), input=stdin, prog_name="draftproof")
    assert result.exit_code == code, result.output
    if code:
        assert result.stdout == ""
        assert result.stderr.startswith("draftproof: error: ")
        assert result.stderr.count("\n") == 1
        assert "Traceback" not in result.stderr
        assert STORY not in result.stderr
    return result


def call(*args, **options):
    """A call in a process of its own."""
    command = [sys.executable, "-c", "from draftproof.cli import main; main()", *args]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120, check=False, **options)


def generate(*args, **options):
    return run("generate", *args, **options)


def objects(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def warm(monkeypatch):
    """Engines loaded once for the whole file."""
    monkeypatch.setattr(Engine, "load", loaded)


# --- the group -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["nonsense"]])
def test_the_group_answers_without_torch(args):
    code = (
        "import sys, typer\nfrom draftproof.cli import app\n"
        f"try:\n    app({args!r}, prog_name='draftproof')\n"
        "except SystemExit: pass\nassert not {'torch', 'transformers', 'prompt_toolkit'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_version_and_help():
    assert run("--version").stdout == f"draftproof {__version__}\n"
    shown = run("-h").stdout
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name):
    shown = run(name, "--help").stdout
    assert "--install-completion" not in shown
    assert "--debug" in shown


@pytest.mark.parametrize(
    "args", [["nonsense"], ["--nonsense"], ["generate", "--nonsense"], ["generate", "--top-k", "x"]]
)
def test_usage_errors_exit_with_2(args):
    assert "(see draftproof" in run(*args, code=2).stderr


def test_debug_shows_the_traceback(monkeypatch):
    shown = CliRunner().invoke(app, ["generate", STORY, "--verifier", "x", "--debug"])
    assert shown.exit_code == 1
    assert "Traceback" in shown.stderr
    assert shown.stderr.splitlines()[-1].startswith("draftproof: error: verifier: expected one of ")
    monkeypatch.setenv("DRAFTPROOF_DEBUG", "1")
    assert "Traceback" in CliRunner().invoke(app, ["generate", STORY, "--verifier", "x"]).stderr


def test_what_nobody_foresaw_is_one_line_too(monkeypatch):
    monkeypatch.setattr(Engine, "load", lambda *_, **__: {}["gone"])
    assert "unexpected KeyError: 'gone' (--debug shows where)" in generate(STORY, code=1).stderr


# --- sampling options ------------------------------------------------------------------------------------------------


def options_of_generate():
    from draftproof.cli.generate import app as generate_app

    return {option.name: option for option in typer.main.get_command(generate_app).params}


@pytest.mark.parametrize("field", dataclasses.fields(SamplingParams), ids=lambda field: field.name)
def test_every_field_is_an_option_with_its_default_and_help(field):
    option = options_of_generate()[field.name]
    assert f"--{field.name.replace('_', '-')}" in option.opts
    assert option.help
    repeated = option.multiple
    if field.name in MODEL_DEFAULTS:
        assert option.default is None
        assert option.help.endswith(f"; without it the model's own, else {field.default}.")
    else:
        assert (option.default or field.default) == field.default if repeated else option.default == field.default
    assert repeated == (field.name in {"logit_bias", "bad_words", "stop", "stop_token_ids"})


def test_help_is_the_docstrings():
    texts = field_help(SamplingParams)
    assert texts["seed"].startswith("Seed of this request's random draws;")
    assert texts["temperature"].startswith("0 is greedy: all mass")
    assert "0 is greedy: all mass" in " ".join(run("generate", "--help").stdout.replace("│", " ").split())
    assert [parameter.name for parameter in SAMPLING.parameters().values()] == list(texts)


def captured(monkeypatch, *args):
    """The SamplingParams that arrive at the engine."""
    seen = []

    def stop(_engine, _prompt, params, **_options):
        seen.append(params)
        raise UserError("seen")

    monkeypatch.setattr(Engine, "stream", stop)
    monkeypatch.setattr(Engine, "add", stop)
    generate(STORY, *args, code=1)
    return seen[0]


@pytest.mark.usefixtures("warm")
def test_options_arrive_as_given(monkeypatch):
    assert captured(monkeypatch) == SamplingParams()
    args = (
        "--n 2 --temperature 0.5 --top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty -1 "
        "--frequency-penalty 0.2 --logit-bias 3=-5 --logit-bias 4=1.5 --bad-words cat --bad-words dog --stop END "
        "--stop . --stop-token-ids 7 --stop-token-ids 8 --include-stop-str-in-output --ignore-eos --min-tokens 2 "
        "--max-tokens none --seed 9 --logprobs 0 --no-skip-special-tokens"
    )
    assert captured(monkeypatch, *args.split()) == SamplingParams(
        n=2,
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=0.2,
        logit_bias={3: -5, 4: 1.5},
        bad_words=["cat", "dog"],
        stop=["END", "."],
        stop_token_ids=[7, 8],
        include_stop_str_in_output=True,
        ignore_eos=True,
        min_tokens=2,
        max_tokens=None,
        seed=9,
        logprobs=0,
        skip_special_tokens=False,
    )


# --- what goes where -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm")
def test_the_streamed_text_is_the_one_json_reports():
    args = (STORY, "--seed", "5", "--max-tokens", "40")
    streamed = generate(*args)
    (reported,) = objects(generate(*args, "--json"))
    assert streamed.stdout == reported["text"] + "\n"
    assert reported["text"]
    for said in (
        "40 tokens in",
        "tokens per target call",
        "drafted",
        "stopper auto",
        "verifier gumbel",  # a text with a seed does not depend on the clock
        "lossless",
        "same text for a seed: yes" if native.levels() else "same text for a seed: but for rounding",
        "time: draft",
    ):
        assert said in streamed.stderr
    assert streamed.stderr.count("\n") == 1
    quiet = generate(*args, "--quiet")
    assert (quiet.stdout, quiet.stderr) == (streamed.stdout, "")


@pytest.mark.usefixtures("warm")
def test_json_has_the_documented_fields():
    result = generate(STORY, "--json", "--n", "2", "--seed", "1", "--max-tokens", "32", "--logprobs", "1")
    assert result.stderr == ""
    first, second = objects(result)
    assert (first["index"], second["index"]) == (0, 1)
    assert first["token_ids"] != second["token_ids"]
    assert len(first["logprobs"]) == len(first["token_ids"]) == 32
    fields = {
        "prompt",
        "text",
        "token_ids",
        "finish_reason",
        "lossless",
        "same_bits",
        "same_text",
        "drafter",
        "stopper",
        "verifier",
        "stats",
        "seed",
    }
    assert fields <= set(first)
    assert first["same_bits"] == ("rounding" not in first) == bool(native.levels())
    assert first["same_text"] == ("yes" if first["same_bits"] else "but for rounding")
    assert "compare" not in first
    counts = {"num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"}
    rates = {"block_efficiency", "discard_rate", "verification_rate", "tokens_per_second"}
    assert counts | rates <= set(first["stats"])
    assert set(first["stats"]["seconds"]) == {"draft", "target", "verify", "other", "total"}


@pytest.mark.usefixtures("warm")
def test_a_drafter_by_its_full_name_and_none():
    (none,) = objects(generate(STORY, "--json", "--drafter", "none", "--max-tokens", "4"))
    assert (none["drafter"], none["stopper"], none["stats"]["num_draft_tokens"]) == ("none", None, 0)
    only_target = generate(STORY, "--target", "embedded:target", "--max-tokens", "4")
    assert "nothing drafted | drafter auto" in only_target.stderr, "four tokens are too few to draft"


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("argument", [["-"], []])
def test_the_prompt_may_come_from_stdin(argument):
    args = ("--seed", "5", "--max-tokens", "8", "--quiet")
    assert generate(*argument, *args, stdin=STORY + "\n").stdout == generate(STORY, *args).stdout


@pytest.mark.usefixtures("warm")
def test_many_prompts_as_lines_and_as_json_lines(tmp_path):
    lines = tmp_path / "prompts.txt"
    lines.write_text("Once\n\nThere was\r\nLily\u2028and\n")
    found = objects(generate("--prompts", str(lines), "--json", "--max-tokens", "4", "--max-batch", "2"))
    assert [each["prompt"] for each in found] == ["Once", "There was", "Lily\u2028and"]
    records = [{"prompt": "Once"}, {"text": "There"}, {"turns": ["Lily", "more"]}, {"instruction": "A cat"}]
    many = tmp_path / "prompts.jsonl"
    many.write_text("\n".join(map(json.dumps, records)))
    found = objects(generate("--prompts", str(many), "--json", "--max-tokens", "4"))
    assert [each["prompt"] for each in found] == ["Once", "There", "Lily", "A cat"]
    shown = generate("--prompts", str(lines), "--n", "2", "--max-tokens", "4").stdout
    assert shown.startswith("=== prompt 1, continuation 1 ===\n")
    assert "=== prompt 3, continuation 2 ===\n" in shown


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "a"}\n{broken\n', "line 2: not JSON"),
        (b'{"prompt": "a"}\n\n{"question": "b"}\n', "line 3: expected an object with one of prompt, text"),
        (b"[1]\n", "line 1: expected an object"),
        (b'{"prompt": 7}\n', "line 1: expected text in prompt, got int"),
        (b'{"turns": []}\n', "line 1: expected text in turns, got nothing"),
        (b'{"prompt": ""}\n', "line 1: the prompt is empty"),
        (b'{"prompt": "\\ud800"}\n', "line 1: the prompt is not valid Unicode"),
        (b'{"prompt": "a"}\n\xff\n', "line 2: expected UTF-8 text"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b"\n \n", "expected one prompt per line"),
    ],
)
def test_broken_files_are_named_with_the_line(tmp_path, content, said):
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    shown = generate("--prompts", str(file), code=1).stderr
    assert said in shown
    assert str(file) in shown


@pytest.mark.usefixtures("warm")
def test_a_prompt_of_a_file_that_cannot_be_decoded_is_named(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("Once\n" + "cat " * 600 + "\n")
    assert f"{file}, line 2: prompt: expected 1 to" in generate("--prompts", str(file), code=1).stderr


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ([""], 1, "the prompt is empty"),
        (["Once", "upon"], 2, "put them in quotes"),
        (["Once", "--prompts", "x"], 2, "expected PROMPT or --prompts, got both"),
        (["--prompts", "/nowhere/p.txt"], 1, "cannot read /nowhere/p.txt"),
        (["Once", "--top-p", "2"], 2, "top_p: expected 0 < top_p <= 1, got 2.0"),
        (["Once", "--max-tokens", "-1"], 2, "max_tokens: expected an integer >= 0, or None for no limit, got -1"),
        (["Once", "--max-tokens", "few"], 2, "expected an integer or none"),
        (["Once", "--logit-bias", "3"], 2, "expected ID=VALUE"),
        (["Once", "--logit-bias", "3=1e9"], 2, "logit_bias"),
        (["Once", "--stop", ""], 2, "stop"),
        (["Once", "--system", "x", "--no-chat"], 2, "--system needs the chat template"),
        (["Once", "--verifier", "nonsense"], 1, "got 'nonsense'"),
        (["Once", "--stopper", "nonsense"], 1, "got 'nonsense'"),
        (["Once", "--stopper", "fixed:0"], 1, "fixed"),
        (["Once", "--stopper", "fixed:x"], 1, "fixed"),
        (["Once", "--target", "./nowhere"], 1, "nowhere"),
        (["Once", "--target", "./nowhere.gguf"], 1, "nowhere.gguf"),
        (["Once", "--drafter", "nonsense"], 1, "got 'nonsense'"),
        (["Once", "--device", "abacus"], 1, "abacus"),
        (["Once", "--dtype", "float7"], 1, "float7"),
    ],
)
def test_mistakes_before_decoding(args, code, said):
    assert said in generate(*args, code=code).stderr


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["Once", "--logit-bias", "99999=1"], "logit_bias"),
        (["Once", "--stop-token-ids", "99999"], "stop_token_ids"),
        (["once " * 400], "tokens"),
        (["Once", "--system", "x"], "no chat template"),
        (["Once", "--chat"], "no chat template"),
    ],
)
def test_mistakes_that_only_the_model_can_tell(args, said):
    assert said in generate(*args, code=1).stderr
    assert said in generate(*args, "--json", code=1).stderr


@pytest.mark.usefixtures("warm")
def test_compare_without_a_drafter_is_refused():
    assert "needs a drafter, but none is in effect" in generate(STORY, "--compare", "--drafter", "none", code=2).stderr


@pytest.mark.parametrize(
    ("file", "content"),
    [("model.safetensors", b"\x08" * 64), ("tokenizer.json", b'{"version": '), ("config.json", b"{")],
    ids=["weights", "tokenizer", "config"],
)
def test_broken_models_are_one_line(tmp_path, file, content):
    broken = tmp_path / "model"
    shutil.copytree(target_dir(), broken)
    (broken / file).write_bytes(content)
    assert str(broken) in generate(STORY, "--target", str(broken), code=1).stderr
    assert str(broken) in generate(STORY, "--target", "embedded:target", "--draft", str(broken), code=1).stderr


# --- chat ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def chat_model(tmp_path):
    """A model with a chat template."""
    model = tmp_path / "chat"
    shutil.copytree(draft_dir(), model)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return str(model)


def test_a_chat_template_is_used_when_there_is_one(chat_model):
    args = (STORY, "--target", chat_model, "--max-tokens", "2", "--json")
    assert objects(generate(*args))[0]["prompt"] == f"user: {STORY}\nassistant:"
    assert objects(generate(*args, "--system", "Be kind."))[0]["prompt"].startswith("system: Be kind.\nuser: ")
    assert objects(generate(*args, "--no-chat"))[0]["prompt"] == STORY


def test_a_chat_template_that_no_option_names_is_announced(chat_model, tmp_path):
    args = ("--target", chat_model, "--max-tokens", "2")
    notice = "the prompt is sent as a chat message, in the model's chat template; --no-chat sends the text as it is"
    assert generate(STORY, *args).stderr.startswith(f"draftproof: {notice}\n")
    for named in (["--chat"], ["--no-chat"], ["--system", "Be kind."], ["--quiet"], ["--json"]):
        assert "chat" not in generate(STORY, *args, *named).stderr
    many = tmp_path / "p.txt"
    many.write_text("Once\nThere\n")
    shown = generate("--prompts", str(many), *args).stderr
    assert shown.count("the prompts are sent as chat messages, in the model's chat template") == 1


# --- the model's own sampling defaults ------------------------------------------------------------------------------


@pytest.fixture
def cool(tmp_path):
    """A model whose generation config names sampling parameters."""
    model = tmp_path / "cool"
    shutil.copytree(draft_dir(), model)
    own = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 5}
    (model / "generation_config.json").write_text(json.dumps(own))
    return ("--target", str(model), "--stopper", "fixed:2")


def test_what_is_not_given_is_the_models_own(cool):
    (found,) = objects(generate(STORY, *cool, "--json"))
    assert (found["sampling"]["temperature"], found["sampling"]["top_p"]) == (0.6, 0.9)
    assert len(found["token_ids"]) == 5
    (found,) = objects(generate(STORY, *cool, "--json", "--temperature", "0", "--max-tokens", "3"))
    assert (found["sampling"]["temperature"], found["sampling"]["top_p"]) == (0, 0.9)
    assert len(found["token_ids"]) == 3
    (found,) = objects(generate(STORY, *cool, "--json", "--generation-config", "none", "--max-tokens", "none"))
    assert (found["sampling"]["temperature"], found["sampling"]["top_p"]) == (1, 1)
    assert len(found["token_ids"]) > 128 or found["finish_reason"] == "stop"
    assert (
        "generation_config: expected auto or none, got 'some'"
        in generate(STORY, *cool, "--generation-config", "some", code=1).stderr
    )


def test_the_summary_names_defaults_of_the_model_that_are_in_effect(cool):
    line = "sampling: temperature 0.6, top_p 0.9, max_tokens 5 (from the model's generation config)"
    assert generate(STORY, *cool).stderr.splitlines()[-1] == line
    some = generate(STORY, *cool, "--temperature", "0.6", "--max-tokens", "5").stderr
    assert some.splitlines()[-1] == "sampling: top_p 0.9 (from the model's generation config)"
    assert "sampling:" not in generate(STORY, *cool, "--generation-config", "none", "--max-tokens", "3").stderr
    assert generate(STORY, *cool, "--quiet").stderr == ""
    assert generate(STORY, *cool, "--json").stderr == ""


def test_given_values_are_checked_with_those_of_the_model(cool):
    said = generate(STORY, *cool, "--min-tokens", "9", code=2).stderr
    assert "min_tokens: expected 0 <= min_tokens <= max_tokens=5, got 9" in said
    assert generate(STORY, *cool, "--min-tokens", "200", "--max-tokens", "200", "--json").stdout


# --- requests that fail ----------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned(monkeypatch):
    """An engine in which the text "cat" cannot be decoded."""
    original = sampling.probabilities

    def broken(logits, transforms, *rest):
        if transforms.prompt_ids in bad:
            raise UserError("the logits hold NaN")
        return original(logits, transforms, *rest)

    engine = loaded("embedded:stories", "embedded:stories-draft", stopper="fixed:2")
    bad = [tuple(engine.encode("The cat")[1])]
    monkeypatch.setattr("draftproof.engine.loop.probabilities", broken)
    monkeypatch.setattr(Engine, "load", lambda *_, **__: engine)


@pytest.fixture
def three(tmp_path):
    file = tmp_path / "three.txt"
    file.write_text("Once\nThe cat\nThe dog\n")
    return file


def fails(*args):
    """A call that prints results and ends with code 1."""
    result = CliRunner().invoke(app, ["generate", *args, "--seed", "1", "--max-tokens", "4"], prog_name="draftproof")
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.stderr
    return result


@pytest.mark.usefixtures("poisoned")
def test_a_request_that_fails_is_named_and_the_others_are_shown(three):
    found = fails("--prompts", str(three))
    assert [line for line in found.stdout.splitlines() if line.startswith("===")] == [
        "=== prompt 1 ===",
        "=== prompt 3 ===",
    ]
    (error,) = [line for line in found.stderr.splitlines() if "error" in line]
    assert error.startswith(f"draftproof: error: {three}, line 2: request ")
    assert error.endswith("the logits hold NaN")
    assert "8 tokens in" in found.stderr


@pytest.mark.usefixtures("poisoned")
def test_a_request_that_fails_is_an_object_with_an_error_in_json(three):
    found = objects(fails("--prompts", str(three), "--json"))
    assert ["error" in each for each in found] == [False, True, False]
    assert (found[1]["prompt"], found[1]["index"]) == ("The cat", 0)
    assert found[1]["error"].endswith("the logits hold NaN")
    assert [len(found[place]["token_ids"]) for place in (0, 2)] == [4, 4]


@pytest.mark.usefixtures("poisoned")
def test_a_request_that_fails_is_left_out_of_the_comparison(three, monkeypatch):
    monkeypatch.setattr(_compare, "ENOUGH", 0.0)
    found = objects(fails("--prompts", str(three), "--json", "--compare"))
    assert ["compare" in each for each in found] == [True, False, True]
    assert "compare: " in fails("--prompts", str(three), "--compare").stderr


@pytest.mark.usefixtures("poisoned")
def test_only_requests_that_fail():
    assert fails("The cat", "--n", "2").stderr.count("draftproof: error: prompt 1, continuation ") == 2
    assert fails("The cat").stderr.startswith("draftproof: error: request ")
    assert objects(fails("The cat", "--json", "--compare"))[0]["error"]


# --- offline, and libraries ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["before the command", "after it"])
def test_offline_forbids_the_download_of_a_registered_model(place, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(models, "fetch", lambda *_: pytest.fail("downloaded"))
    words = ["generate", STORY, "--target", "smollm2-135m"]
    shown = run("--offline", *words, code=1) if place == "before the command" else run(*words, "--offline", code=1)
    assert "smollm2-135m is not on this machine, and --offline or HF_HUB_OFFLINE forbids its download" in shown.stderr
    assert "draftproof models pull smollm2-135m" in shown.stderr
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smollm2-135", "did you mean smollm2-135m?"),
        ("nosuch/model", "expected a name of `draftproof models list`, a hub id, or a path"),
    ],
)
def test_a_model_that_is_nowhere_here_is_an_error_of_ours(name, hint):
    made = run("generate", STORY, "--target", name, "--offline", code=1)
    assert f"'{name}': no such model is on this machine" in made.stderr
    assert made.stderr.rstrip().endswith(hint)


def test_no_command_module_imports_transformers():
    """So variables that a command sets are read when the libraries are imported, and help comes at once."""
    code = f"""
import importlib, sys
for name in {list(COMMANDS)}:
    importlib.import_module(f"draftproof.cli.{{name}}")
    print(name, {{"transformers", "huggingface_hub", "tokenizers", "prompt_toolkit"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{name} set()" for name in COMMANDS]


def test_quiet_libraries_do_not_import_transformers():
    code = (
        "import os, sys\nfrom draftproof.cli._quiet import quiet_libraries\n"
        "with quiet_libraries():\n    assert 'transformers' not in sys.modules\n"
        "    from transformers.utils import logging\n"
        "    assert logging.get_verbosity() == logging.ERROR and not logging.is_progress_bar_enabled()"
    )
    subprocess.run([sys.executable, "-c", code], env=ENV, check=True)


def test_bars_of_libraries_are_off_before_torch_is_imported():
    code = (
        "import sys\nfrom draftproof.cli import app\n"
        "try:\n    app(['generate', '--help'], prog_name='draftproof')\n"
        "except SystemExit: pass\n"
        "from tqdm.auto import tqdm\nassert 'torch' in sys.modules\nassert tqdm([1]).disable"
    )
    subprocess.run([sys.executable, "-c", code], env=ENV, check=True, capture_output=True)


# --- help texts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("generate",), ("bench", "run"), ("profile", "memory")], ids=" ".join)
def test_help_names_every_part_that_is_offered_and_no_other(words):
    command = every_command()[words]
    texts = {option.name: option.help for option in command.params}
    for name, parts in (("drafter", DRAFTERS), ("stopper", OFFERED_STOPPERS), ("verifier", VERIFIERS)):
        if name in texts:
            assert all(part.form in texts[name] for part in parts.values()), name
            assert "oracle" not in texts[name]


# --- compare ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm")
def test_compare_times_both_and_finds_the_tokens_identical_at_temperature_0(monkeypatch):
    monkeypatch.setattr(_compare, "ENOUGH", 0.0)
    args = (STORY, "--temperature", "0", "--max-tokens", "16", "--stopper", "fixed:4", "--compare")
    (reported,) = objects(generate(*args, "--json"))
    found = reported["compare"]
    assert found["identical"] is True
    assert found["pairs"] == _compare.FEWEST
    assert found["block_efficiency"] == reported["stats"]["block_efficiency"] > 1
    assert 0 < found["speed_up_low"] <= found["speed_up"] <= found["speed_up_high"]
    assert found["verdict"] in ("faster", "slower", "no clear difference")
    assert found["plain_tokens_per_second"] > 0
    assert "tokens identical to plain decoding (temperature 0, float32)" in generate(*args).stderr


@pytest.mark.usefixtures("warm")
def test_compare_says_nothing_of_tokens_when_sampling(monkeypatch):
    monkeypatch.setattr(_compare, "ENOUGH", 0.0)
    args = (STORY, "--max-tokens", "8", "--compare", "--n", "2")
    found = objects(generate(*args, "--json"))
    assert [each["compare"]["identical"] for each in found] == [None, None]
    assert "identical" not in generate(*args).stderr


def test_text_that_stdout_cannot_hold_is_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["draftproof", "--version"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with pytest.raises(SystemExit):
        main()
    sys.stdout.write("h\u00e9 \U0001f600")
    sys.stdout.flush()
    assert written.getvalue().splitlines()[1:] == [rb"h\xe9 \U0001f600"]


def test_closed_streams_swallow_what_is_written(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["draftproof", "generate", STORY, "--max-tokens", "2"])
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EPIPE])
def test_a_text_is_whole_where_nothing_can_be_written_to_stderr(monkeypatch, capsys, error):
    refused = []

    class Full(io.StringIO):
        def write(self, text):
            refused.append(text)
            raise OSError(error, "of a test")

    monkeypatch.setattr(sys, "argv", ["draftproof", "generate", STORY, "--max-tokens", "8", "--seed", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr(sys, "stderr", Full())
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().out) == (0, expected)
    assert refused


# --- whole processes -------------------------------------------------------------------------------------------------


def test_a_process_writes_text_and_one_line_and_nothing_of_the_libraries():
    done = call("generate", STORY, "--stopper", "fixed:4", "--max-tokens", "4", "--seed", "1")
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "Loading" not in done.stderr


def started():
    """A process that has printed its first line and has many to go."""
    code = "from draftproof.cli import main; main()"
    args = [
        sys.executable,
        "-c",
        code,
        "generate",
        STORY,
        "--stopper",
        "fixed:4",
        "--json",
        "--n",
        "999",
        "--max-tokens",
        "4",
        "--max-batch",
        "1",
    ]
    # A shell's background jobs ignore Ctrl-C, and a child inherits that: start as from a terminal.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(args, env=environment(**QUIET), preexec_fn=listen, **pipes)  # noqa: PLW1509 - no threads matter here
    assert process.stdout.readline().startswith("{")
    return process


@pytest.mark.slow
def test_a_closed_pipe_is_quiet():
    process = started()
    process.stdout.close()
    process.stdout = None
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (1, "")


def test_ctrl_c_exits_with_130_and_no_traceback():
    process = started()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "")
