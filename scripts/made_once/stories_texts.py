"""Prepare the texts that embedded:stories and the embedded drafts were trained on, from two corpora.

In the sample of TinyStories, quotation marks were decoded twice; they are replaced by plain ones. Of the public-domain
fiction, the works for children are used, without translations (the translators are not named, so their rights are not
certain).

    python scripts/made_once/stories_texts.py DATA OUT

DATA has `corpus-tinystories-sample/tiny_stories.txt` (the first 944 KB of roneneldan/TinyStories) and
`corpus-pd-fiction/` (mlschmitt/classic-books-markdown as plain text, split by work, with its MANIFEST.tsv).
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import re
import sys
from pathlib import Path

SEPARATOR = "<|endoftext|>"
TWICE = (("â€œ", '"'), ("â€™", "'"), ("â€“", "-"), ("â€”", "-"), ("â€", '"'))
WORKS = (
    "Abbie Farwell Brown/",
    "Anna Sewell/",
    "Edith Nesbit/",
    "Frances Hodgson Burnett/A Little",
    "Frances Hodgson Burnett/The Secret",
    "George MacDonald/The Princess",
    "Hugh Lofting/",
    "J. M. Barrie/",
    "Kenneth Grahame/",
    "L. Frank Baum/",
    "Lewis Carroll/",
    "Oscar Wilde/The Canterville",
    "Oscar Wilde/The Happy",
    "Rudyard Kipling/The Jungle",
)


def tinystories(source: Path) -> str:
    """The sample, in plain ASCII."""
    text = (source / "corpus-tinystories-sample" / "tiny_stories.txt").read_text(encoding="utf-8")
    for wrong, right in TWICE:
        text = text.replace(wrong, right)
    return text


def json_lines(text: str) -> str:
    """The stories in the form for stories260K: one line end between paragraphs, one JSON object on each line."""
    rows = [part.strip().replace("\n\n", "\n") for part in re.split(r"(?<=\S)[ \t]*\n(?=\S)", text)]
    return "".join(json.dumps({"text": row}) + "\n" for row in rows)


def fiction(source: Path) -> str:
    """The works for children in the training part of the corpus, separated by SEPARATOR."""
    folder = source / "corpus-pd-fiction"
    with (folder / "MANIFEST.tsv").open(encoding="utf-8", newline="") as table:
        rows = [row for row in csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE) if row["split"] == "train"]
    with lzma.open(folder / "train.txt.xz", "rt", encoding="utf-8") as file:
        parts = re.split(r"^<\|endoftext\|>[ \t]*$", file.read(), flags=re.MULTILINE)
    works = zip((row["path_in_repo"] for row in rows), parts, strict=True)
    kept = [text.strip() for name, text in works if name.startswith(WORKS)]
    return (f"\n{SEPARATOR}\n".join(kept) + "\n").replace("\u2060", "")


def main() -> int:
    """Write tinystories.txt, tinystories.jsonl and children.txt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="folder with corpus-tinystories-sample and corpus-pd-fiction")
    parser.add_argument("out", type=Path, help="folder that receives the three files")
    options = parser.parse_args()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        text = tinystories(options.source)
        (options.out / "tinystories.txt").write_text(text, encoding="utf-8")
        (options.out / "tinystories.jsonl").write_text(json_lines(text), encoding="utf-8")
        (options.out / "children.txt").write_text(fiction(options.source), encoding="utf-8")
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
