"""Point real clients at `draftproof serve`, with the configuration that it prints, and see whether they work.

    python scripts/try_clients.py [CLIENT ...] --folder FOLDER [--keep] [--out docs/results/clients]

FOLDER keeps the clients' packages (npm and pip fetch them by name, about 1.5 GB for all) and a tiny model with random
weights. Each client runs in a home of its own: once with a question, once with a question for which it has to call a
tool and to send back what the tool said. The model would call none, so a proxy names one tool in the first request and
none when a result is there; the tool only reads, and its arguments are fixed. Nothing else of a request is changed.
Prints a table; exits with 1 if anything failed. Needs node and npm, and Linux on x86_64 for Claude Code, Codex and
opencode.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import common
from client_model import write_model
from client_proxy import Exchange, Proxy, Tool

from draftproof.provenance import run_facts
from draftproof.results import Results, table

PARTS = ("question", "stream", "tool round trip")
WORD = "saffron-7301"  # in the file that is read
FILE = "note.txt"
QUESTION, TASK = "Say hello.", f"What does the file {FILE} say?"
_START, _RUN, _FETCH = 120, 240, 900  # seconds of the server's start, of a client, of npm or pip
_SDKS = Path(__file__).with_name("client_sdks.py")


@dataclass(frozen=True)
class Client:
    """A client, and how it is run without a terminal.

    Attributes:
        config: its name for `--print-config`.
        package: what npm or pip fetches; empty for a library of this environment.
        command: that asks a question; FOLDER, WORK and PROMPT stand for the package's folder, the current folder and
            the question.
        file: where the configuration belongs, below the home; variables of a shell without it.
        tool: the name of a tool that only reads, and its arguments, where WORK stands for the current folder; a client
            without tools has none.
        said: a part of the tool's result.
        asked: more words of the command where the tool is to be called.
        variables: of the environment, besides the configuration's.
        amend: what the user has to change in the configuration.
        remark: for the page.
        library: the name of a library of this environment.
    """

    config: str
    package: str
    command: Sequence[str]
    file: str = ""
    tool: tuple[str, Mapping[str, Any]] | None = None
    said: str = WORD
    asked: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    amend: Callable[[str], str] = str
    remark: str = ""
    library: str = ""

    @property
    def shown_version(self) -> str:
        """Of the package, or of the library in this environment."""
        if self.package:
            return re.split("==|@", self.package)[-1].removesuffix("-linux-x64")
        return version(self.library)


def _pi(amend: Callable[[str], str] = str, remark: str = "") -> Client:
    command = ("node", "FOLDER/node_modules/.bin/pi", "--provider", "draftproof", "--model", "model", "-p", "PROMPT")
    return Client(
        "pi",
        "@mariozechner/pi-coding-agent@0.73.1",
        command,
        ".pi/agent/models.json",
        ("read", {"path": FILE}),
        variables={"PI_OFFLINE": "1"},
        amend=amend,
        remark=f"with {remark} in the printed file" if remark else "",
    )


def _to_messages(text: str) -> str:
    return text.replace("openai-completions", "anthropic-messages").replace('/v1"', '"')


def _sdk(config: str, api: str) -> Client:
    return Client(
        config,
        "",
        (sys.executable, str(_SDKS), api, "PROMPT"),
        tool=("read", {"path": FILE}),
        remark="the library, by scripts/client_sdks.py",
        library="anthropic" if api == "anthropic" else "openai",
    )


_CLAUDE = "@anthropic-ai/claude-code-linux-x64"
_CODEX = "FOLDER/node_modules/codex/vendor/x86_64-unknown-linux-musl/bin/codex"
CLIENTS = {
    "aider": Client(
        "aider",
        "aider-chat==0.86.2",
        [
            *("FOLDER/bin/aider", "--model", "openai/model", "--no-git", "--yes-always", "--no-check-update"),
            *("--no-analytics", "--no-show-model-warnings", "--map-tokens", "0", "--message", "PROMPT", FILE),
        ],
        variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        remark="calls no tools",
    ),
    "claude": Client(
        "claude",
        f"{_CLAUDE}@2.1.197",
        (f"FOLDER/node_modules/{_CLAUDE}/claude", "-p", "PROMPT"),
        tool=("Read", {"file_path": f"WORK/{FILE}"}),
        variables={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
    ),
    "codex": Client(
        "codex",
        "codex@npm:@openai/codex@0.169.0-linux-x64",
        (_CODEX, "exec", "--skip-git-repo-check", "--json", "PROMPT"),
        ".codex/config.toml",
        ("get_goal", {}),
        said='"goal"',
        remark="its tools besides a shell read no files; get_goal says what the user wants",
    ),
    "continue": Client(
        "continue",
        "@continuedev/cli@1.5.47",
        ("node", "FOLDER/node_modules/.bin/cn", "--config", "HOME/.continue/config.yaml", "--auto", "-p", "PROMPT"),
        ".continue/config.yaml",
        ("Read", {"filepath": f"WORK/{FILE}"}),
    ),
    "llm": Client(
        "llm",
        "llm==0.36",
        ("FOLDER/bin/llm", "-m", "draftproof", "PROMPT"),
        "llm/extra-openai-models.yaml",
        ("llm_version", {}),
        said="0.36",
        asked=("-T", "llm_version"),
        variables={"LLM_USER_PATH": "HOME/llm"},
    ),
    "opencode": Client(
        "opencode",
        "opencode-linux-x64-baseline@1.18.33",
        ("FOLDER/node_modules/opencode-linux-x64-baseline/bin/opencode", "run", "PROMPT"),
        ".config/opencode/opencode.json",
        ("read", {"filePath": f"WORK/{FILE}"}),
        variables={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
    ),
    "pi": _pi(),
    "pi-responses": _pi(lambda text: text.replace("completions", "responses"), "api openai-responses"),
    "pi-messages": _pi(_to_messages, "api anthropic-messages"),
    "qwen": Client(
        "qwen",
        "@qwen-code/qwen-code@0.24.4",
        ("node", "FOLDER/node_modules/.bin/qwen", "--auth-type", "openai", "-y", "-p", "PROMPT"),
        tool=("read_file", {"file_path": f"WORK/{FILE}"}),
    ),
    "openai": _sdk("qwen", "openai"),
    "openai-responses": _sdk("qwen", "responses"),
    "anthropic": _sdk("claude", "anthropic"),
}


class NotFetchedError(Exception):
    """A package could not be fetched; the text says why."""


def fetch(client: Client, folder: Path) -> Path:
    """The folder of a client's package, fetched where it is not there yet.

    Raises:
        NotFetchedError: npm or pip failed.
    """
    made = folder / re.sub(r"\W+", "-", client.package).strip("-")
    if not client.package or (made / "fetched").exists():
        return made
    if "==" in client.package:
        commands = [[sys.executable, "-m", "venv", str(made)], [f"{made}/bin/pip", "install", "-q", client.package]]
    else:
        install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(made)]
        commands = [[*install, client.package]]
    made.mkdir(parents=True, exist_ok=True)
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotFetchedError(f"{command[0]}: {error}") from error
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            raise NotFetchedError(f"{Path(command[0]).name}: {lines[-1]}")
    (made / "fetched").touch()
    return made


@contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """A server of its own process; its address."""
    command = [sys.executable, "-m", "draftproof", "serve", "--target", str(model), "--port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        end = time.monotonic() + _START
        while not (found := re.search(r"serving \S+ at (http://\S+)/v1", log.read_text(errors="replace"))):
            if process.poll() is not None or time.monotonic() > end:
                sys.exit("the server did not start:\n" + log.read_text(errors="replace")[-2000:])
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        process.wait(60)


def printed_config(name: str, url: str) -> str:
    """What `draftproof serve --print-config` prints for a client of a server."""
    command = [sys.executable, "-m", "draftproof", "serve", "--port", url.rpartition(":")[2], "--print-config", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    if "no server answers" in done.stderr:
        sys.exit(done.stderr)
    return done.stdout


@dataclass
class Run:
    """One run of a client.

    Attributes:
        code: its exit status; None where it did not end.
        output: what it wrote.
        exchanges: what the proxy saw.
    """

    code: int | None
    output: str
    exchanges: Sequence[Exchange]

    def fault(self) -> str:
        """What went wrong in any run; empty for nothing."""
        refused = [each for each in self.exchanges if each.status != 200 or each.refusal]
        if refused:
            return f"{refused[0].path} answered {refused[0].status}: {refused[0].refusal[:400]}"
        if self.code != 0:
            return f"exit status {self.code}: {self.output.strip()[-400:]}"
        if not self.exchanges:
            return "it asked nothing"
        if not any(each.text and each.text in " ".join(self.output.split()) for each in self.exchanges):
            return f"no answer of {[each.text for each in self.exchanges]} is in what it wrote: {self.output[-400:]}"
        return ""


def try_client(client: Client, folder: Path, proxy: Proxy, config: str, *, tool: bool) -> Run:
    """Run a client once, in a home of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        home, work = Path(root, "home"), Path(root, "work")
        home.mkdir()
        work.mkdir()
        (work / FILE).write_text(f"The word is {WORD}.\n", encoding="utf-8")

        def filled(word: str) -> str:
            for name, value in (("FOLDER", folder), ("WORK", work), ("HOME", home)):
                word = word.replace(name, str(value))
            return word.replace("PROMPT", TASK if tool else QUESTION)

        proxy.tool = None
        if tool and client.tool is not None:
            name, arguments = client.tool
            proxy.tool = Tool(name, {key: filled(value) for key, value in arguments.items()})
        proxy.exchanges = []
        config_file = home / (client.file or "variables.sh")
        config_file.parent.mkdir(parents=True, exist_ok=True)
        config_file.write_text(client.amend(config), encoding="utf-8")
        command = [*map(filled, client.command), *(client.asked if tool else ())]
        if not client.file:
            command = ["sh", "-c", '. "$0" && exec "$@"', str(config_file), *command]
        # No variable of this environment reaches a client: keys and addresses are those of the configuration.
        variables = {"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TERM": "dumb"}
        variables |= {name: filled(value) for name, value in client.variables.items()}
        try:
            done = subprocess.run(
                command,
                cwd=work,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_RUN,
                check=False,
            )
            code, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            code, output = None, error.stdout or b""
        return Run(code, output.decode(errors="replace"), proxy.exchanges)


