"""Print one of the README's two commands, so that CI runs the same commands as a reader.

They are in the README's first two shell blocks: `generate`, then `test`. `install` is `test` without its last command.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def main() -> None:
    """Print the command named on the command line."""
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    named = dict(zip(("generate", "test"), blocks, strict=False))
    if "test" in named:
        named["install"] = named["test"].rpartition("&&")[0]
    if len(sys.argv) != 2 or sys.argv[1] not in named:
        sys.exit(f"usage: readme_command.py {' | '.join(named)}")
    print(named[sys.argv[1]].strip())


if __name__ == "__main__":
    main()
