"""Check every architecture against transformers' own generation and write docs/results/architectures.md and .json.

    python scripts/architectures_table.py [--only TYPE] [--variant VARIANT] [--again] [--update] [--keep-exact]

Records are appended to build/architectures.jsonl; a run that was stopped continues. Records from other sources (of
draftproof, of the check, of the libraries) do not count, and the table is written once every configuration has a
record. With --update it is written with the records that there are, and other rows stay as they were. The exit code is
1 if a configuration is wrong, crashes, or is no longer exact.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
import transformers

from support.architectures.configurations import Configuration, configurations
from support.architectures.table import (
    OUTCOMES,
    check_quietly,
    exact_names,
    fingerprint,
    keep_exact,
    read_records,
    write,
    written,
)

RECORDS = Path(__file__).resolve().parent.parent / "build" / "architectures.jsonl"


def run(chosen: list[Configuration], file: Path, *, again: bool) -> None:
    """Check configurations and append a record of each; those with a record from the same sources are left out."""
    source = fingerprint()
    known = {} if again else current(file, source)
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
        print(
            f"{number}/{len(chosen)} {configuration.name}: {result.outcome} {result.detail} ({took:.0f} s)", flush=True
        )


def current(file: Path, source: str) -> dict[str, Any]:
    """Records from these sources, by name."""
    return {name: record for name, record in read_records(file).items() if record["source"] == source}


def report(chosen: list[Configuration], file: Path, *, keep: bool, update: bool) -> int:
    """Print the outcomes, and write the table if every configuration has a record from these sources, or a row."""
    known = current(file, fingerprint())
    mine = [known[configuration.name] for configuration in chosen]
    for outcome in OUTCOMES:
        print(f"{outcome}: {sum(record['outcome'] == outcome for record in mine)}")
    rows = {**written(), **known} if update else known
    missing = [configuration.name for configuration in configurations() if configuration.name not in rows]
    if missing:
        print(f"no table is written: {len(missing)} configurations have no record of these sources ({missing[0]}, ...)")
    else:
        write([rows[configuration.name] for configuration in configurations()])
    lost = [name for name in exact_names() if name in known and known[name]["outcome"] != "exact"]
    for name in lost:
        print(f"no longer exact: {name}")
    if keep:
        keep_exact(record["name"] for record in known.values() if record["outcome"] == "exact")
    return int(bool(lost) or any(record["outcome"] in {"wrong", "crash"} for record in mine))


def main() -> int:
    """Run the missing checks, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="TYPE", help="a model type; may be given several times")
    parser.add_argument("--variant", help="one variant of the types")
    parser.add_argument("--again", action="store_true", help="also run what has a record from the same sources")
    parser.add_argument("--update", action="store_true", help="keep the rows of the table that have no new record")
    parser.add_argument("--records", type=Path, default=RECORDS, help="the file of records")
    parser.add_argument("--keep-exact", action="store_true", help="add what is exact now to the list that must stay so")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    chosen = [each for each in configurations() if not options.only or each.model_type in options.only]
    chosen = [each for each in chosen if not options.variant or each.variant == options.variant]
    unknown = sorted(set(options.only or ()) - {each.model_type for each in chosen})
    if unknown or not chosen:
        parser.error(f"expected model types of transformers, got {unknown or options.variant!r}")
    options.records.parent.mkdir(parents=True, exist_ok=True)
    run(chosen, options.records, again=options.again)
    return report(chosen, options.records, keep=options.keep_exact, update=options.update)


if __name__ == "__main__":
    sys.exit(main())
