"""The table of all architectures: configurations checked one after another, each on disk before the next begins."""

import argparse
import hashlib
import json
import platform
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

import draftproof
from architectures.check import Result, check
from architectures.configurations import configurations
from draftproof.files import whole_file

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "architectures"
EXACT = Path(__file__).with_name("exact.txt")
OUTCOMES = ("exact", "refused", "wrong", "crash", "not made")


def exact_names():
    """The configurations that must stay exact."""
    return EXACT.read_text(encoding="utf-8").splitlines()


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


def run(chosen, file, *, again):
    """Check configurations and append a record of each; those that the file knows from the same sources are left out."""
    source = fingerprint()
    known = {} if again else {n: r for n, r in read_records(file).items() if r["source"] == source}
    for number, configuration in enumerate(chosen, 1):
        if configuration.name in known:
            continue
        began = time.perf_counter()
        result = check_quietly(configuration)
        record = {
            "name": configuration.name,
            "type": configuration.model_type,
            "variant": configuration.variant,
            **asdict(result),
            "source": source,
        }
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")
        took = time.perf_counter() - began
        print(f"{number}/{len(chosen)} {configuration.name}: {result.outcome} {result.detail} ({took:.0f} s)", flush=True)


def check_quietly(configuration):
    """The result; what libraries say meanwhile is of no use here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return check(configuration)
        except Exception as cause:  # noqa: BLE001 - one configuration must not end the run
            return Result("crash", f"in this check itself: {type(cause).__name__}: {cause}")


# --- the page ---------------------------------------------------------------------------------------------------------


def page(records):
    """The table as Markdown."""
    counts = {outcome: sum(record["outcome"] == outcome for record in records) for outcome in OUTCOMES}
    types = {record["type"] for record in records}
    exact = {record["type"] for record in records if record["outcome"] == "exact"}
    rows = [
        f"| {record['type']} | {record['variant']} | {record['outcome']} | {cell(record)} |" for record in records
    ]
    return "\n".join(
        [
            "# Architectures",
            "",
            "Greedy generation of draftproof and of transformers, compared token for token and logit for logit on tiny "
            "random models of every causal language model that transformers has. Made by "
            "`python scripts/architectures_table.py`.",
            "",
            f"transformers {transformers.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
            "float32, one thread on a CPU.",
            "",
            f"{len(records)} configurations of {len(types)} model types; {len(exact)} types are exact in at least one "
            "configuration.",
            "",
            "| outcome | configurations | meaning |",
            "|---|---|---|",
            f"| exact | {counts['exact']} | equal to `model.generate` on each prompt alone, in every composition |",
            f"| refused | {counts['refused']} | a one-line error, before anything is generated unless the note says so |",
            f"| wrong | {counts['wrong']} | other tokens or other logits: a fault |",
            f"| crash | {counts['crash']} | an exception that is no refusal: a fault |",
            f"| not made | {counts['not made']} | no tiny model on this machine, or none that transformers generates from |",
            "",
            "Compositions: each prompt alone without a drafter; five prompts of 3 to 150 tokens in a batch of four, the "
            "fifth in the slot of the first that ends; the same with `ngram:4`; with a draft model that is the target with "
            "disturbed weights and rule `block`; with `chains:2` and rule `trie_block`, where the backend reads trees. All "
            "on backend `hf`, and on `lean` where the model has a lean forward. The prompts are longer than every window and "
            "every original context of a rotary embedding. Logits are compared along transformers' tokens, within 1e-3 of "
            "the largest.",
            "",
            "| type | variant | outcome | note |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def cell(record):
    """The note of a row."""
    lean = any(name.startswith("lean") for name in record["compositions"])
    ran = ["hf and lean"] if lean else []
    said = "; ".join([*([record["detail"]] if record["detail"] else []), *ran, *record["notes"]])
    return said.replace("|", "\\|").replace("\n", " ")


def write(records):
    """The table as Markdown and JSON."""
    kept = [{key: value for key, value in record.items() if key != "source"} for record in records]
    with whole_file(RESULTS.with_suffix(".md")) as path:
        Path(path).write_text(page(records), encoding="utf-8")
    with whole_file(RESULTS.with_suffix(".json")) as path:
        Path(path).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main(arguments=None):
    """Run what is missing, and write the table once nothing is; exit code 1 where a configuration is at fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="TYPE", help="a model type; may be given several times")
    parser.add_argument("--variant", help="with --only: one variant of the type")
    parser.add_argument("--again", action="store_true", help="also run what was run with the same sources before")
    parser.add_argument(
        "--records", type=Path, default=ROOT / "build" / "architectures.jsonl", help="where records are kept"
    )
    parser.add_argument("--keep-exact", action="store_true", help="add what is exact now to the list that must stay so")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    every = configurations()
    chosen = [c for c in every if not options.only or c.model_type in options.only]
    chosen = [c for c in chosen if not options.variant or c.variant == options.variant]
    if not chosen:
        parser.error(f"no configuration of {options.only} {options.variant or ''}: legal are model types of transformers")
    options.records.parent.mkdir(parents=True, exist_ok=True)
    run(chosen, options.records, again=options.again)
    return report(chosen, every, options)


def report(chosen, every, options):
    """Say what came of the run; write the table where every configuration has a record from these sources."""
    source = fingerprint()
    known = {n: r for n, r in read_records(options.records).items() if r["source"] == source}
    mine = [known[c.name] for c in chosen]
    for outcome in OUTCOMES:
        print(f"{outcome}: {sum(record['outcome'] == outcome for record in mine)}")
    missing = [c.name for c in every if c.name not in known]
    if missing:
        print(f"no table is written: {len(missing)} configurations have no record from these sources, {missing[0]} first")
    else:
        write([known[c.name] for c in every])
    if options.keep_exact:
        exact = {record["name"] for record in known.values() if record["outcome"] == "exact"}
        names = sorted({*(exact_names() if EXACT.exists() else ()), *exact})
        EXACT.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    lost = [name for name in exact_names() if name in known and known[name]["outcome"] != "exact"]
    for name in lost:
        print(f"no longer exact: {name}")
    return int(bool(lost) or any(record["outcome"] in {"wrong", "crash"} for record in mine))


if __name__ == "__main__":
    sys.exit(main())
