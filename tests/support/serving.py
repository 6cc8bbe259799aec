"""A real server in a thread of this process, for tests."""

import os
import threading
import time
from contextlib import contextmanager
from unittest.mock import patch

import httpx

from draftproof import Engine
from draftproof.server.app import Server, make_app
from draftproof.server.auth import allowed_hosts
from draftproof.server.run import bind, prepared
from draftproof.server.settings import Settings

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
STORY = "Once upon a time"


def small_engine(**options):
    """The small embedded pair, with a chat template; loaded as at a user's second start, which takes a quarter."""
    with patch.dict(os.environ, DRAFTPROOF_CHECKED="1"):
        made = Engine.load("embedded:target", "embedded:draft", **options)
    made.tokenizer.chat_template = CHAT
    return made


@contextmanager
def running(engine, *, keys=(), hidden=(), extend=None, **settings):
    """A server at a free port; its base address and the `Server`."""
    settings = Settings(port=0, **settings)
    server = Server(engine, settings, "story", hidden)
    listener = bind(settings)
    app = make_app(server, keys, allowed_hosts(settings, keys))
    if extend is not None:
        extend(app)
    speaks = prepared(app, settings)
    thread = threading.Thread(target=speaks.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not speaks.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        speaks.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()
        assert not server.worker._rows


def until(condition, seconds=30):
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def waits(server):
    """Whether the engine's thread has prepared its drafts, and waits for a request."""
    return server.worker._prepared and server.worker._since is None


def post(base, path="/v1/completions", **body):
    return httpx.post(base + path, json={"prompt": STORY, **body} if path == "/v1/completions" else body, timeout=60)


def error_of(answer):
    """The error of an answer, whose body has OpenAI's form and nothing else."""
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]
