"""The documentation site: it builds without a warning, fetches nothing, and has a page for every command and option."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from support.docs_pages import ROOT, every_command, options_of

pytest.importorskip("mkdocs", reason="the extra docs is not installed")

# Where a page names something that a browser loads by itself.
LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
# What a link in the head loads; "canonical", "next" and "prev" are only names.
RELATIONS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "manifest"}


class Loads(HTMLParser):
    """Addresses that a page loads, and the classes it uses."""

    def __init__(self, text):
        super().__init__()
        self.addresses, self.classes = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.classes |= set((given.get("class") or "").split())
        if tag in LOADED:
            self.addresses.append(given.get(LOADED[tag]) or "")
        if tag == "link" and RELATIONS & set((given.get("rel") or "").split()):
            self.addresses.append(given.get("href") or "")


def elsewhere(address):
    return re.match(r"(https?:)?//", address) is not None


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site; CI has built it a moment ago, in the same way, and names its folder."""
    if built := os.environ.get("DRAFTPROOF_TEST_SITE"):
        return Path(built)
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]  # --quiet hides warnings
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": paths}
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    return out


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        found = Loads(page.read_text(encoding="utf-8"))
        assert any(address.endswith(".css") for address in found.addresses), f"{page.name} loads no style: is it read?"
        assert not [address for address in found.addresses if elsewhere(address)], page.relative_to(site)
        assert "mermaid" not in found.classes, "the theme would load mermaid from elsewhere"


def test_styles_load_nothing_from_elsewhere(site):
    for style in site.rglob("*.css"):
        found = re.findall(r"(?:url\(|@import\s+)[\"']?([^\"')\s;]+)", style.read_text(encoding="utf-8"))
        assert not [address for address in found if elsewhere(address)], style.name


def test_pictures_load_nothing_from_elsewhere(site):
    for picture in site.rglob("*.svg"):
        found = re.findall(r"href=\"([^\"]+)\"|url\(([^)]+)\)", picture.read_text(encoding="utf-8"))
        assert not [address for pair in found for address in pair if elsewhere(address)], picture.name


def test_every_command_and_option_has_its_place(site):
    for path, command in every_command().items():
        page = site / "reference" / "cli" / f"{path[0] if path else 'index'}.html"
        text = page.read_text(encoding="utf-8")
        assert f"draftproof {' '.join(path)}".strip() in text
        everywhere = {"--help", "-h", "--debug", "--offline", "--show-completion", "--install-completion"}
        named = options_of(command) - everywhere
        missing = [name for name in named if name.startswith("-") and f"<code>{name}</code>" not in text]
        assert not missing, f"{page.name} lacks {missing}"
