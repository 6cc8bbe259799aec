"""`draftproof batch`: one output for each id, whatever happens to a run; OpenAI's lines as the server answers them."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import draftproof
from draftproof import SamplingParams, UserError
from draftproof.batch import folder as folder_module
from draftproof.batch.answering import Answerer
from draftproof.batch.folder import AnswerFolder
from draftproof.batch.rows import RowOptions, columns, row_seed
from draftproof.batch.run import answer_all, settings_of
from draftproof.batch.source import Row, RowSource
from draftproof.cli import app
from support.serving import post, running, small_engine

STORY = "Once upon a time"
PROMPTS = [STORY, "The little dog", "Tim and Sue went", "One day a bird"]
SHORT = {"max_tokens": 8, "seed": 5}
MODEL = {"target": "embedded:target", "draft": "embedded:draft"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def some_rows(count):
    return [{"id": f"row {number}", "prompt": f"{PROMPTS[number % 4]} {number}"} for number in range(count)]


def outputs(out):
    """The rows of all files, and that no half-written file is among them."""
    assert not [each for each in out.iterdir() if each.name.startswith(".part")]
    return [json.loads(line) for file in sorted(out.glob("part-*.jsonl")) for line in file.read_text().splitlines()]


def assert_once(out, source, key="id"):
    found = Counter(str(row[key]) for row in outputs(out))
    wanted = {str(json.loads(line)[key]) for line in source.read_text().splitlines()}
    assert set(found) == wanted
    assert set(found.values()) == {1}


def command(*words):
    return CliRunner().invoke(app, ["batch", "--target", "embedded:target", *map(str, words)])


def folder_of(source, out, options, **more):
    return AnswerFolder(
        out,
        settings_of(source, MODEL, options),
        form="jsonl",
        names=columns(options),
        integers=source.integers,
        **{"rows_per_file": 2, **more},
    )


# --- answers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    return small_engine(max_batch=3)


def answered(engine, rows, **options):
    found = Answerer(engine, RowOptions(**options))(Row(row["id"], row) for row in rows)
    return {result.id: result for some in found for result in some}


def test_answers_for_a_seed_are_those_of_the_engine_in_any_company_and_order(engine):
    rows = [
        *some_rows(7),
        {"id": "ids", "prompt": [1, 5, 9]},
        {"id": "chat", "messages": [{"role": "user", "content": "Hi"}]},
    ]
    found = answered(engine, rows, sampling=SHORT, chat=False)
    again = answered(small_engine(max_batch=2), list(reversed(rows)), sampling=SHORT, chat=False)
    for row in rows:
        params = replace(engine.default_params, **SHORT | {"seed": row_seed(5, row["id"])})
        (alone,) = engine.generate(row.get("prompt", row.get("messages")), params)
        (made,) = found[row["id"]].rows
        assert made["token_ids"] == list(alone.token_ids)
        assert (made["text"], made["finish_reason"], made["error"]) == (alone.text, alone.finish_reason, None)
        assert again[row["id"]].rows[0]["token_ids"] == made["token_ids"]
    assert found["row 0"].completion_tokens == found["row 0"].rows[0]["completion_tokens"] > 0


def test_equal_prompts_have_seeds_of_their_own(engine):
    rows = [{"id": number, "prompt": STORY} for number in range(6)]
    found = answered(engine, rows, sampling={"max_tokens": 24, "seed": 1}, chat=False)
    assert len({tuple(each.rows[0]["token_ids"]) for each in found.values()}) > 3


def test_a_text_goes_through_the_chat_template_unless_told(engine):
    rows = [{"id": "a", "text": "Hello"}]
    chat = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    params = SamplingParams(**SHORT | {"seed": row_seed(5, "a")})
    for prompt, options in ((chat, {"system": "Be brief"}), (chat[1:], {}), ("Hello", {"chat": False})):
        (alone,) = engine.generate([prompt], params)
        assert answered(engine, rows, sampling=SHORT, **options)["a"].rows[0]["token_ids"] == list(alone.token_ids)


def test_continuations_are_rows_that_stay_together(engine):
    found = answered(engine, some_rows(2), sampling=SHORT | {"n": 3, "logprobs": 1, "prompt_logprobs": 0}, chat=False)[
        "row 1"
    ]
    assert [row["index"] for row in found.rows] == [0, 1, 2]
    assert len({row["seed"] for row in found.rows}) == 3
    first = found.rows[0]["logprobs"][0]
    assert first["token_id"] == found.rows[0]["token_ids"][0]
    assert set(first["top"][0]) == {"token_id", "logprob"}
    assert found.rows[0]["prompt_logprobs"][0] is None
    assert len(found.rows[0]["prompt_logprobs"]) == found.prompt_tokens


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": "word " * 3000}, "prompt: expected 1 to 511 tokens, "),
        ({"prompt": ""}, "the row's prompt is empty"),
        ({"prompt": [1, 99999]}, "token 1 of the prompt is 99999"),
        ({"prompt": 3}, "the row's prompt: expected a text or a list of token ids"),
        ({}, "expected a row with one of messages, prompt, text, got no prompt"),
        ({"prompt": "a", "text": "b"}, "expected a row with one of messages, prompt, text, got prompt and text"),
        ({"messages": "Hi"}, "the row's messages: expected a list"),
        ({"prompt": "a", "prediction": 4}, "the row's prediction: expected a text"),
        ({"prompt": "lone \ud800"}, "lone surrogate"),
    ],
)
def test_a_row_that_cannot_be_answered_has_its_error_as_its_output(engine, values, message):
    found = answered(engine, [{"id": "bad", **values}, {"id": "good", "prompt": STORY}], sampling=SHORT, chat=False)
    (bad,), (good,) = found["bad"].rows, found["good"].rows
    assert found["bad"].failed
    assert message in bad["error"]
    assert bad["text"] is None
    assert good["text"]
    assert set(bad) == set(good)


def test_an_error_of_a_single_request_is_its_rows(engine, monkeypatch):
    broken = engine._target_probs

    def sometimes(row, draft, output):
        if row.prompt_length == 3:
            output.logits[:] = float("nan")
        return broken(row, draft, output)

    monkeypatch.setattr(engine, "_target_probs", sometimes)
    found = answered(engine, [{"id": "a", "prompt": [1, 5, 9]}, {"id": "b", "prompt": [1, 5]}], sampling=SHORT)
    assert "NaN" in found["a"].rows[0]["error"]
    assert found["b"].rows[0]["error"] is None
    assert not engine.busy


# --- lines of OpenAI batch files ----------------------------------------------------------------------------------


LINES = [
    ("/v1/completions", {"prompt": STORY, "max_tokens": 6, "seed": 3, "logprobs": 2}),
    ("/v1/completions", {"prompt": [STORY, "The dog"], "max_tokens": 6, "seed": 3, "n": 2, "echo": True}),
    ("/v1/completions", {"prompt": [1, 5, 9], "max_tokens": 6, "seed": 3, "return_token_ids": True, "stop": ["a"]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "seed": 3}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 9, "seed": 3,
                              "logprobs": True, "top_logprobs": 2, "model": "story"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "seed": 3,
                              "response_format": {"type": "json_object"}}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 6, "seed": 3, "top_logprobs": 1}),
    ("/v1/responses", {"input": "Hi", "previous_response_id": "resp_1"}),
    ("/v1/completions", {"prompt": STORY, "max_tokens": 4, "seed": 3, "prompt_logprobs": 1}),
    ("/v1/completions", {"prompt": STORY, "model": "another"}),
    ("/v1/completions", {"prompt": STORY, "foo": 1}),
    ("/v1/completions", {"prompt": STORY, "temperature": -1}),
    ("/v1/completions", {"prompt": "word " * 3000}),
    ("/v1/completions", {"max_tokens": 4}),
    ("/v1/chat/completions", {"messages": []}),
]  # fmt: skip


def nearly(value):
    """A value whose numbers are equal but for rounding."""
    if isinstance(value, dict):
        return {name: nearly(each) for name, each in value.items()}
    if isinstance(value, list):
        return [nearly(each) for each in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


def test_lines_are_answered_as_the_server_answers(engine):
    rows = [
        {"id": f"line {number}", "custom_id": f"line {number}", "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(LINES)
    ]
    found = answered(engine, rows, lines=True, model="story")
    with running(engine) as (base, _):
        for row in rows:
            theirs = post(base, row["url"], **row["body"]) if "prompt" in row["body"] else None
            if theirs is None:
                import httpx

                theirs = httpx.post(base + row["url"], json=row["body"], timeout=60)
            (mine,) = found[row["id"]].rows
            assert mine["custom_id"] == row["id"]
            assert mine["error"] is None
            assert mine["response"]["status_code"] == theirs.status_code
            body, expected = mine["response"]["body"], theirs.json()
            for mine_or_theirs in (
                (body, expected),
                *zip(body.get("output", ()), expected.get("output", ()), strict=True),
            ):
                for name in ("id", "created", "created_at"):
                    assert len({each.pop(name, None) is None for each in mine_or_theirs}) == 1
            assert body == (expected if not engine.rounding else nearly(expected))
            assert found[row["id"]].failed == (theirs.status_code != 200)


@pytest.mark.parametrize(
    ("values", "status", "param"),
    [
        ({"method": "GET"}, 400, "method"),
        ({"url": "/v1/embeddings"}, 404, "url"),
        ({"body": None}, 400, "body"),
        ({"body": "{"}, 400, "body"),
        ({"body": {"prompt": STORY, "stream": True}}, 400, "stream"),
        ({"body": {"prompt": STORY, "return_drafts": True}}, 400, "return_drafts"),
    ],
)
def test_lines_that_no_server_would_get(engine, values, status, param):
    line = {"id": 1, "custom_id": 1, "method": "POST", "url": "/v1/completions", "body": {"prompt": STORY}, **values}
    (row,) = answered(engine, [line], lines=True)[1].rows
    assert row["response"]["status_code"] == status
    assert row["response"]["body"]["error"]["param"] == param


def test_lines_have_seeds_by_their_ids_and_keep_their_own(engine):
    body = {"prompt": STORY, "max_tokens": 12}
    lines = [
        {"id": name, "custom_id": name, "method": "POST", "url": "/v1/completions", "body": {**body, **more}}
        for name, more in (("a", {}), ("b", {}), ("c", {"seed": 9}))
    ]
    found = answered(engine, lines, lines=True, sampling={"seed": 2})
    again = answered(engine, lines[::-1], lines=True, sampling={"seed": 2})
    texts = {name: found[name].rows[0]["response"]["body"]["choices"][0]["text"] for name in "abc"}
    assert texts == {name: again[name].rows[0]["response"]["body"]["choices"][0]["text"] for name in "abc"}
    assert texts["c"] == engine.generate([STORY], SamplingParams(max_tokens=12, seed=9))[0].text
    assert texts["a"] != texts["b"]


def test_sampling_options_are_not_for_lines(tmp_path):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": STORY}}
    source = write(tmp_path / "lines.jsonl", [line])
    for option in (["--temperature", "0"], ["--n", "2"], ["--no-chat"]):
        found = command("--in", source, "--out", tmp_path / "out", *option)
        assert found.exit_code == 1
        assert "lines of an OpenAI batch file" in found.stderr
    assert not (tmp_path / "out").exists()


# --- runs that end early ------------------------------------------------------------------------------------------


def test_a_run_that_failed_goes_on_where_it_stood(engine, tmp_path):
    source, out, options = (
        RowSource(write(tmp_path / "in.jsonl", some_rows(11))),
        tmp_path / "out",
        RowOptions(sampling=SHORT),
    )
    asked = []

    def failing(rows):
        for results in Answerer(engine, options)(asked.append(row.id) or row for row in rows):
            yield results
            if len(outputs(out)) >= 4:
                raise RuntimeError("the power went out")

    with pytest.raises(RuntimeError, match="power"):
        answer_all(source, folder_of(source, out, options), failing, run={})
    before = outputs(out)
    assert 4 <= len(before) < 11
    asked.clear()
    again = folder_of(source, out, options)
    summary = answer_all(
        source, again, lambda rows: Answerer(engine, options)(asked.append(row.id) or row for row in rows), run={}
    )
    assert summary.before == len(before)
    assert summary.answered == len(asked) == 11 - len(before)
    assert_once(out, source.path)
    assert outputs(out)[: len(before)] == before
    manifest = json.loads((out / "_manifest.json").read_text())
    assert manifest["finished"]
    assert [run["rows_before"] for run in manifest["runs"]] == [0, len(before)]
    whole = tmp_path / "whole"
    answer_all(source, folder_of(source, whole, options, rows_per_file=100), Answerer(engine, options), run={})
    assert len(list(whole.glob("part-*"))) == 1
    assert {row["id"]: row["token_ids"] for row in outputs(out)} == {
        row["id"]: row["token_ids"] for row in outputs(whole)
    }


def test_results_that_come_twice_are_written_once(engine, tmp_path):
    source, options = RowSource(write(tmp_path / "in.jsonl", some_rows(3))), RowOptions(sampling=SHORT)

    def twice(rows):
        for results in Answerer(engine, options)(rows):
            yield results
            yield results

    summary = answer_all(source, folder_of(source, tmp_path / "out", options), twice, run={})
    assert summary.answered == 3
    assert_once(tmp_path / "out", source.path)


def test_rows_that_never_come_are_an_error(tmp_path):
    source, options = RowSource(write(tmp_path / "in.jsonl", some_rows(3))), RowOptions()
    with pytest.raises(UserError, match="3 of 3 rows have no output: run the command again"):
        answer_all(source, folder_of(source, tmp_path / "out", options), lambda _: (each for each in [[]]), run={})


def test_a_disk_that_is_full_leaves_whole_files(engine, tmp_path, monkeypatch):
    source, options, out = (
        RowSource(write(tmp_path / "in.jsonl", some_rows(7))),
        RowOptions(sampling=SHORT),
        tmp_path / "out",
    )
    written = folder_module._write_json

    def full(file, rows):
        written(file, rows)
        if len(list(out.glob("part-*"))) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder_module, "_write_json", full)
    with pytest.raises(UserError, match=r"cannot write to .*out: No space left on device"):
        answer_all(source, folder_of(source, out, options), Answerer(engine, options), run={})
    assert len(outputs(out)) == 2
    monkeypatch.undo()
    answer_all(source, folder_of(source, out, options), Answerer(engine, options), run={})
    assert_once(out, source.path)


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on(tmp_path):
    source, out = write(tmp_path / "in.jsonl", some_rows(40)), tmp_path / "out"
    words = ["batch", "--in", source, "--out", out, "--target", "embedded:target", "--max-tokens", "24", "--seed", "1"]
    code = "import sys; sys.argv[0] = 'draftproof'; from draftproof.cli import main; main()"
    whole = [sys.executable, "-c", code, *map(str, words), "--rows-per-file", "2", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(draftproof.__file__).parents[1])}
    process = subprocess.Popen(whole, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while len(list(out.glob("part-*"))) < 2:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.005)
    process.kill()
    process.communicate(timeout=60)
    ids = [row["id"] for file in out.glob("part-*") for row in map(json.loads, file.read_text().splitlines())]
    assert 4 <= len(ids) == len(set(ids)) < 40
    found = command(*words[1:], "--json")
    summary = json.loads(found.stdout)
    assert summary["before"] == len(ids)
    assert summary["answered"] == 40 - len(ids)
    assert_once(out, source)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_ends_a_run_with_all_results_on_the_disk(engine, tmp_path, number, error):
    source, out, options = (
        RowSource(write(tmp_path / "in.jsonl", some_rows(9))),
        tmp_path / "out",
        RowOptions(sampling=SHORT),
    )
    made = []

    def signalled(rows):
        for results in Answerer(engine, options)(rows):
            made.extend(result.id for result in results)
            yield results
            if len(made) >= 5:
                os.kill(os.getpid(), number)

    with pytest.raises(error):
        answer_all(source, folder_of(source, out, options, rows_per_file=100), signalled, run={})
    assert [row["id"] for row in outputs(out)] == made
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not engine.busy
    answer_all(source, folder_of(source, out, options), Answerer(engine, options), run={})
    assert_once(out, source.path)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("in.csv", "id,prompt\n", "expected an input file that ends in .jsonl or .parquet"),
        ("in.jsonl", "", "is empty"),
        ("in.jsonl", "\n\n", "is empty"),
        ("in.jsonl", '{"id": 1, "prompt": "a"}\n{"id": 2,', "line 2: not JSON"),
        ("in.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("in.jsonl", "3\n", "line 1: expected a JSON object"),
        ("in.jsonl", b"\xff\n", "line 1: not UTF-8"),
        (
            "in.jsonl",
            '{"id": "a", "prompt": "x"}\n{"prompt": "x"}\n',
            "row 2: expected id to be a text or a",
        ),
        (
            "in.jsonl",
            '{"prompt": "x"}\n{"id": "a", "prompt": "x"}\n',
            "row 2 has an id, and the rows before it have none",
        ),
        ("in.jsonl", '{"id": "", "prompt": "x"}\n', "row 1: expected id to be a text or a 64-bit integer"),
        ("in.jsonl", '{"id": true, "prompt": "x"}\n', "row 1: expected id to be a text or a 64-bit integer"),
        ("in.jsonl", '{"id": 1e3, "prompt": "x"}\n', "row 1: expected id to be a text or a 64-bit integer"),
        ("in.jsonl", '{"id": "\\ud800", "prompt": "x"}\n', "row 1: expected id to be a text or a 64-bit integer"),
        ("in.jsonl", '{"id": 1}\n{"id": "b"}\n{"id": "1"}\n{"id": "b"}\n', "2 ids that occur more than once: '1', 'b'"),
        ("in.parquet", "no parquet", "cannot read"),
    ],
)
def test_inputs_that_are_refused(tmp_path, name, content, message):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = command("--in", path, "--out", tmp_path / "out")
    assert found.exit_code == 1
    assert message in found.stderr
    assert found.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_rows_without_ids_are_numbered(tmp_path):
    source = RowSource(write(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}]))
    assert [row.id for row in source.rows()] == [0, 1]
    assert source.integers


def test_a_folder_that_is_not_this_batchs_is_refused(tmp_path):
    source, out = write(tmp_path / "in.jsonl", some_rows(3)), tmp_path / "out"
    asked = ["--in", source, "--out", out, "--max-tokens", 4, "--seed", 1, "--json"]
    first = command(*asked)
    assert first.exit_code == 0, first.stderr
    assert json.loads(first.stdout)["answered"] == 3
    assert json.loads(command(*asked).stdout)["answered"] == 0
    assert command(*asked, "--max-batch", 2, "--rows-per-file", 1).exit_code == 0
    for more, name in (
        (["--max-tokens", 5], "begun with max_tokens 4, and now it is 5"),
        (["--seed", 2], "begun with seed 1, and now it is 2"),
        (["--temperature", 0.5], "temperature null, and now it is 0.5"),
        (["--stopper", "fixed:2"], "stopper"),
        (["--target", "embedded:stories"], "draft"),
    ):
        found = command(*asked, *more)
        assert found.exit_code == 1
        assert name in found.stderr
        assert "name another folder" in found.stderr
    write(source, some_rows(4))
    assert "was begun with input" in command(*asked).stderr
    other = tmp_path / "other"
    other.mkdir()
    (other / "note.txt").touch()
    assert "holds files and no _manifest.json" in command("--in", source, "--out", other).stderr
    assert "is a file" in command("--in", source, "--out", other / "note.txt").stderr
    assert "cannot write to" in command("--in", source, "--out", other / "note.txt" / "out").stderr
    (out / "_manifest.json").write_text("{")
    assert "cannot read" in command(*asked).stderr


def test_a_second_run_beside_the_first_is_refused(tmp_path):
    source, options = RowSource(write(tmp_path / "in.jsonl", some_rows(3))), RowOptions()
    first, second = (folder_of(source, tmp_path / "out", options) for _ in range(2))
    with first.open({}), pytest.raises(UserError, match="another run writes to"), second.open({}):
        pass


def test_settings_are_compared_again_once_the_folder_is_locked(engine, tmp_path):
    """Another run may begin and end between the first look and the lock, while a model is loaded."""
    source, out = RowSource(write(tmp_path / "in.jsonl", some_rows(3))), tmp_path / "out"
    waits = folder_of(source, out, RowOptions(sampling={"max_tokens": 4, "temperature": 1.0}))
    options = RowOptions(sampling={"max_tokens": 4, "temperature": 0.0})
    answer_all(source, folder_of(source, out, options), Answerer(engine, options), run={})
    before = (out / "_manifest.json").read_text()
    with (
        pytest.raises(UserError, match=r"was begun with temperature 0\.0, and now it is 1\.0"),
        waits.open({}),
    ):
        pass
    assert (out / "_manifest.json").read_text() == before
    again = folder_of(source, out, options)
    with again.open({}):
        assert len(again.done) == 3


def test_a_lock_through_a_link_empties_nothing(tmp_path):
    source, out, precious = (
        RowSource(write(tmp_path / "in.jsonl", some_rows(1))),
        tmp_path / "out",
        tmp_path / "precious",
    )
    precious.write_text("precious")
    out.mkdir()
    (out / ".lock").symlink_to(precious)
    with (
        pytest.raises(UserError, match="is needed as a lock: remove it"),
        folder_of(source, out, RowOptions()).open({}),
    ):
        pass
    assert precious.read_text() == "precious"


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", ["part-abc.jsonl", "part-000000.parquet", "part-1.jsonl", "part-000000.jsonl.bak"])
def test_a_file_that_is_no_part_is_one_error(engine, tmp_path, name):
    source, out, options = RowSource(write(tmp_path / "in.jsonl", some_rows(2))), tmp_path / "out", RowOptions()
    answer_all(source, folder_of(source, out, options), Answerer(engine, options), run={})
    (out / name).write_text("{}")
    message = rf"{re.escape(name)} is not a file of this batch \(expected names like part-000000\.jsonl\): move it away"
    with pytest.raises(UserError, match=message), folder_of(source, out, options).open({}):
        pass


def test_what_a_run_left_that_was_killed_early_is_no_other_batch(tmp_path):
    source, out = RowSource(write(tmp_path / "in.jsonl", some_rows(1))), tmp_path / "out"
    out.mkdir()
    left = [out / f".part-000000.jsonl.{'0' * 32}", out / f"._manifest.json.{'0' * 32}"]
    for path in left:
        path.touch()
    with folder_of(source, out, RowOptions()).open({}):
        assert not any(path.exists() for path in left)


@pytest.mark.parametrize("manifest", ['{"settings": {}}', "[" * 100_000, '{"settings": 1, "runs": []}'])
def test_a_damaged_manifest_is_one_error(tmp_path, manifest):
    source, out = RowSource(write(tmp_path / "in.jsonl", some_rows(1))), tmp_path / "out"
    out.mkdir()
    (out / "_manifest.json").write_text(manifest)
    with pytest.raises(UserError, match=r"cannot read .*_manifest\.json"):
        folder_of(source, out, RowOptions())


def changed_in_place(path):
    content = path.read_bytes()
    path.write_bytes(content.replace(b"little", b"LITTLE"))


def replaced(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"little", b"LITTLE"))
    other.replace(path)


def longer(path):
    with path.open("ab") as file:
        file.write(b'{"id": "late", "prompt": "x"}\n')


def keeping_its_time(change):
    def changed(path):
        state = path.stat()
        change(path)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))

    return changed


CHANGES = {
    "in place": changed_in_place,
    "in place, with its old time": keeping_its_time(changed_in_place),
    "replaced": replaced,
    "replaced, with its old time": keeping_its_time(replaced),
    "longer": longer,
    "shorter": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("how", CHANGES)
def test_an_input_that_changes_after_its_digest_is_refused(how, form, tmp_path):
    rows = [{"id": number, "prompt": f"the little dog {number}"} for number in range(3)]
    path = tmp_path / f"in.{form}"
    if form == "jsonl":
        write(path, rows)
    else:
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist(rows), path, compression="none", use_dictionary=False)
    source = RowSource(path)
    assert len(list(source.rows())) == 3
    CHANGES[how](path)
    with pytest.raises(UserError, match="has changed since the run began"):
        next(source.rows())


@pytest.mark.parametrize("how", ["in place", "longer", "shorter", "in place, with its old time"])
def test_an_input_that_changes_while_it_is_read_is_refused(how, tmp_path):
    path = write(tmp_path / "in.jsonl", [{"id": number, "prompt": "the little dog"} for number in range(5)])
    rows = RowSource(path).rows()
    next(rows)
    CHANGES[how](path)
    with pytest.raises(UserError, match="has changed since the run began"):
        list(rows)


def test_an_input_that_is_replaced_or_touched_while_it_is_read_is_read_as_it_was(tmp_path):
    path = write(tmp_path / "in.jsonl", [{"id": number, "prompt": "the little dog"} for number in range(5)])
    rows = RowSource(path).rows()
    next(rows)
    os.utime(path, (1, 1))
    next(rows)
    replaced(path)
    assert [row.values["prompt"] for row in rows] == ["the little dog"] * 3


def test_options_that_do_not_go_together(tmp_path):
    source = write(tmp_path / "in.jsonl", some_rows(1))
    asked = ["--in", source, "--out", tmp_path / "out"]
    for more, message in (
        (["--workers", 2], "--workers needs a Ray cluster"),
        (["--format", "csv"], "format: expected jsonl or parquet, got 'csv'"),
        (["--rows-per-file", 0], "rows per file: expected 1 or more, got 0"),
        (["--no-chat", "--system", "x"], "needs the chat template"),
        (["--chat"], "no chat template"),
    ):
        found = command(*asked, *more)
        assert found.exit_code in (1, 2)
        assert message in found.stderr
    assert command("--in", tmp_path / "no.jsonl", "--out", tmp_path / "out").exit_code == 1


def test_a_cluster_does_not_divide_a_target(tmp_path, monkeypatch):
    monkeypatch.setattr("draftproof.cli._engine.divide", lambda _: None)
    source = write(tmp_path / "in.jsonl", some_rows(1))
    found = command("--in", source, "--out", tmp_path / "out", "--ray", "local", "--tensor-parallel", 2)
    assert found.exit_code == 1
    assert "--tensor-parallel: expected 1 with --ray" in found.stderr


# --- Parquet ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_columns_that_sound_like_options_are_a_warning(form, tmp_path, caplog):
    rows = [{"id": number, "prompt": STORY, "temperature": 0.0, "seed": 3, "other": "x"} for number in range(2)]
    path = tmp_path / f"in.{form}"
    if form == "jsonl":
        write(path, [{"id": 7, "prompt": STORY}, *rows])  # the first row has none
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.Table.from_pylist(rows), path)
    found = command("--in", path, "--out", tmp_path / "out", "--max-tokens", 2, "--no-chat")
    assert found.exit_code == 0, found.stderr
    assert "the columns temperature, seed are not read" in found.stderr + caplog.text


def test_lines_have_options_of_their_own(tmp_path):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}, "seed": 1}
    assert RowSource(write(tmp_path / "in.jsonl", [line])).unread == ()


def test_parquet_in_and_out(engine, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"id": number, "prompt": None if number % 2 else PROMPTS[number % 4], "other": b"x",
         "messages": [{"role": "user", "content": "Hi", "name": None}] if number % 2 else None}
        for number in range(5)
    ]  # fmt: skip
    source = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist(rows), source)
    out = tmp_path / "out"
    template = tmp_path / "template"
    template.write_text(engine.tokenizer.chat_template)
    asked = [
        "--in",
        source,
        "--out",
        out,
        "--no-chat",
        "--seed",
        5,
        "--max-tokens",
        8,
        "--logprobs",
        1,
        "--prompt-logprobs",
        1,
    ]
    found = command(*asked, "--chat-template", template, "--rows-per-file", 2)
    assert found.exit_code == 0, found.stderr
    files = sorted(out.glob("part-*.parquet"))
    made = pq.read_table(out)
    assert made.schema.field("id").type == pa.int64()
    assert made.schema.field("token_ids").type == pa.list_(pa.int64())
    assert [pq.read_schema(file) for file in files] == [made.schema] * len(files)
    expected = answered(engine, rows, sampling=SHORT | {"logprobs": 1, "prompt_logprobs": 1}, chat=False)
    assert {row["id"]: row["token_ids"] for row in made.to_pylist()} == {
        name: result.rows[0]["token_ids"] for name, result in expected.items()
    }
    files[0].unlink()  # its rows are made anew
    again = command(*asked, "--chat-template", template, "--json")
    assert json.loads(again.stdout)["answered"] == 2


def test_lines_in_parquet(engine, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    bodies = [
        {"prompt": STORY, "max_tokens": 4, "stop": None},
        {"prompt": "The dog", "max_tokens": None, "stop": ["a"]},
    ]
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    for name, rows in (("struct", lines), ("text", [{**line, "body": json.dumps(line["body"])} for line in lines])):
        source, out = tmp_path / f"{name}.parquet", tmp_path / name
        pq.write_table(pa.Table.from_pylist(rows), source)
        found = command("--in", source, "--out", out, "--served-model-name", "story", "--seed", 1)
        assert found.exit_code == 0, found.stderr
        made = pq.read_table(out / "part-000000.parquet").to_pylist()
        assert {row["custom_id"]: json.loads(row["response"])["status_code"] for row in made} == {"c0": 200, "c1": 200}
