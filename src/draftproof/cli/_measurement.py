"""Measuring commands: their options are the fields of a dataclass, their result is a page or a JSON object."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftproof.cli._download import obtain
from draftproof.cli._options import Options, with_options
from draftproof.cli._output import Json, Out, Plots, Quiet, can_draw, progress_bar, show
from draftproof.cli._parts import DRAFTER_HELP, STOPPER_HELP, VERIFIER_HELP
from draftproof.cli._quiet import quiet_libraries

NAMES = "registered name, hub id, directory or .gguf file"
DTYPES = "auto, float32, bfloat16 or float16"
DATASET = "a shipped data set, a file, FORM:FILE or hub:OWNER/NAME[:SPLIT[:COLUMN]]"
MODELS, PROMPTS, MEASURED = "Models", "Prompts", "What is measured"
_MODELS = (
    "target", "draft", "drafter", "models", "judge", "other", "python", "model", "heads", "head", "kinds", "layers",
    "device", "backend", "trust_remote_code",
)  # fmt: skip
_PROMPTS = ("dataset", "questions", "seeds", "tokens", "max_tokens", "repeats", "texts", "prompts", "form", "trials")
_PANELS = dict.fromkeys((*_MODELS, "dtype", "backends", "verifier"), MODELS) | dict.fromkeys(_PROMPTS, PROMPTS)
_HELP = {
    "target": f"The target: {NAMES}.",
    "draft": f"The draft model: {NAMES}.",
    "drafter": DRAFTER_HELP,
    "stoppers": STOPPER_HELP,
    "verifier": f"{VERIFIER_HELP}.",
    "dtype": f"Number format of all models: {DTYPES}.",
    "dataset": f"{DATASET[0].upper()}{DATASET[1:]}.",
    "questions": "Number of questions from the data set, as plain text.",
    "temperature": "Sampling temperature; 0 is greedy.",
    "form": "How texts are separated in .txt files: lines, paragraphs, stories or documents.",
}
# list fields, whose repeated option has one value each
_ONE_OF = {
    "stoppers": "stopper", "rules": "rule", "lengths": "n", "costs": "cost", "backends": "backend", "dtypes": "dtype",
    "tries": "trie", "prompts": "prompt", "models": "model", "kinds": "kind", "texts": "data",
}  # fmt: skip
_NAMED = {"seeds": "seed", "tokens": "max_tokens"}


def measurement(
    of: type,
    measure: Callable[..., Any],
    summary: str,
    *,
    names: Mapping[str, str | None] | None = None,
    defaults: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
    metavars: Mapping[str, str] | None = None,
    leave: Sequence[str] = (),
    short: Mapping[str, str] | None = None,
    complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    draw: Callable[..., Any] | None = None,
) -> Callable[..., None]:
    """A typer command that measures and shows the result; each field of the dataclass `of` becomes an option.

    `measure` takes such an object and `watch`, and returns `results.Results`; `summary` is the help of the command.
    Names, defaults and help texts override the field's own and the usual ones, see `Options`; fields in `leave` have no
    option. `complete` changes the values by field before the object is made, and `draw` draws plots (options, result,
    file), which adds the option --plots.
    """
    kinds = {each.name: str(each.type) for each in dataclasses.fields(of) if each.name not in leave}
    shared: dict[str, Any] = {
        "names": _option_names(kinds, names or {}),
        "defaults": defaults or {},
        "help": {**_for_fields(_HELP, kinds), **(texts or {})},
        "metavars": metavars or {},
        "short": short or {},
        "repeatable": True,
    }
    groups = [
        Options(of, panel, only=[name for name in kinds if _PANELS.get(name, MEASURED) == panel], **shared)
        for panel in (MODELS, MEASURED, PROMPTS)
    ]

    def run(options: dict[str, Any], *, plots: bool, out: Any, as_json: bool, quiet: bool) -> None:
        options = {**(defaults or {}), **options}  # lists that were not given are left out
        chosen = of(**(options if complete is None else complete(options)))
        with quiet_libraries():
            obtain(*_models(chosen), quiet=quiet)
            found = measure(chosen, watch=progress_bar(quiet=quiet))
        if draw is not None and out is not None and can_draw(plots=plots):
            draw(chosen, found, out.parent / f"{out.name}.png")
        show(found, out, as_json=as_json)

    def plain(*, options: Any, out: Out = None, as_json: Json = False, quiet: Quiet = False) -> None:
        run(options, plots=False, out=out, as_json=as_json, quiet=quiet)

    def drawn(
        *, options: Any, plots: Plots = True, out: Out = None, as_json: Json = False, quiet: Quiet = False
    ) -> None:
        run(options, plots=plots, out=out, as_json=as_json, quiet=quiet)

    command = plain if draw is None else drawn
    command.__doc__ = summary
    return with_options(options=[group for group in groups if group.only])(command)


def _for_fields(texts: Mapping[str, str], kinds: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in texts.items() if name in kinds}


def _option_names(kinds: Mapping[str, str], given: Mapping[str, str | None]) -> dict[str, str]:
    """Names of options, by field, if they differ from the field's name."""
    lists = {name: kind for name, kind in kinds.items() if "Sequence" in kind}
    usual = {**_for_fields(_ONE_OF, lists), **_for_fields(_NAMED, kinds)}
    if "seeds" not in lists:
        usual.pop("seeds", None)
    return {name: to for name, to in {**usual, **given}.items() if to is not None}


def _models(chosen: Any) -> list[str]:
    """Names of models in the options, for downloads."""
    found: list[str] = []
    for name in ("target", "draft", "judge", "models"):
        value = getattr(chosen, name, None)
        found += [value] if isinstance(value, str) else list(value or ())
    return found
