"""What test_parallel runs in several processes at once: it decodes by each composition and prints what came out.

Only process 0 gets past the first model: the others follow it there.
"""

import json
import sys
from pathlib import Path

import torch

from draftproof import Engine, SamplingParams
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.options import LoadOptions
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.errors import UserError

LONG = [(7 * place) % 90 + 3 for place in range(80)]
PROMPTS = [[1, 80, 90, 11], [5, 6, 7, 5, 6, 7, 5, 6], LONG, [*LONG[:60], 9, 8]]  # the last two begin alike
PARAMS = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=12, ignore_eos=True)
    for seed, temperature in enumerate((0.0, 0.9, 0.7, 0.0))
]
COMPOSITIONS = {
    "plain": {"drafter": "none"},
    "model": {"drafter": "model", "stopper": "fixed:3", "rule": "block"},
    "tree": {"drafter": "tree:2x2x1", "stopper": "fixed:3"},
    "ngram": {"drafter": "ngram:4"},
}
REFUSED = {"quantized": "quantized:4", "early_exit": "early_exit:2"}


def decoded(engine):
    """Tokens of every prompt, in one batch."""
    return [list(out.token_ids) for out in engine.generate(PROMPTS, PARAMS)]


def texts(folders, processes):
    """By composition and by family, the tokens that come out; of refused ones the message."""
    found = {}
    load = {"dtype": "float32", "backend": "hf", "tensor_parallel": processes}
    engine = Engine.load(folders["target"], folders["draft"], **load)
    found["auto"] = decoded(engine)  # what it drafts depends on the time of rounds, and with a seed the text does not
    target, draft = engine.target, load_backend(folders["draft"], LoadOptions(dtype="float32"))
    for name, options in COMPOSITIONS.items():
        read = draft if name in ("model", "tree") else None
        rule = {"rule": make_verifier(options["rule"])} if "rule" in options else {}
        found[name] = decoded(Engine.assemble(target, read, None, **options | rule))
    for name in folders.keys() - {"target", "draft"}:
        backend = load_backend(folders[name], LoadOptions(**load))
        found[name] = decoded(Engine(backend, NgramDrafter(4), max_batch=3))
        found[f"{name}, kind"] = type(backend).__name__
    if processes > 1:
        for name, drafter in REFUSED.items():
            try:
                Engine.assemble(target, None, None, drafter=drafter)
            except UserError as error:
                found[name] = str(error)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = texts(json.loads(sys.argv[1]), int(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(made), encoding="utf-8")
