"""Check every architecture against transformers' own generation and write docs/results/architectures.md and .json.

    python scripts/architectures_table.py [--only TYPE] [--again] [--keep-exact]

Records are appended to build/architectures.jsonl; a run that was stopped continues where it was. Records from other
sources (of draftproof, of the check, of the libraries) do not count.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from architectures.table import main

if __name__ == "__main__":
    sys.exit(main())
