"""The kinds of attention mask that a model builds, and the window of each.

The config is not enough: transformers' Llama ignores `sliding_window` and `layer_types`, its Mistral ignores
`layer_types` and `use_sliding_window`. So a model is observed while it reads two tokens: it calls the functions of
transformers that make masks with the config that is in effect.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from draftproof.backends.model_info import input_device

FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
KNOWN = {FULL, SLIDING, CHUNKED}
RECURRENT = (LINEAR, "conv")  # kinds of layers without a mask
_FACTORIES = {
    "create_causal_mask": FULL,
    "create_sliding_window_causal_mask": SLIDING,
    "create_chunked_causal_mask": CHUNKED,
    "create_recurrent_attention_mask": LINEAR,
    "create_bidirectional_mask": "bidirectional attention",
    "create_bidirectional_sliding_window_mask": "bidirectional attention",
}
ONE_AT_A_TIME = threading.Lock()  # functions of modules are replaced meanwhile


class ChunkedWindow(int):
    """The size of chunks, in place of a window: only positions in the same chunk are seen."""


@dataclass(frozen=True)
class Windows:
    """The kinds of mask that a model builds."""

    kinds: frozenset[str]  # their names in transformers
    config: Any = None  # from which the window is read at each pass; None where no mask was seen

    @property
    def foreign(self) -> list[str]:
        """Kinds for which `Layout` has no mask."""
        return sorted(self.kinds - KNOWN)

    def now(self) -> dict[str, int | None]:
        """The window of each kind of attention; None for full attention."""
        return {kind: self._window(kind) for kind in sorted(self.kinds & KNOWN) or [FULL]}

    def _window(self, kind: str) -> int | None:
        if kind == CHUNKED:
            return ChunkedWindow(self.config.attention_chunk_size)
        return self.config.sliding_window if kind == SLIDING else None


def windows_of(model: Any) -> Windows:
    """The kinds of mask that a model builds when it reads two tokens; full attention where it builds none."""
    found: list[tuple[str, Any]] = []
    with ONE_AT_A_TIME, _watched(model, found), torch.inference_mode():
        ids = torch.zeros((1, 2), dtype=torch.int64, device=input_device(model))
        model(input_ids=ids, use_cache=False)
    text = model.config.get_text_config()
    config = next((config for kind, config in found if kind in (SLIDING, CHUNKED)), text)
    kinds = {kind for kind, _ in found}
    # A family may make masks that none of its layers use.
    if set(getattr(text, "layer_types", None) or {None}) <= KNOWN:
        kinds &= KNOWN
    return Windows(frozenset(kinds or {FULL}), config)


@contextmanager
def _watched(model: Any, found: list[tuple[str, Any]]) -> Iterator[None]:
    """Record this thread's calls of functions that make masks, in all modules that the model's classes come from."""
    modules = {sys.modules[type(each).__module__] for each in model.modules() if type(each).__module__ in sys.modules}
    with ExitStack() as stack:
        for module in modules:
            for name, kind in _FACTORIES.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, _recording(getattr(module, name), kind, found)))
            if hasattr(module, "create_masks_for_generate"):
                made = _recording_all(module.create_masks_for_generate, found)
                stack.enter_context(mock.patch.object(module, "create_masks_for_generate", made))
        yield


def _recording(make: Callable[..., Any], kind: str, found: list[tuple[str, Any]]) -> Callable[..., Any]:
    watching = threading.get_ident()  # others may run models of the same family

    @functools.wraps(make)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == watching:
            found.append((kind, kwargs["config"] if "config" in kwargs else args[0]))
        return make(*args, **kwargs)

    return recorded


def _recording_all(make: Callable[..., Any], found: list[tuple[str, Any]]) -> Callable[..., Any]:
    watching = threading.get_ident()

    @functools.wraps(make)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        if threading.get_ident() != watching:
            return made
        config = (kwargs["config"] if "config" in kwargs else args[0]).get_text_config()
        one = SLIDING if getattr(config, "sliding_window", None) is not None else FULL
        found.extend((kind, config) for kind in (made if isinstance(made, dict) else [one]))
        return made

    return recorded