def tries(client: Client, folder: Path, proxy: Proxy, config: str) -> tuple[dict[str, str], list[Run]]:
    """What was seen of a question, its stream, and a tool's round trip; each begins with "ok", "failed" or "-"."""
    asked = try_client(client, folder, proxy, config, tool=False)
    runs, fault = [asked], asked.fault()
    seen = {"question": f"failed: {fault}" if fault else f"ok, {_counted(asked.exchanges)}"}
    streamed = [len(each.pieces) for each in asked.exchanges if each.stream]
    seen["stream"] = f"ok, {max(streamed)} pieces" if max(streamed, default=0) > 1 else "failed: no stream"
    if client.tool is None:
        return seen | {"tool round trip": "-"}, runs
    used = try_client(client, folder, proxy, config, tool=True)
    runs.append(used)
    fault = used.fault()
    forced = [at for at, each in enumerate(used.exchanges) if each.forced]
    back = [at for at, each in enumerate(used.exchanges) if client.said in "".join(each.results)]
    if not fault and not forced:
        fault = f"no request has the tool {client.tool[0]}; the last one has {used.exchanges[-1].tools}"
    if not fault and not back:
        fault = f"no result of the tool came back: {[each.results for each in used.exchanges]}"
    if not fault and not used.exchanges[back[-1]].text:
        fault = "no answer after the tool's result"
    seen["tool round trip"] = f"failed: {fault}" if fault else f"ok, {client.tool[0]}, {_counted(used.exchanges)}"
    return seen, runs


