"""Models whose rotary angles change with the length of a text."""

import torch
import transformers

from draftproof import Engine, SamplingParams
from support.helpers import ROPE

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 40,
        "factor": 4.0,
    },
    "original_max_position_embeddings": 40,
}


def phi3(**options):
    return transformers.Phi3Config(**ROPE, **options, pad_token_id=0, bos_token_id=0, eos_token_id=0)


PROMPTS = [[(7 * i * i + 3) % 97 for i in range(size)] for size in (3, 17, 33, 70)]


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@torch.inference_mode()
def plain_text(model, prompt, count=24):
    """Greedy tokens by plain forward passes without a cache: what the family's code defines."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def check_text(backend, model, prompts=PROMPTS, **options):
    outs = Engine(backend, max_batch=len(prompts), **options).generate(prompts, GREEDY)
    assert [out.token_ids for out in outs] == [plain_text(model, prompt) for prompt in prompts]
