"""The model `draftproof` for lm-eval (EleutherAI's evaluation harness).

    python -m draftproof.integrations.lm_eval run --model draftproof --model_args target=MODEL --tasks gsm8k

Importing this module registers the model, also for `lm_eval.simple_evaluate(model="draftproof", ...)`. lm-eval 0.4.13
looks for no entry points of other packages, so that its own command does not know the name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from draftproof import models
from draftproof.backends.loading.tokenization import load_tokenizer
from draftproof.engine.engine import Engine
from draftproof.engine.request import Request
from draftproof.errors import UserError
from draftproof.integrations.scoring import score
from draftproof.sampling import SamplingParams

_DEFAULT_LENGTH = 2048  # of models without a limit, as in lm-eval
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_SILENT = ("do_sample", "until", "max_gen_toks", "use_cache")  # read elsewhere, or without effect here


@register_model("draftproof")
class DraftproofLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A model for lm-eval that generates speculatively and scores the choices of a question as one tree.

    Args:
        target: as in `Engine.load`.
        pretrained: another name for it, as lm-eval's own models have it.
        batch_size: sequences decoded together; "auto" is 8.
        max_batch_size: not used; lm-eval gives it.
        max_length: the longest sequence; default what the model reads.
        max_gen_toks: tokens of an answer, where a task names no number.
        add_bos_token: whether prompts begin with the tokenizer's first token; default as the tokenizer does it.
        prefix_token_id: what stands before a text without a context; default the tokenizer's BOS, else its EOS.
        seed: of sampled answers; None lets the engine choose.
        device: as in `Engine.load`, but CUDA is not asked for where there is none: lm-eval's command line gives cuda:0
            if the user names nothing.
        dtype, trust_remote_code: as in `Engine.load`.
        **options: more of `Engine.load`: draft, drafter, stopper, verifier, backend, ...

    Raises:
        UserError: an option that `Engine.load` does not have, or a value that it refuses.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        pretrained: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,  # noqa: ARG002 - lm-eval gives it
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        seed: int | None = None,
        device: str | None = None,
        dtype: str = "auto",
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        name = target or pretrained
        if name is None or (target and pretrained):
            raise UserError("the model draftproof needs one name: --model_args target=MODEL")
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = None
        batch = 8 if batch_size in (None, "auto") or str(batch_size).startswith("auto") else int(str(batch_size))
        self.engine = Engine.load(
            name, device=device, dtype=dtype, trust_remote_code=trust_remote_code, max_batch=batch, **options
        )
        self.tokenizer = load_tokenizer(models.obtain(name), trust_remote_code=trust_remote_code)
        self._name = name
        self._batch = batch
        self._device = self.engine.target.device
        self._length = max_length or self.engine.target.max_positions or _DEFAULT_LENGTH
        self._most = max_gen_toks
        self._bos = add_bos_token
        self._prefix = prefix_token_id
        self._seed = seed

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        found = (self._prefix, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        return int(next(each for each in found if each is not None))

    @property
    def max_length(self) -> int:
        """The longest sequence."""
        return int(self._length)

    @property
    def max_gen_toks(self) -> int:
        """Tokens of an answer, where a task names no number."""
        return self._most

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's caches."""
        return self._name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text, special tokens as lm-eval's hf model adds them."""
        own = self._bos if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode([self.prefix_token_id])):
            own = False
        options = {} if own is None else {"add_special_tokens": own}
        return list(self.tokenizer.encode(string, **options))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A prompt from messages."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    # --- scores ---------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [self._fitted(context, tail) for _, context, tail in requests]
        found: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        with tqdm(total=len(pairs), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for place, each in score(self.engine.target, pairs, max_batch=self._batch):
                found[place] = (each.logprob, each.greedy)
                if requests[place][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[place][0], found[place])
                bar.update()
        return found

    def _fitted(self, context: list[int], tail: list[int]) -> tuple[list[int], list[int]]:
        """Both without what does not fit into the model, which is cut off on the left."""
        if len(tail) > self.max_length:
            raise UserError(f"a continuation has {len(tail)} tokens: the model reads {self.max_length}")
        return context[max(len(context) + len(tail) - self.max_length - 1, 0) :], tail

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows as long as the model reads; see lm-eval's LM."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        owners = []
        for number, (text,) in enumerate(request.args for request in requests):
            parts = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for part in map(make_disjoint_window, parts):
                windows.append((None, *part))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # --- answers --------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, each up to its first stop string; see lm-eval's LM."""
        eos = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        running: list[tuple[Request, list[str]]] = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            try:
                for context, given in (request.args for request in requests):
                    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
                    until = handle_stop_sequences(kwargs.pop("until", None), eos=eos)
                    params = self._params(kwargs, until)
                    ids = self.tok_encode(context)[-(self.max_length - int(kwargs["max_gen_toks"])) :]
                    running.append((self.engine.add(ids, params)[0], until))
                done = 0
                while done < len(running):
                    self.engine.step()
                    now = sum(request.finished for request, _ in running)
                    bar.update(now - done)
                    done = now
            finally:
                for request, _ in running:
                    self.engine.abort(request)
        answers = [self._answer(request, until) for request, until in running]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _params(self, kwargs: dict[str, Any], until: list[str]) -> SamplingParams:
        unknown = sorted(kwargs.keys() - set(_SAMPLING) - set(_SILENT))
        if unknown:
            raise UserError(
                f"unknown generation argument {unknown[0]}={kwargs[unknown[0]]!r}: expected {', '.join(_SAMPLING)}, "
                "do_sample, until or max_gen_toks"
            )
        most = int(kwargs["max_gen_toks"])
        if most >= self.max_length:
            raise UserError(f"max_gen_toks: expected less than the context of {self.max_length} tokens, got {most}")
        named = {name: kwargs[name] for name in _SAMPLING if kwargs.get(name) is not None}
        if not kwargs.get("do_sample"):
            named["temperature"] = 0.0
        stops = tuple(each for each in until if each)
        return replace(self.engine.default_params, **named, max_tokens=most, stop=stops, seed=self._seed)

    def _answer(self, request: Request, until: list[str]) -> str:
        """The text of an answer, decoded and cut as lm-eval's hf model does it."""
        ids = list(self.engine.output(request).token_ids)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return str(postprocess_generated_text(text, until, None))


def main() -> None:
    """lm-eval's own command line, which knows the model `draftproof` here."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
