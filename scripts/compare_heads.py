"""Published draft heads beside the packages that they come from: logits of all steps from all positions.

    python scripts/compare_heads.py [--speculators PYTHON] [--transformers PYTHON ...] [--out NAME]

Each PYTHON is that of an environment of its own: with speculators 0.9 (`pip install torch==2.13.0 speculators==0.9.0`,
then `pip uninstall torchaudio torchvision` where these are for another torch and transformers cannot be imported), or
with transformers 5.22 or 5.24, which make Gemma 4 assistants (5.23 does not). There the scripts
`make_head_references.py`, `make_mtp_references.py` and `make_assistant_references.py` of scripts/made_once make random
heads and compute their logits again; here the heads are read from what was written, and compared. The control is the
same head with weights rounded to bfloat16: a comparison that cannot see this sees nothing. Without a PYTHON, the files
that the tests keep are compared. Exits with 1 where a difference is too large, or that of a control too small.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from safetensors.torch import load_file, save_file

from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.lean.module_backend import LeanModulesBackend
from draftproof.provenance import run_facts
from draftproof.results import Results, table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support import head_references as heads

MOST, LEAST = 1e-5, 1e-4
LEAN_ASSISTANTS = 3e-5  # sums in another order
KEPT = heads.DATA.parent
INTRO = (
    "Tiny random heads, made and computed by the packages in environments of their own, then read by `draftproof` from "
    "the same files: the largest difference of a row of logits (of scores, for `dflash2`), as a share of the largest "
    "logit, over all steps of drafts from all positions of a text of 12 tokens. For `dspark` the larger one of that "
    "and the difference of the predicted acceptance. The control is the same head with weights rounded to bfloat16 "
    "(other tokens: those that it keeps, or their clusters, are others). float32, one thread."
)
HEADS = ("head", "made by", "rows", "backend `hf`", "backend `lean`", "control")


def compared(kind: str) -> Iterator[tuple[str, dict[str, Callable[..., heads.Difference]]]]:
    """The heads of a kind of references: names, and comparisons by backend."""
    made = {"hf": HFBackend, "lean": LeanModulesBackend if kind == "assistants" else LeanBackend}
    if kind == "speculators":
        blocks = (*heads.DFLASH, *heads.DSPARK, *heads.DFLASH2)
        groups = (
            (heads.eagle3, heads.EAGLE3),
            (heads.peagle, ("peagle",)),
            (heads.block, blocks),
            (heads.mtp, ("mtp",)),
        )
        for compare, names in groups:
            for name in names:
                yield name, {backend: partial(compare, name, each) for backend, each in made.items()}
    elif kind == "mtp_qwen":
        for name in heads.QWEN:  # these targets have recurrent layers, and a backend of their own
            yield f"mtp, {name}: first step", {"snapshot": partial(heads.qwen_first_step, name)}
            yield f"mtp:HEAD, {name}", {"snapshot": partial(heads.qwen_head, name)}
    else:
        for name in heads.ASSISTANTS:
            yield (
                f"assistant, {name}",
                {backend: partial(heads.assistant, name, each) for backend, each in made.items()},
            )


def rounded(folder: Path, out: Path) -> Path:
    """A copy of the folder in which weights of heads, not those of targets, are those of bfloat16."""
    shutil.copytree(folder, out)
    for path in out.rglob("*.safetensors"):
        if path.parent.name == "target" or path.name == "steps.safetensors":
            continue
        own = path.name == "reference.safetensors"  # there a prediction layer stands beside what is expected
        tensors = {
            key: value.bfloat16().to(value.dtype)
            if value.dtype == torch.float32 and (key.startswith("mtp.") or not own)
            else value
            for key, value in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
    return out


def made_anew(python: str, script: str, out: Path) -> None:
    """What a script of scripts/made_once writes with the packages of another Python."""
    path = Path(__file__).parent / "made_once" / script
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": ""}
    subprocess.run([python, path, out], check=True, timeout=600, env=environment, stdout=subprocess.DEVNULL)


def references(options: argparse.Namespace, place: Path) -> Iterator[tuple[str, Path, dict[str, str]]]:
    """Kinds of references, their folders, and the versions that made them."""
    wanted = []
    if options.speculators:
        wanted += [(options.speculators, "make_head_references.py", "speculators")]
        wanted += [(options.speculators, "make_mtp_references.py", "mtp_qwen")]
    wanted += [(python, "make_assistant_references.py", "assistants") for python in options.transformers]
    for number, (python, script, kind) in enumerate(wanted):
        common.say(options, "making", kind)
        made_anew(python, script, place / str(number))
        yield kind, place / str(number), versions(place / str(number))
    if not wanted:
        for kind in ("speculators", "mtp_qwen", "assistants"):
            yield kind, KEPT / kind, versions(KEPT / kind)


def versions(folder: Path) -> dict[str, str]:
    """Of the packages that made references."""
    made: dict[str, str] = json.loads((folder / "provenance.json").read_text())["made_with"]
    return made


def main() -> None:
    """Compare, and print a table."""
    parser = common.parser(__doc__)
    parser.add_argument("--speculators", metavar="PYTHON", help="of an environment with speculators")
    parser.add_argument(
        "--transformers", metavar="PYTHON", nargs="+", default=[], help="of environments with transformers 5.22 or 5.24"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, wrong = list[dict[str, Any]](), list[str]()
    with tempfile.TemporaryDirectory() as place:
        for number, (kind, folder, made_with) in enumerate(references(options, Path(place))):
            other = rounded(folder, Path(place) / f"rounded{number}")
            for name, backends in compared(kind):
                made = {backend: compare(data=folder) for backend, compare in backends.items()}
                shares = {backend: max(each.share, each.accepted) for backend, each in made.items()}
                control = next(iter(backends.values()))(data=other).share
                rows = next(iter(made.values())).rows
                found.append({"head": name, "made_with": made_with, "rows": rows, "shares": shares, "control": control})
                common.say(options, name, shares, "control", control)
                for backend, share in shares.items():
                    if share >= (LEAN_ASSISTANTS if kind == "assistants" and backend == "lean" else MOST):
                        wrong.append(f"{name} on {backend}: {share:.1e}")
                if control <= LEAST:
                    wrong.append(f"control of {name}: {control:.1e}")
    lines = [INTRO, "", *table(HEADS, [row(each) for each in found]), ""]
    common.deliver(options, Results("Draft heads beside reference packages", lines, {"heads": found}, run_facts("cpu")))
    if wrong:
        sys.exit("; ".join(wrong))


def row(found: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table; targets with recurrent layers have one backend."""
    versions, shares = found["made_with"], found["shares"]
    package = "speculators" if "speculators" in versions else "transformers"
    by = f"{package} {versions[package]}"
    if package == "speculators":
        by += f", transformers {versions['transformers']}"
    by += f", torch {versions['torch']}"
    columns = [f"{shares[kind]:.1e}" if kind in shares else "" for kind in ("hf", "lean")]
    if "snapshot" in shares:
        columns = [f"`snapshot`: {shares['snapshot']:.1e}", ""]
    control = f"{found['control']:.1e}" if math.isfinite(found["control"]) else "other tokens"
    return found["head"], by, str(found["rows"]), *columns, control


if __name__ == "__main__":
    main()
