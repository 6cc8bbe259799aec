"""The house keeps its order: imports point one way and form no cycle, the file tree is true, importing is light."""

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import draftproof
from support.each import for_each
from support.floors import FLOOR, ROOM

PACKAGE = Path(draftproof.__file__).parent
ROOT = PACKAGE.parent.parent
# What is in the root besides folders; `.git` is a file in a work tree.
ROOT_FILES = {
    *(".git", ".gitignore", ".pre-commit-config.yaml"),
    *(
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "README.md",
        "SECURITY.md",
        "THIRD_PARTY_NOTICES.md",
    ),
    *("constraints.txt", "hatch_build.py", "mkdocs.yml", "noxfile.py", "pyproject.toml"),
}


def part(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def dotted(path):
    return ".".join(("draftproof", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {dotted(path): path for path in sorted(PACKAGE.rglob("*.py")) if part(path) != "__init__"}


class Seen:
    """What the tests ask of a text in Python, which is parsed once for all of them."""

    def __init__(self, text):
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
        self.docstring = ast.get_docstring(tree)
        self.imported = {*imported(nodes)}
        self.any_imports = [*any_imports(nodes)]
        self.assigned_together = [*assigned_together(nodes)]
        self.constants = constants(tree.body)
        self.pointers = pointers(nodes)
        self.class_names = [node.name for node in nodes if isinstance(node, ast.ClassDef)]


@functools.cache
def seen(path):
    return Seen(path.read_text(encoding="utf-8"))


def imported(nodes):
    """Modules of ours that are imported, at the top or inside functions."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "draftproof":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("draftproof."))


def any_imports(nodes):
    """Names of all modules that are imported."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@functools.cache
def imports():
    return {name: {each for each in seen(path).imported if each in MODULES} for name, path in MODULES.items()}


def test_floors_list_what_exists():
    assert set(FLOOR) == {part(path) for path in MODULES.values()}


@for_each(MODULES)
def test_imports_point_one_way(name):
    mine = FLOOR[name.split(".")[1]]
    above = [each for each in imports()[name] if FLOOR[each.split(".")[1]] > mine]
    assert not above, f"{name} imports from above: {above}"


def room(name):
    """The room of backends in which a module is."""
    within = name.removeprefix("draftproof.backends").strip(".").split(".")
    return ".".join(within[:-1])


def test_rooms_of_backends_import_from_below():
    modules = [name for name in MODULES if name.startswith("draftproof.backends.")]
    assert {room(name) for name in modules if MODULES[name].name != "__init__.py"} == set(ROOM)
    above = [
        f"{name} imports {each}"
        for name in modules
        for each in imports()[name]
        if each.startswith("draftproof.backends.") and ROOM.get(room(each), 0) > ROOM.get(room(name), len(ROOM))
    ]
    assert not above, above


def test_no_import_cycle():
    left = dict(imports())
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    while ends := [name for name in left if not any(name in needs for needs in left.values())]:
        for name in ends:
            del left[name]
    assert not left, f"these modules import each other in a circle: {sorted(left)}"


@for_each(MODULES)
def test_modules_say_what_they_are(name):
    assert seen(MODULES[name]).docstring, f"{name} has no docstring"


def assigned_together(nodes):
    """Lines that assign several attributes in one statement."""
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and sum(isinstance(each, ast.Attribute) for each in target.elts) > 1:
                    yield node.lineno


@for_each(MODULES)
def test_a_statement_assigns_one_attribute(name):
    """A search for `self.name =` finds each assignment, and a change of one is a change of one line."""
    together = seen(MODULES[name]).assigned_together
    assert not together, f"{name} assigns several attributes at once in lines {together}"


def constants(nodes):
    """Names that the statements of a module itself assign, as often as they do."""
    targets = [each for node in nodes if isinstance(node, ast.Assign) for each in node.targets]
    targets += [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    return [
        each.id
        for target in targets
        for each in ast.walk(target)
        if isinstance(getattr(each, "ctx", None), ast.Store) and isinstance(each, ast.Name)
    ]


def test_constants_are_assigned_once():
    """Two constants had one name after they were renamed, and the first one had the value of the second."""
    for name, path in MODULES.items():
        assert repeated(seen(path).constants) == [], f"{name} assigns a constant again"
    assert repeated(Seen("FIRST, SECOND = 1, 2\nFIRST: int = 3\n").constants) == ["FIRST"]


def pointers(nodes):
    """Lines of functions whose docstring only points at another one."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = (node for node in nodes if isinstance(node, kinds))
    return [node.lineno for node in found if (ast.get_docstring(node) or "").startswith("See ")]


@for_each(MODULES)
def test_docstrings_say_something_themselves(name):
    """A method that does what its base class says has `@override` and no docstring."""
    assert not seen(MODULES[name]).pointers


def test_a_docstring_that_points_elsewhere_is_seen():
    assert Seen('def f():\n    """See `g`."""\n\n\ndef g():\n    """Sees."""\n').pointers == [1]


def class_names(paths):
    return [name for path in paths for name in seen(path).class_names]


def test_names_of_classes_are_unique(tmp_path):
    """So that a search for a name, and an editor's "go to definition", has one answer."""
    assert repeated(class_names(MODULES.values())) == []
    (tmp_path / "twice.py").write_text("class Plan:\n    pass\n")
    assert repeated(class_names([tmp_path / "twice.py", MODULES["draftproof.engine.scheduler"]])) == ["Plan"]


def repeated(names):
    return sorted(name for name, times in Counter(names).items() if times > 1)


def test_files_on_the_architecture_page_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("<!-- tree")[0]
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", text))
    assert len(named) > 20
    assert not [name for name in named if not (PACKAGE / name).exists()]


def test_tests_that_are_named_exist():
    """In sources, tests, scripts and pages; the log and the changelog speak of earlier states."""
    files = [path for folder in ("src", "tests", "scripts", "docs") for path in (ROOT / folder).rglob("*")]
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in files
        if path.suffix in (".py", ".md", ".c", ".h") and "log" not in (path.stem, path.parent.name)
        for name in re.findall(r"\btests/(?:[a-z_]+/)*[a-z_0-9]+\.py\b", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert not [each for each in sorted(named) if not (ROOT / each[1]).exists()]


def test_names_of_test_files_are_unique():
    """Folders of tests are no packages, so pytest cannot import two files of one name; a run of one folder hides it."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) > 100
    assert sorted(names) == sorted(set(names))


def test_files_of_the_root_are_on_its_list():
    """A library, a log and another package's wheel were once added with everything else."""
    assert not {path.name for path in ROOT.iterdir() if path.is_file()} - ROOT_FILES


def test_tests_import_no_other_test():
    """What two files share stands in tests/support; a test file that is imported runs its fixtures and builds twice."""
    files = [path for folder in ("tests", "scripts") for path in (ROOT / folder).rglob("*.py")]
    names = {path.stem for path in files if path.name.startswith("test_")}
    assert len(names) > 100
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in seen(path).any_imports
        if names & set(name.split("."))
    ]
    assert not found, found
    assert Seen("from server.test_server_page import SET").any_imports == ["server.test_server_page"]


@pytest.mark.slow
def test_the_targets_name_does_not_climb():
    """It is handed down while an engine is loaded, from `Engine.load` to what reads the files."""
    command = [sys.executable, str(ROOT / "scripts" / "house_figures.py"), "--climbs", "--target", "embedded:target"]
    environment = os.environ | {"DRAFTPROOF_NATIVE": "0"}  # nothing is compiled for this
    printed = subprocess.check_output(command, text=True, env=environment)
    calls, climbs = re.search(r"(\d+) calls from one file to another, (\d+) climbs", printed).groups()
    assert int(calls) > 5
    assert climbs == "0"


def test_the_file_tree_is_true():
    command = [sys.executable, str(ROOT / "scripts" / "architecture.py"), "--check"]
    found = subprocess.run(command, check=False)
    assert found.returncode == 0, "docs/architecture.md is out of date: run python scripts/architecture.py"


def test_import_is_light():
    heavy = ("transformers", "typer", "scipy", "gguf", "triton")
    code = f"import sys, draftproof; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@for_each(draftproof.__all__)
def test_public_names_are_there(name):
    assert getattr(draftproof, name) is not None


# --- what is installed ----------------------------------------------------------------------------------------------

NOT_DECLARED = {"lm_eval", "tqdm", "ray", "vllm", "xllamacpp"}  # of extras that are no part of dev, or of other engines
EXTRAS = ("adapters", "audit", "batch", "bench", "gguf", "offload", "serve", "triton")


def required(name, extras=()):
    """Names of the distributions that one brings along, as their metadata say, itself included."""
    found, waiting = set(), [(canonicalize_name(name), frozenset(extras))]
    while waiting:
        each = waiting.pop()
        if each in found:
            continue
        found.add(each)
        try:
            lines = metadata.requires(each[0]) or []
        except metadata.PackageNotFoundError:  # of another system, or not installed here
            continue
        asked = (*each[1], "")
        waiting.extend(
            (canonicalize_name(line.name), frozenset(line.extras))
            for line in map(Requirement, lines)
            if line.marker is None or any(line.marker.evaluate({"extra": extra}) for extra in asked)
        )
    return {each for each, _ in found}


def declared(name):
    """Names of the distributions that pyproject.toml declares for users, with what these bring along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    wanted = [each for each in map(Requirement, lines) if canonicalize_name(each.name) not in ("draftproof", name)]
    return set().union(*(required(each.name, each.extras) for each in wanted))


def undeclared(distributions):
    """Modules of others that the package imports and no distribution among these has."""
    used = {name for path in MODULES.values() for name in seen(path).any_imports}
    others = {name.partition(".")[0] for name in used} - sys.stdlib_module_names - {"draftproof"} - NOT_DECLARED
    holders = metadata.packages_distributions()
    return {each for each in others if not {canonicalize_name(name) for name in holders.get(each, ())} & distributions}


def test_what_is_imported_is_declared():
    """As httpx was not, after the hub's library had ceased to bring it along."""
    assert not undeclared(declared(None))
    assert undeclared(declared("httpx")) == {"httpx"}, "else nothing would be noticed"
