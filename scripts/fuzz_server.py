"""Requests that schemathesis makes from a server's /openapi.json, for some minutes.

    python scripts/fuzz_server.py [MINUTES]

The server is in this process, with the embedded pair. No answer has a status of 500 or more, and every answer is as
/openapi.json describes it. Prints how many requests had which status; exits with 1 after the first mistake.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import schema_checks
from serving import running, small_engine


def main() -> None:
    """Send requests until the time is over."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    seen: Counter[tuple[str, int]] = Counter()
    end = time.monotonic() + 60 * minutes
    with running(small_engine()) as (base, server):
        operations = schema_checks.operations(base)
        while time.monotonic() < end:
            for name, operation in operations.items():
                sent = schema_checks.check(operation, 50 if name.startswith("POST") else 5, at_random=True)
                seen.update((name, status) for status in sent)
        assert server.worker.ready
    for (name, status), count in sorted(seen.items()):
        print(f"{name} {status}: {count}")


if __name__ == "__main__":
    main()
