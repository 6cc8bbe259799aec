"""The server's page in a browser without a window, driven by a script."""

import asyncio
import shutil
from pathlib import Path

from fastapi.responses import HTMLResponse, Response

import draftproof.server

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGE = (Path(draftproof.server.__file__).parent / "page.html").read_text(encoding="utf-8")
SET = """
for (const [name, value] of Object.entries(%s)) document.querySelector(`[name=${name}]`).value = value;
document.getElementById("prompt").value = "Once upon a time";
"""


def driven(script):
    """A route with the page and a script that uses it; a picture keeps the page loading until that is done."""
    ends = f'<img src="wait"><script>(async () => {{{script}}})().finally(() => fetch("done"));</script></body>'

    def extend(app):
        done = asyncio.Event()

        @app.get("/driven")
        async def page():
            return HTMLResponse(PAGE.replace("</body>", ends))

        @app.get("/done")
        async def release():
            done.set()
            return {}

        @app.get("/wait")
        async def wait():
            await asyncio.wait_for(done.wait(), 30)
            return Response(status_code=204)

    return extend
