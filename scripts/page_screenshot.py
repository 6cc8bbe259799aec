"""The picture of the server's page in docs/guide/serve.md, by a browser without a window (chromium).

    python scripts/page_screenshot.py [TARGET] [DTYPE]

The server is in this process, with drafter `auto`; it answers some requests first, so that costs are known.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from draftproof import Engine, SamplingParams
from support.browser import BROWSER, SET, driven
from support.serving import running

OUT = Path(__file__).parent.parent / "docs" / "assets" / "serve-page.png"
QUESTION = "Write a Python function that says whether a number is prime, and one that lists the primes below n."
SCRIPT = (
    SET % "{temperature: 0, max_tokens: 150}"
    + f"""
    const kind = document.getElementById("kind");
    kind.value = "chat"; kind.dispatchEvent(new Event("change"));
    document.getElementById("prompt").value = "{QUESTION}";
    document.getElementById("beside").value = "yes";
    await new Promise((ready) => setTimeout(ready, 3000));  // a browser that starts is busy
    await send();
    document.querySelector("img").remove();
"""
)


def main() -> None:
    """Write docs/assets/serve-page.png."""
    if BROWSER is None:
        sys.exit("no chromium is installed: apt-get install chromium")
    target, dtype = (*sys.argv[1:3], *("smollm2-135m", "bfloat16")[len(sys.argv[1:3]) :])
    engine = Engine.load(target, dtype=dtype)
    for _ in range(3):
        engine.generate(
            [[{"role": "user", "content": "Tell me about the sea."}]], SamplingParams(max_tokens=64, seed=1)
        )
    with running(engine, extend=driven(SCRIPT)) as (base, _), tempfile.TemporaryDirectory() as folder:
        command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
        command += ["--window-size=900,1150", "--hide-scrollbars", f"--screenshot={OUT}", f"{base}/driven"]
        subprocess.run(command, check=True, timeout=120, capture_output=True)


if __name__ == "__main__":
    main()
