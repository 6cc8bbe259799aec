"""The house keeps its order: imports point one way, the README's tree is true, importing is light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import draftproof

PACKAGE = Path(draftproof.__file__).parent
ROOT = PACKAGE.parent.parent
# Lower layers first; a module may import from its own layer and below.
LAYERS = (
    {"_version", "errors", "embedded"},
    {"files", "kernels"},
    {"tree", "rng"},
    {"draft", "sampling", "heads"},
    {"functional", "reference"},
    {"theory"},
    {"verifiers", "stoppers", "finish"},
    {"backends", "models", "tokenization"},
    {"drafters"},
    {"engine"},
    {"testing", "training", "audit", "bench", "serving", "integrations"},
    {"cli"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def part(path):
    inside = path.relative_to(PACKAGE).parts
    return inside[0].removesuffix(".py")


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if part(path) != "__init__"]


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "draftproof":
            yield from (alias.name for alias in node.names if alias.name in LEVEL)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("draftproof."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("draftproof."))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    # Engine.load reaches up to compose by name, inside its own layer; nothing else may reach up at all.
    above = [name for name in imported(path) if LEVEL[name] > LEVEL[part(path)]]
    assert not above, f"{path.relative_to(PACKAGE)} imports from above: {above}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_open_by_saying_what_they_know(path):
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert doc, f"{path.relative_to(PACKAGE)} has no docstring"
    if path.name not in {"__init__.py", "_version.py"}:
        assert "Knows:" in doc, f"{path.relative_to(PACKAGE)} does not say what it knows"
        assert "Does not" in doc, f"{path.relative_to(PACKAGE)} does not say what it does not know"


def test_readme_tree_is_true():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^    ([\w./]+)\s", text, flags=re.MULTILINE))
    there = {str(path.relative_to(PACKAGE)) for path in MODULES if path.name != "__init__.py"}
    there |= {path.parent.name + "/" for path in MODULES if path.name == "__init__.py"}
    assert listed == there, f"README's tree: missing {sorted(there - listed)}, gone {sorted(listed - there)}"


def test_import_is_light():
    heavy = ("transformers", "typer", "scipy", "gguf", "triton")
    code = f"import sys, draftproof; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
