"""The answers of an audit on disk, so that an interrupted one goes on: one JSON object a line, behind its settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from draftproof.audit.server.client import Reply
from draftproof.errors import UserError
from draftproof.files import whole_file
from draftproof.provenance import digest

FILE = "answers.jsonl"


class Records:
    """Answers by check and number, kept in a folder, or in memory only; a folder of other settings is refused."""

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        self._found: dict[tuple[str, int], dict[str, Any]] = {}
        self._file: IO[str] | None = None
        if folder is None:
            return
        key = digest(dict(settings))
        path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                raise UserError(f"{path} is a link: answers are kept in files of their own, so remove it")
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            kept = self._read(lines, key, path)
            if len(kept) != len(lines) or not lines:
                head = json.dumps({"audit": key, "settings": dict(settings)})
                with whole_file(path) as work:
                    work.write_text("\n".join(kept or [head]) + "\n", encoding="utf-8")
            self._file = path.open("a", encoding="utf-8")
        except OSError as cause:
            raise UserError(f"cannot keep answers in {folder}: {cause.strerror}") from cause

    def _read(self, lines: list[str], key: str, path: Path) -> list[str]:
        """The whole lines; the last one may have been cut off."""
        kept = []
        for number, line in enumerate(lines):
            try:
                value = json.loads(line)
            except ValueError:
                break
            if number == 0 and value.get("audit") != key:
                raise UserError(f"{path} holds the answers of an audit with other settings: name another --out")
            if number:
                self._found[value["check"], value["number"]] = value
            kept.append(line)
        return kept

    def __len__(self) -> int:
        return len(self._found)

    def get(self, check: str, number: int) -> Reply | str | None:
        """A kept answer, the reason why the server refused the check, or None."""
        found = self._found.get((check, number))
        if found is None:
            return None
        return str(found["refused"]) if "refused" in found else Reply.of(found["reply"])

    def add(self, check: str, number: int, request: Mapping[str, Any], reply: Reply | str) -> None:
        """Keep an answer with its request, or a refusal."""
        made: dict[str, Any] = {"check": check, "number": number, "request": dict(request)}
        made |= {"refused": reply} if isinstance(reply, str) else {"reply": reply.to_dict()}
        self._found[check, number] = made
        if self._file is not None:
            self._file.write(json.dumps(made) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
