"""`draftproof serve`: an OpenAI-compatible server for one target."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from draftproof import models
from draftproof.cli import _output
from draftproof.cli._download import first_target
from draftproof.cli._engine import engine_options, load_engine, named_target
from draftproof.cli._options import Options, with_options
from draftproof.cli._quiet import logged_lines, quiet_libraries
from draftproof.errors import refuse_unknown
from draftproof.server.client_configs import CLIENTS, ask_server, assumed_server, client_config
from draftproof.server.settings import Settings, require, served_name

_SERVER = Options(
    Settings, "Server", metavars={"api_key_file": "FILE", "chat_template": "FILE", "allowed_host": "NAME"}
)
app = typer.Typer(add_completion=False)


@app.command()
@engine_options
@with_options(server=(_SERVER,))
def serve(
    *,
    server: dict[str, Any],
    engine: dict[str, Any],
    print_config: Annotated[
        str | None,
        typer.Option(
            metavar="CLIENT",
            help=f"Print the configuration of a client for this server, and exit: {', '.join(CLIENTS)}. Model and "
            "limits are those of the server that runs at --host and --port, if there is one.",
            rich_help_panel="Server",
        ),
    ] = None,
) -> None:
    """Serve a model with OpenAI's API (chat completions, completions, responses) and Anthropic's (messages).

    The server listens on localhost only, unless --host is given. Ctrl-C or SIGTERM stops it when running requests are
    answered. Without a target, smollm2-135m is downloaded at the first use; if that fails, a tiny model of the package
    is served, which has no chat template.
    """
    if print_config is not None:
        _print_config(print_config, Settings(**server), named_target(engine) or models.FIRST_TARGET)
    else:
        _serve(Settings(**server), engine)


def _serve(settings: Settings, engine: dict[str, Any]) -> None:
    """Bind the socket, load the model, and answer until the process is told to stop."""
    require("serve", "fastapi", "uvicorn", "prometheus_client")
    from draftproof.server.app import Server, make_app
    from draftproof.server.auth import allowed_hosts, read_keys
    from draftproof.server.logs import start_logging
    from draftproof.server.run import address, bind
    from draftproof.server.run import serve as serve_app

    keys = read_keys(settings.api_key_file)
    listener = bind(settings)
    try:
        with quiet_libraries(), logged_lines(quiet=False):
            target = named_target(engine) or first_target()
            loaded = load_engine(target, engine, quiet=False)
            answering = Server.named(loaded, settings, target, engine["draft"])
        made = make_app(answering, keys, allowed_hosts(settings, keys))
        start_logging(as_json=settings.json_logs)
        if str(engine["drafter"]).startswith("suffix") and not (keys or settings.share_between_clients):
            _output.note(
                "draftproof: without API keys, suffix drafts from a request's own tokens only, so that drafts do not "
                "reveal other clients' texts; --share-between-clients lets it draft from all requests"
            )
        line = f"draftproof: serving {answering.model} at {address(listener)}/v1"
        serve_app(made, listener, settings, lambda: _output.note(line))
    finally:
        listener.close()


def _print_config(client: str, settings: Settings, target: str) -> None:
    """Print the configuration of a client for a server, which need not be running yet."""
    refuse_unknown("--print-config", client, CLIENTS)  # before a server is asked
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::", "") else settings.host  # noqa: S104 - all addresses
    url = f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"
    found = ask_server(url)
    if found is None:
        found = assumed_server(url, served_name(target, settings.served_model_name), settings.max_tokens_limit)
        _output.note(
            f"draftproof: no server answers at {url}: using the name of --target and an assumed context of "
            f"{found.context} tokens"
        )
    where, content = client_config(client, found)
    _output.note(f"# {where}")
    typer.echo(content, nl=False)
