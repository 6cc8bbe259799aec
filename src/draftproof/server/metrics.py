"""Prometheus metrics of a server, with vLLM's names after the prefix `draftproof:`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from draftproof.engine.memory import MemoryUse
from draftproof.engine.stats import Stats

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10)
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """All metrics of a server, in their own registry, labelled with its model; thread-safe."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self.running = self._gauge("num_requests_running", "Continuations that are decoded.")
        self.waiting = self._gauge("num_requests_waiting", "Continuations that wait for a place in the batch.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were read.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens that were generated.")
        self._kv_used = self._gauge("kv_cache_used_bytes", "Keys, values and states of continuations that are decoded.")
        self._kv_kept = self._gauge(
            "kv_cache_kept_bytes", "Those of finished texts, kept for others with a common prefix."
        )
        self._kv_share = self._gauge("kv_cache_usage_perc", "Share of kv_memory that is used or kept; 1 is all of it.")
        self.prefix_queries = self._counter("prefix_cache_queries", "Tokens of prompts that could have been known.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Tokens of prompts that other texts had left.")
        self.drafts = self._counter("spec_decode_num_drafts", "Rounds that verified a drafted token, by continuation.")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Tokens that were drafted.")
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self.target_calls = self._counter("num_target_calls", "Forward passes of the target, by continuation.")
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _LONG)
        self.between_tokens = self._histogram(
            "time_per_output_token_seconds", "Seconds of a round, for each token that it made.", _SHORT
        )
        self.queue_time = self._histogram("request_queue_time_seconds", "From arrival to a place in the batch.", _LONG)
        self.whole_time = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _LONG)
        self.prompt_sizes = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.answer_sizes = self._histogram("request_generation_tokens", "Tokens of a continuation.", _TOKENS)
        self._ends = self._counter("request_success", "Continuations that ended, by reason.", "finished_reason")
        about = "Drafted tokens that were accepted, by their place in the draft."
        self._by_place = self._counter("spec_decode_num_accepted_tokens_per_pos", about, "position")
        self._by_source = self._counter(
            "generation_tokens_by_source",
            "Tokens that were generated, by where they came from: accepted ones from where they were drafted, others "
            "from the target.",
            "source",
        )

    def made(self, source: str, accepted: int, tokens: int) -> None:
        """Count the tokens of a round: accepted ones by the source of the draft, the others for the target."""
        for name, count in ((source, accepted), ("target", tokens - accepted)):
            if count:
                self._by_source.labels(self._model, name).inc(count)

    def ended(self, reason: str, seconds: float, tokens: int) -> None:
        """Count a continuation that ended: stop, length, abort or error."""
        self._ends.labels(self._model, reason).inc()
        self.whole_time.observe(seconds)
        self.answer_sizes.observe(tokens)

    def decoded(self, before: Stats, now: Stats) -> Stats:
        """Count the increase of a continuation's statistics since the last call; returns a copy of them."""
        self.generation_tokens.inc(now.num_tokens - before.num_tokens)
        self.target_calls.inc(now.num_target_calls - before.num_target_calls)
        if now.num_draft_tokens > before.num_draft_tokens:
            self.drafts.inc(now.num_drafts - before.num_drafts)
            self.draft_tokens.inc(now.num_draft_tokens - before.num_draft_tokens)
            self.accepted_tokens.inc(now.num_accepted_tokens - before.num_accepted_tokens)
            counts = zip_longest(now.num_accepted_tokens_per_pos, before.num_accepted_tokens_per_pos, fillvalue=0)
            for place, (count, counted) in enumerate(counts):
                if count > counted:
                    self._by_place.labels(self._model, str(place)).inc(count - counted)
        return replace(now, num_accepted_tokens_per_pos=[*now.num_accepted_tokens_per_pos])

    def holds(self, memory: MemoryUse) -> None:
        """Set the memory of keys and values; the share stays 0 without a limit."""
        self._kv_used.set(memory.used)
        self._kv_kept.set(memory.kept)
        if memory.capacity:
            self._kv_share.set((memory.used + memory.kept) / memory.capacity)

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(f"draftproof:{name}", about, ("model_name",), registry=self.registry).labels(self._model)

    def _counter(self, name: str, about: str, *more: str) -> Counter:
        """A counter of the model; with more labels it has a value for each combination."""
        made = Counter(f"draftproof:{name}", about, ("model_name", *more), registry=self.registry)
        return made if more else made.labels(self._model)

    def _histogram(self, name: str, about: str, buckets: Sequence[float | int]) -> Histogram:
        made = Histogram(f"draftproof:{name}", about, ("model_name",), registry=self.registry, buckets=buckets)
        return made.labels(self._model)


class _Together(Collector):
    """The metrics of several pages in Prometheus' text format, each labelled with where it comes from."""

    def __init__(self, pages: Mapping[str, str], label: str) -> None:
        self._pages = pages
        self._label = label

    def collect(self) -> Iterator[Metric]:
        """Each metric once, with the samples of all pages, as the format requires."""
        families: dict[str, Metric] = {}
        for value, page in self._pages.items():
            for family in text_string_to_metric_families(page):
                found = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                found.samples += [
                    sample._replace(labels={**sample.labels, self._label: value}) for sample in family.samples
                ]
        yield from families.values()


def together(pages: Mapping[str, str], label: str) -> bytes:
    """One page of the metrics of several servers, whose pages are given by name; `label` has a sample's server."""
    return generate_latest(_Together(pages, label))
