"""The kinds of attention mask that a model builds, and the window of each.

The config is not enough: transformers' Llama ignores `sliding_window` and `layer_types`, its Mistral ignores
`layer_types` and `use_sliding_window`. So a model is observed while it reads two tokens: it calls the functions of
transformers that make masks with the config that is in effect.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
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
_ONE_AT_A_TIME = threading.Lock()


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
    """The kinds of attention mask that a model builds when it reads two tokens; full attention where it builds none."""
    found: list[tuple[str, Any]] = []
    modules = {sys.modules[type(each).__module__] for each in model.modules() if type(each).__module__ in sys.modules}
    watchers: dict[str, Callable[..., Any]] = {name: partial(_note, found, kind) for name, kind in _FACTORIES.items()}
    watchers["create_masks_for_generate"] = partial(_note_all, found)
    calls = [(each, name, watcher) for each in modules for name, watcher in watchers.items() if hasattr(each, name)]
    with watching(calls), torch.inference_mode():
        ids = torch.zeros((1, 2), dtype=torch.int64, device=input_device(model))
        model(input_ids=ids, use_cache=False)
    text = model.config.get_text_config()
    config = next((config for kind, config in found if kind in (SLIDING, CHUNKED)), text)
    kinds = {kind for kind, _ in found}
    # A family may make masks that none of its layers use.
    if set(getattr(text, "layer_types", None) or {None}) <= KNOWN:
        kinds &= KNOWN
    return Windows(frozenset(kinds or {FULL}), config)


def _note(found: list[tuple[str, Any]], kind: str, made: Any, *args: Any, **kwargs: Any) -> Any:
    """Watch a function that makes masks of one kind."""
    found.append((kind, kwargs["config"] if "config" in kwargs else args[0]))
    return made


def _note_all(found: list[tuple[str, Any]], made: Any, *args: Any, **kwargs: Any) -> Any:
    """Watch the function that makes masks of all kinds."""
    config = (kwargs["config"] if "config" in kwargs else args[0]).get_text_config()
    one = SLIDING if getattr(config, "sliding_window", None) is not None else FULL
    found.extend((kind, config) for kind in (made if isinstance(made, dict) else [one]))
    return made


@contextmanager
def watching(calls: Iterable[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """While this is open, watchers get what this thread's calls of transformers' functions return, and may change it.

    Functions of modules are replaced meanwhile, so one model is watched at a time; for other threads, whose models may
    be of the same family, they do what they always do.

    Args:
        calls: owner and name of each function, and its watcher: it is called with what the function made and with its
            arguments, and what it returns is what the caller gets.
    """
    thread = threading.get_ident()

    def watched(function: Callable[..., Any], watcher: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            return watcher(made, *args, **kwargs) if threading.get_ident() == thread else made

        return call

    with _ONE_AT_A_TIME, ExitStack() as stack:
        for owner, name, watcher in calls:
            stack.enter_context(mock.patch.object(owner, name, watched(getattr(owner, name), watcher)))
        yield
