"""What the measuring scripts share: their arguments, what becomes of their results, and models with random weights."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from draftproof.results import Results


def parser(doc: str | None, *, out: bool = False) -> argparse.ArgumentParser:
    """A parser with the docstring of the script as its help, and the options that `deliver` reads.

    Args:
        doc: the script's docstring.
        out: whether the script must be told where to write.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=out, help="writes OUT.md and OUT.json")
    made.add_argument("--json", action="store_true", help="prints the figures as JSON, not the page")
    made.add_argument("-q", "--quiet", action="store_true", help="prints no page and less progress")
    return made


def deliver(options: argparse.Namespace, results: Results) -> None:
    """Print the page or its figures, and write both if the script was told where."""
    if options.json:
        print(json.dumps(results.to_dict()))
    elif not options.quiet:
        print(results.markdown(), flush=True)
    if options.out is not None:
        results.write(options.out)


def say(options: argparse.Namespace, *words: object) -> None:
    """A line about progress on stderr."""
    if not options.quiet:
        print(*words, file=sys.stderr, flush=True)


def random_model(config: Any, dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """A transformers model with random weights, always the same ones, made where it runs; its answers never end."""
    torch.manual_seed(0)
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    made.generation_config.eos_token_id = None
    return made
