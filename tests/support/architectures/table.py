"""Records of checked configurations, and the table that is made of them."""

import gzip
import hashlib
import json
import platform
import warnings
from pathlib import Path

import torch
import transformers

import draftproof
from draftproof.files import whole_file
from support.architectures.check import Result, check

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results" / "architectures"
EXACT = Path(__file__).with_name("exact.txt")
OUTCOMES = ("exact", "plain", "refused", "wrong", "crash", "not made")


def exact_names():
    """The configurations that must stay exact."""
    return EXACT.read_text(encoding="utf-8").splitlines()


def keep_exact(names):
    """Add configurations to those that must stay exact."""
    EXACT.write_text("".join(f"{name}\n" for name in sorted({*exact_names(), *names})), encoding="utf-8")


def fingerprint():
    """What results depend on: the sources of draftproof and of this check, and the versions of the libraries."""
    made = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    sources = [*Path(draftproof.__file__).parent.rglob("*"), *Path(__file__).parent.glob("*.py")]
    for path in sorted(path for path in sources if path.suffix in {".py", ".c", ".h", ".cpp"}):
        made.update(path.read_bytes())
    return made.hexdigest()[:16]


def read_records(file):
    """Records by the name of the configuration; the last of each counts, and a line that was cut off does not."""
    found = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            found[record["name"]] = record
    return found


def check_quietly(configuration):
    """The result; what libraries say meanwhile is of no use here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return check(configuration)
        except Exception as cause:  # noqa: BLE001 - one configuration must not end the run
            return Result("crash", f"in this check itself: {type(cause).__name__}: {cause}")


# --- the page ---------------------------------------------------------------------------------------------------------


INTRODUCTION = """# Architectures

Greedy generation of draftproof and of transformers, compared token for token and logit for logit on tiny random models
of every causal language model that transformers has. Made by `python scripts/architectures_table.py`.

{versions}, float32, one thread on a CPU.

{configurations} configurations of {types} model types; {exact_types} types are exact in at least one configuration, and
{plain_types} more are decoded plainly.

| outcome | configurations | meaning |
|---|---|---|
| exact | {exact} | equal to `model.generate` on each prompt alone, in every composition |
| plain | {plain} | as exact, but without drafts, by backend `plain`; the note says why it cannot be drafted for |
| refused | {refused} | a one-line error, before anything is generated unless the note says so |
| wrong | {wrong} | other tokens or other logits: a fault |
| crash | {crash} | an exception that is no refusal: a fault |
| not made | {not_made} | no tiny model on this machine, or none that transformers generates from |

Compositions: each prompt alone without a drafter; six prompts of 3 to 530 tokens, four at a time, where one that ends
makes room for the next; the same with `ngram:4`; with a draft model that is the target with disturbed weights, and rule
`block`; with two chains of that draft model (`chains:2`) and rule `trie_block`, where the backend reads trees. All on
backend `hf`, and on `lean` where the model has a lean forward; on `snapshot` where it has recurrent layers. Most
prompts are longer than every window and every original context of a rotary embedding; one grows past both. Logits are
compared along transformers' tokens, within 1e-3 of the largest. Where transformers' generation with its own cache is
not its generation without, the note says so; then all compositions must equal the one, or all the other.

The column "drafts" says what the backend reads: trees, single chains, or none. Backend `snapshot` reads models with
recurrent layers (linear attention, convolutions, state spaces). Backend `plain` is transformers' own step by step.

| type | variant | backend | drafts | outcome | note |
|---|---|---|---|---|---|
"""


def page(records):
    """The table as Markdown."""
    counts = {
        outcome.replace(" ", "_"): sum(record["outcome"] == outcome for record in records) for outcome in OUTCOMES
    }
    exact, plain = (
        {record["type"] for record in records if record["outcome"] == outcome} for outcome in ("exact", "plain")
    )
    text = INTRODUCTION.format(
        versions=f"transformers {transformers.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        configurations=len(records),
        types=len({record["type"] for record in records}),
        exact_types=len(exact),
        plain_types=len(plain - exact),
        **counts,
    )
    return text + "".join(
        f"| {record['type']} | {record['variant']} | {backends(record)} | {drafts(record)} | "
        f"{record['outcome']} | {cell(record)} |\n"
        for record in records
    )


def backends(record):
    """The backends that generated."""
    return ", ".join(dict.fromkeys(name.partition(",")[0] for name in record["compositions"]))


def drafts(record):
    """What the backends read beside committed tokens."""
    if not record["compositions"] or record["outcome"] == "refused":
        return ""
    read = {name.partition(", ")[2] for name in record["compositions"]}
    return "trees" if "chains:2" in read else "chains" if read - {"alone", "batch"} else "none"


def cell(record):
    """The note of a row."""
    notes = [note for note in record["notes"] if not note.endswith("offers no trees")]
    said = "; ".join([*([record["detail"]] if record["detail"] else []), *notes])
    return said.replace("|", "\\|").replace("\n", " ")


def written():
    """The rows of the table as it stands, by the name of the configuration."""
    rows = json.loads(gzip.decompress(RESULTS.with_suffix(".json.gz").read_bytes()))
    return {row["name"]: row for row in rows}


def write(records):
    """The table as Markdown and JSON."""
    kept = [{key: value for key, value in record.items() if key != "source"} for record in records]
    with whole_file(RESULTS.with_suffix(".md")) as path:
        Path(path).write_text(page(records), encoding="utf-8")
    with whole_file(RESULTS.with_suffix(".json.gz")) as path:
        text = "[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n"
        Path(path).write_bytes(gzip.compress(text.encode(), mtime=0))
