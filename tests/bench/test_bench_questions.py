"""Questions from data sets: every format is read, errors name the line, nothing is downloaded unless it is named."""

import gzip
import json
import sys
import types

import pytest

from draftproof import UserError
from draftproof.bench.questions import HUB, OPENING, SHIPPED, data_digest, read_questions, shipped


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


COUNTS = dict.fromkeys(shipped(), 16) | {"copying": 12, "story-openings": 32, "summaries": 8}


@pytest.mark.parametrize("name", shipped())
def test_shipped_data_sets_are_read_and_name_their_source(name):
    found = read_questions(name)
    assert len({question.id for question in found}) == len(found) == COUNTS[name]
    assert all(question.dataset == name and question.prompt.strip() for question in found)
    notice = (SHIPPED / f"{name}.NOTICE.txt").read_text()
    assert "Source: " in notice
    assert "Licence" in notice


def test_chat_and_text_are_distinguished():
    texts = {"humaneval", "fiction", "tinystories", "story-openings"}
    for name in shipped():
        assert {question.chat for question in read_questions(name)} == {name not in texts}


def test_the_first_questions_of_a_data_set_are_of_many_kinds():
    assert len({question.category for question in read_questions("mt-bench", 8)}) == 8
    assert [question.category for question in read_questions("copying", 2)] == ["code editing", "quoting"]


def test_spec_bench(tmp_path):
    file = write(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
        {"question_id": 82, "category": "qa", "turns": ["three"]},
    )
    one, two = read_questions(file)
    assert (one.id, one.dataset, one.category, one.turns, one.chat) == (
        "81",
        "question",
        "writing",
        ("one", "two"),
        True,
    )
    assert two.prompt == "three"


def test_human_eval_packed(tmp_path):
    file = tmp_path / "HumanEval.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps({"task_id": "HumanEval/0", "prompt": "def f():\n"}).encode()))
    (only,) = read_questions(str(file))
    assert (only.id, only.dataset, only.prompt, only.chat) == ("HumanEval/0", "HumanEval", "def f():\n", False)


def test_instructions_carry_their_input(tmp_path):
    file = write(
        tmp_path / "x.jsonl",
        {"id": "a", "instruction": "Shorten.", "instances": [{"input": "Long text.", "output": "Text."}]},
        {"id": "b", "instruction": "Sing.", "instances": [{"input": "", "output": "La."}]},
        {"id": "c", "instruction": "Add.", "input": "1 2", "output": "3"},
    )
    assert [question.prompt for question in read_questions(file)] == ["Shorten.\n\nLong text.", "Sing.", "Add.\n\n1 2"]


def test_gsm8k_is_numbered_by_line(tmp_path):
    file = write(tmp_path / "g.jsonl", {"question": "1+1?", "answer": "2"}, "", {"question": "2+2?", "answer": "4"})
    assert [(question.id, question.prompt) for question in read_questions(file)] == [("1", "1+1?"), ("3", "2+2?")]


def test_a_prompt_a_line(tmp_path):
    file = write(tmp_path / "p.txt", "first", "", "second \N{LINE SEPARATOR} still")
    found = read_questions(file)
    assert [question.prompt for question in found] == ["first", "second \N{LINE SEPARATOR} still"]
    assert not any(question.chat for question in found)


def test_plain_text_gives_openings(tmp_path):
    words = " ".join(f"w{n}" for n in range(100))
    file = write(tmp_path / "book.txt", "Chapter 1", "", words, "", "short one", "", words.upper())
    found = read_questions(f"paragraphs:{file}")
    assert [question.prompt.split()[0] for question in found] == ["w0", "W0"]
    assert {len(question.prompt.split()) for question in found} == {OPENING}


def test_a_limit_takes_the_first():
    assert read_questions("gsm8k", 3) == read_questions("gsm8k")[:3]
    with pytest.raises(UserError, match="expected 1 or more, got 0"):
        read_questions("gsm8k", 0)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["{"], "line 1: not JSON"),
        ([{"prompt": "fine"}, "[1]"], "line 2: expected a JSON object"),
        ([{"other": 1}], "line 1: expected an object with one of turns, prompt"),
        ([{"turns": []}], "line 1: turns holds no text"),
        ([{"turns": ["a", 2]}], "line 1: turns holds no text"),
        ([{"prompt": "  "}], "line 1: prompt holds no text"),
        ([{"prompt": 3}], "line 1: prompt holds no text"),
        ([{"id": 7, "prompt": "a"}, {"id": 7, "prompt": "b"}], "line 2: the id '7' occurs twice"),
        ([""], "holds no question"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, rows, words):
    with pytest.raises(UserError) as caught:
        read_questions(write(tmp_path / "broken.jsonl", *rows))
    assert words in str(caught.value)
    assert "broken.jsonl" in str(caught.value)


def test_unreadable_files_are_refused(tmp_path):
    for name, words in [
        (str(tmp_path / "no.jsonl"), "cannot read"),
        (str(tmp_path / "no.csv"), "data set: expected"),
        ("mtbench", "data set: expected copying"),
        (f"paragraphs:{tmp_path / 'no.txt'}", "cannot read"),
    ]:
        with pytest.raises(UserError, match=words):
            read_questions(name)
    broken = tmp_path / "b.jsonl.gz"
    broken.write_bytes(b"no gzip")
    with pytest.raises(UserError, match="cannot unpack"):
        read_questions(str(broken))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="not UTF-8"):
        read_questions(str(tmp_path / "latin.txt"))


class Hub(list):
    """Rows as the datasets library returns them."""

    column_names = ("query", "id")


def fake_datasets(monkeypatch, load):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))


def test_the_hub_is_used_only_where_it_is_named(monkeypatch):
    asked = []

    def load(name, split):
        asked.append((name, split))
        return Hub([{"query": "why?", "id": "x"}, {"query": "how?", "id": "y"}])

    fake_datasets(monkeypatch, load)
    read_questions("gsm8k", 1)
    assert asked == []
    found = read_questions(f"{HUB}some/set:train:query")
    assert asked == [("some/set", "train")]
    assert [question.prompt for question in found] == ["why?", "how?"]
    with pytest.raises(UserError, match="expected one of query, id, got 'q'"):
        read_questions(f"{HUB}some/set:train:q")
    with pytest.raises(UserError, match="row 0: expected an object"):
        read_questions(f"{HUB}some/set")


def test_without_library_or_network_the_error_says_so(monkeypatch):
    def offline(name, split):
        raise ConnectionError("no route")

    fake_datasets(monkeypatch, offline)
    with pytest.raises(UserError, match="cannot load 'some/set' from the hub: no route"):
        read_questions(f"{HUB}some/set")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="needs the package datasets"):
        read_questions(f"{HUB}some/set")


def test_the_digest_depends_on_the_questions_only(tmp_path):
    one = read_questions(write(tmp_path / "a.jsonl", {"id": 1, "prompt": "a"}))
    assert data_digest(one) == data_digest(read_questions(write(tmp_path / "c.jsonl", {"prompt": "a", "id": 1})))
    assert data_digest(one) != data_digest(read_questions(write(tmp_path / "d.jsonl", {"id": 1, "prompt": "b"})))
