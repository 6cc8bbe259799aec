"""Rollouts for reinforcement learning and synthetic data: samples of the target with their log-probabilities.

Speculation does not change what is sampled: every token has exactly the target's distribution under the sampling
parameters, and its log-probability is of that distribution. A distribution of the drafter appears nowhere.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from draftproof.engine.engine import Engine
from draftproof.engine.prompts import Prompt, as_prompts
from draftproof.errors import UserError
from draftproof.rng import fold
from draftproof.sampling import SamplingParams


@dataclass(frozen=True)
class Rollout:
    """One sample.

    Attributes:
        prompt_ids: token ids of the prompt.
        completion_ids: the sampled tokens; the end token is the last, where one ended it.
        logprobs: of each sampled token, the natural logarithm of the probability that it was drawn with.
        text: of the completion, without what the model reasons before its answer to a chat; empty without a tokenizer.
        finish_reason: "stop" or "length".
        seed: the same seed, prompt and weights give the same draws.
        reasoning: what the model reasons before its answer to a chat; None where it cannot.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    seed: int
    reasoning: str | None = None


class Rollouts:
    """Samples prompts with one engine, and follows a policy whose weights change.

    It is also a `rollout_func` for trl's GRPOTrainer (trl 1.x): called with prompts and the trainer, it takes the
    trainer's weights after each step.

    Args:
        engine: of the policy, made by `Engine.load` or `Engine.assemble`.
        params: sampling parameters of all prompts; default the engine's.

    Raises:
        UserError: a rule that is not lossless, whose samples are not the policy's.
    """

    def __init__(self, engine: Engine, params: SamplingParams | None = None) -> None:
        for rule in filter(None, (engine.verifier, engine.seeded_verifier)):
            if not rule.lossless:
                raise UserError(
                    f"verifier {rule.name} changes the output distribution, so its samples are not the policy's: use a "
                    "lossless rule, for example block"
                )
        self.engine = engine
        self.params = params or engine.default_params
        self._step: int | None = None
        self._calls = 0

    def sample(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Rollout]:
        """Sample every prompt.

        Args:
            prompts: texts, token ids or chat messages; one or several.
            params: for all prompts, or one for each; default those of the constructor. Of each prompt `n` are sampled.
                One seed for all prompts gives each of them its own, so that equal prompts have different samples.

        Returns:
            For each prompt its n samples, in order.

        Raises:
            UserError: an invalid prompt or invalid parameters.
            RequestError: a request failed.
        """
        many = as_prompts(prompts)
        given = self.params if params is None else params
        each = _one_each(given, len(many)) if isinstance(given, SamplingParams) else list(given)
        wanted = [replace(own, logprobs=0, logprobs_mode="processed_logprobs") for own in each]
        found = iter(self.engine.generate(many, wanted))
        made = []
        for prompt, own in zip(many, wanted, strict=True):
            ids = tuple(self.engine.encode(prompt)[1])
            for output in (next(found) for _ in range(own.n)):
                assert output.logprobs is not None, "asked for"
                logprobs = tuple(entry.logprob for entry in output.logprobs)
                texts = output.text, output.finish_reason, output.seed, output.reasoning
                made.append(Rollout(ids, output.token_ids, logprobs, *texts))
        return made

    def __call__(self, prompts: Sequence[Prompt], trainer: Any = None) -> dict[str, list[Any]]:
        """What trl's `rollout_func` returns: one sample for each prompt that it is given, and other ones in each call.

        Args:
            prompts: texts or chat messages.
            trainer: whose model is the policy, and whose temperature, top_p, top_k, min_p, repetition_penalty and
                max_completion_length are used; None for the parameters of the constructor.

        Returns:
            Lists by name: prompt_ids, completion_ids, logprobs, and text and reasoning for reward functions.

        Raises:
            UserError: as `sample` and `update_weights`.
        """
        params = self.params
        if trainer is not None:
            self._follow(trainer)
            params = _trainer_params(trainer, params)
        if params.seed is not None:
            params = replace(params, seed=fold(params.seed, self._calls) >> 1)
        self._calls += 1
        found = self.sample(list(prompts), replace(params, n=1))
        return {
            "prompt_ids": [list(each.prompt_ids) for each in found],
            "completion_ids": [list(each.completion_ids) for each in found],
            "logprobs": [list(each.logprobs) for each in found],
            "text": [each.text for each in found],
            "reasoning": [each.reasoning for each in found],
        }

    def _follow(self, trainer: Any) -> None:
        """Take the trainer's weights, where it has made a step since the last time."""
        step = int(trainer.state.global_step)
        if step != self._step:
            self.update_weights(trainer.accelerator.unwrap_model(trainer.model))
            self._step = step

    def update_weights(self, weights: nn.Module | Mapping[str, Tensor]) -> None:
        """Go on with the policy's new weights; until then samples and log-probabilities are the old policy's.

        Args:
            weights: the policy, with or without a PEFT adapter (which is merged on a copy), or its state dict.

        Raises:
            UserError: as `Engine.update_weights`.
        """
        policy: Any = weights
        if isinstance(weights, nn.Module) and hasattr(weights, "merge_and_unload"):
            policy = copy.deepcopy(policy).merge_and_unload()
        self.engine.update_weights(policy)


def _one_each(params: SamplingParams, count: int) -> list[SamplingParams]:
    if params.seed is None:
        return [params] * count
    return [replace(params, seed=fold(params.seed, place) >> 1) for place in range(count)]


_TRAINER = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _trainer_params(trainer: Any, params: SamplingParams) -> SamplingParams:
    named: dict[str, Any] = {name: value for name in _TRAINER if (value := getattr(trainer, name, None)) is not None}
    most = getattr(trainer, "max_completion_length", None)
    if most is not None:
        named["max_tokens"] = int(most)
    return replace(params, **named)
