"""The recorded editing session: it is what an agent sends, and answers that drafts change are seen."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from draftproof import Engine
from draftproof.server.schemas import ChatBody
from support.serving import running

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def replay(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import replay_session

    return replay_session


def test_each_request_is_a_whole_conversation(replay):
    requests = replay.read_session(replay.SESSION)
    assert len(requests) == 12
    for before, request in zip([None, *requests], requests, strict=False):
        body = ChatBody(messages=request.messages, tools=request.tools, max_tokens=request.max_tokens)
        called = [call.id for message in body.messages for call in message.tool_calls or ()]
        assert called == [message.tool_call_id for message in body.messages if message.role == "tool"]
        if before is not None:
            assert request.messages[: len(before.messages) + 1] == [*before.messages, before.answer]
    names = {tool["function"]["name"] for tool in requests[0].tools}
    assert {call["function"]["name"] for each in requests for call in each.answer.get("tool_calls", ())} < names


def test_a_way_that_answers_otherwise_is_named(replay):
    one = replay.Measured(1.0, 0.5, None, 3, 10, 0, "a", {})
    two = dataclasses.replace(one, text="b")
    assert replay.differences({"x": [[one, one]], "y": [[one, one]]}, "x", "y") == []
    assert replay.differences({"x": [[one, one], [one, one]], "y": [[one, one], [one, two]]}, "x", "y") == [2]


@pytest.mark.slow
def test_a_session_is_replayed_with_drafts_and_without(replay, monkeypatch, capsys, tmp_path):
    from client_model import WORDS, write_model

    write_model(tmp_path)
    short = tmp_path / "short.jsonl"
    lines = replay.SESSION.read_text(encoding="utf-8").splitlines()[:3]
    short.write_text("\n".join(lines), encoding="utf-8")
    with running(Engine.load(str(tmp_path))) as (base, _):
        monkeypatch.setattr(sys, "argv", ["replay", base, "--passes", "1", "--json", "-q", "--session", str(short)])
        replay.main()
    found = json.loads(capsys.readouterr().out)
    (drafts,), (plain,) = found["drafts"], found["plain"]
    assert [each["text"] for each in drafts] == [each["text"] for each in plain]
    assert [each["tokens"] for each in drafts] == [WORDS + 1] * 3
    assert [each["counted"]["calls"] for each in plain] == [WORDS + 1] * 3
    cached = [each["cached"] for each in drafts]
    assert cached == [each["cached"] for each in plain] == sorted(cached)  # each way has a cache of its own
    assert cached[0] < drafts[0]["prompt"] - 100