def _counted(exchanges: Sequence[Exchange]) -> str:
    tokens = [each.prompt_tokens for each in exchanges if each.prompt_tokens is not None]
    number = f"{len(exchanges)} request{'s' * (len(exchanges) > 1)}"
    return f"{number}, prompt of {max(tokens)} tokens" if tokens else number


def page(rows: Mapping[str, Mapping[str, str]], facts: Mapping[str, Any]) -> Results:
    """The results as a page."""
    heads = ["client", "version", "API", *PARTS, "remark"]
    cells = [
        [name, *(row[head].replace("|", "\\|").replace("\n", " ") for head in heads[1:])] for name, row in rows.items()
    ]
    lines = [
        "Real clients, unchanged, with the configuration that `draftproof serve --print-config` prints, each in a new",
        "home. The model has random weights: it answers with six words, and calls a tool where a proxy names the tool.",
        "Prompts are counted by the model's tokenizer, whose tokens are short (1.7 characters of such text).",
        "",
        *table(heads, cells),
        "",
        f"node {_node()}, {platform.system()} {platform.machine()}.",
        "",
        "- **question**: the client ended with status 0, every request was answered with 200, and the answer's text is",
        "  in what the client printed.",
        "- **stream**: the client asked for a stream, and the text came in more than one piece.",
        "- **tool round trip**: the client carried out the model's call, the result came back in the next request, and",
        "  that one was answered, too.",
    ]
    return Results("Real clients", lines, {"clients": rows}, facts)


def _node() -> str:
    found = shutil.which("node")
    if found is None:
        return "missing"
    return subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Fetch, run, print."""
    parser = common.parser(__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}; without names, all")
    parser.add_argument("--folder", type=Path, required=True, help="keeps packages and the model")
    parser.add_argument("--keep", action="store_true", help="writes what clients printed into FOLDER/logs")
    options = parser.parse_args()
    unknown = set(options.clients) - set(CLIENTS)
    if unknown:
        parser.error(f"expected clients of {', '.join(CLIENTS)}, got {', '.join(sorted(unknown))}")
    names = options.clients or list(CLIENTS)
    facts, folder = run_facts(), options.folder.resolve()
    model, logs = folder / "model", folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    write_model(model)
    rows: dict[str, dict[str, str]] = {}
    with served(model, logs / "server.txt") as url, Proxy(url).running() as proxy:
        for name in names:
            client = CLIENTS[name]
            common.say(options, name)
            rows[name] = row = {"version": client.shown_version, "API": "", "remark": client.remark}
            try:
                package = fetch(client, folder)
            except NotFetchedError as error:
                row |= dict.fromkeys(PARTS, f"not fetched: {error}")
                continue
            seen, runs = tries(client, package, proxy, printed_config(client.config, proxy.url))
            row |= seen | {"API": ", ".join(sorted({each.path for run in runs for each in run.exchanges}))}
            common.say(options, *(f"  {key}: {value}\n" for key, value in seen.items()))
            if options.keep:
                for run, kind in zip(runs, ("question", "tool"), strict=False):
                    (logs / f"{name}-{kind}.txt").write_text(run.output, encoding="utf-8")
    common.deliver(options, page(rows, facts))
    if any(not row[part].startswith(("ok", "-")) for row in rows.values() for part in PARTS):
        sys.exit(1)


if __name__ == "__main__":
    main()
