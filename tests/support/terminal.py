"""A program on a terminal of its own, whose keys a test presses."""

import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
import time

ENV = {"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}  # this terminal does not say where its cursor is


def _own_terminal():
    """In the child: Ctrl-C on its terminal reaches it, also where its parent ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A program that runs on a terminal; used in a `with` block.

    Attributes:
        process: the program.
        shown: all that it has written so far.
    """

    def __init__(self, command, env):
        self._keys, inside = pty.openpty()
        pipes = {"stdin": inside, "stdout": inside, "stderr": inside}
        options = {"start_new_session": True, "preexec_fn": _own_terminal}
        self.process = subprocess.Popen(command, env=env | ENV, **pipes, **options)
        os.close(inside)
        self.shown = ""
        self._seen = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self._keys)

    def press(self, keys):
        os.write(self._keys, keys.encode())

    def until(self, text, seconds=60):
        """What is written up to a text, from where the last call ended."""
        end = time.monotonic() + seconds
        while (place := self.shown.find(text, self._seen)) < 0:
            assert time.monotonic() < end, f"{text!r} was not written: {self.shown[self._seen :]!r}"
            if select.select([self._keys], [], [], 0.1)[0]:
                self.shown += os.read(self._keys, 65536).decode()
        start, self._seen = self._seen, place + len(text)
        return self.shown[start : self._seen]
