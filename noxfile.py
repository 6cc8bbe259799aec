"""The checks of a change: `nox` runs the fast ones, `nox -s tests` the suite; `nox --list` shows all.

Sessions use the environment that nox runs in (CONTRIBUTING.md says how to make it), so that nothing is installed twice.
"""

from __future__ import annotations

import nox

LOWEST = (
    *("tests/test_sampling.py", "tests/test_grammar.py", "tests/test_finish.py", "tests/stoppers"),
    *(
        "tests/engine/test_engine.py",
        "tests/drafters",
        "tests/cli/test_cli.py",
        "tests/integrations/test_transformers.py",
    ),
    *("tests/server/test_server.py", "tests/server/test_server_schema.py", "tests/server/test_responses.py"),
)
NEWEST = (  # what reads transformers' and torch's own objects, and the server
    *("tests/backends/hf", "tests/backends/recurrent", "tests/backends/heads", "tests/backends/loading"),
    *("tests/backends/test_architectures.py", "tests/backends/test_backends.py", "tests/backends/cache"),
    *("tests/backends/products", "tests/backends/lean", "tests/native", "tests/engine", "tests/drafters"),
    *("tests/integrations", "tests/training", "tests/models", "tests/cli", "tests/server"),
)
PYTHONS = ("3.12", "3.13", "3.14")  # beside the oldest, which all other sessions run on
SHORT = (
    *("tests/test_sampling.py", "tests/test_finish.py", "tests/test_files.py", "tests/stoppers/test_stoppers.py"),
    *("tests/engine/test_engine.py", "tests/cli/test_cli.py", "tests/server/test_server.py"),
    *("tests/native/test_rows.py", "tests/integrations/test_transformers.py"),
)
nox.options.error_on_missing_interpreters = False
nox.options.download_python = "never"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["format", "lint", "types", "docs"]


@nox.session
def format(session: nox.Session) -> None:  # noqa: A001 - the name on the command line
    """The formatter finds nothing to change; `nox -s format -- --fix` changes it."""
    session.run("ruff", "format", *([] if "--fix" in session.posargs else ["--check"]), ".")


@nox.session
def lint(session: nox.Session) -> None:
    """The linter; `nox -s lint -- --fix` mends what it can."""
    session.run("ruff", "check", *session.posargs, ".")


@nox.session
def types(session: nox.Session) -> None:
    """The type checker, also with what Python has on Windows."""
    session.run("mypy", *session.posargs)
    session.run("mypy", "--platform", "win32", "--cache-dir", ".mypy_cache/win32", "src")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation site, without a warning."""
    folder = session.create_tmp()
    env = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--strict", "--site-dir", folder, env=env)  # --quiet hides warnings from --strict


@nox.session
def tests(session: nox.Session) -> None:
    """The default suite; arguments go to pytest."""
    session.run("pytest", "-n", "auto", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """Tests that take minutes or need a real model; arguments go to pytest."""
    session.run("pytest", "-n", "auto", "-m", "slow", *session.posargs)


@nox.session
def native(session: nox.Session) -> None:
    """The C library under address and undefined-behaviour sanitizers."""
    session.run("python", "scripts/check_native.py", *session.posargs)


@nox.session(venv_backend="venv")
def lowest(session: nox.Session) -> None:
    """A part of the suite with the lowest versions that pyproject.toml allows; arguments, if any, name other tests."""
    session.install("uv")
    session.run("uv", "pip", "install", "--resolution", "lowest-direct", "-e", ".[dev]")
    session.run("pytest", *(session.posargs or LOWEST), env={"HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "0"})


@nox.session(venv_backend="venv")
def newest(session: nox.Session) -> None:
    """A part of the suite with the newest versions that pyproject.toml allows; arguments, if any, name other tests."""
    session.install("uv")
    session.run("uv", "pip", "install", "--resolution", "highest", "--upgrade", "-e", ".[dev]")
    session.run("pytest", *(session.posargs or NEWEST), env={"HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "0"})


@nox.session(python=PYTHONS, venv_backend="venv")
def pythons(session: nox.Session) -> None:
    """A short suite on each later Python in PATH; the others are skipped. Arguments name other tests."""
    session.install("uv")
    session.run("uv", "pip", "install", "-q", "-c", "constraints.txt", "-e", ".[dev]")
    session.run("pytest", "-n", "auto", *(session.posargs or SHORT), env={"HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "0"})
