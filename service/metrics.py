"""What the server counts, in the form that Prometheus reads.

    requests, outputs --seen by middleware.py and api.py--> METERS --+
                                                                +--render()--> text of /metrics
    queue, KV cache, background runs --READINGS at a scrape-----+

Authority: https://prometheus.io/docs/instrumenting/exposition_formats/; for names, units and meanings
https://docs.vllm.ai/en/stable/usage/metrics/

Rules of this file:
1. What vLLM has too is called as there behind `vllm:`, with its unit and the label `model_name`. The prefix
   is our own: one Prometheus may scrape a relay and the vLLM behind it, and would count each token twice.
2. Gauges are read from their owner at each scrape, never kept in step here.
3. Labels have few values, all ours: a route's template, never a path; nothing that a client has written.

Not here: the route (middleware.py), what a relayed request costs (gateway/metering.py). Chat that passes
through to an upstream is counted by gateway/remote.py, as relayed_* alone.
"""

import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "llmref:"
MODEL = "model_name"  # the one label that all have, with one value: vLLM's dashboards choose by it

# From a token of a small model on a fast GPU to a long answer of a large one on a slow CPU.
SECONDS = (.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)  # fmt: skip
REASON, ROUTE, HTTP = ("finished_reason",), ("handler",), ("handler", "method", "status")
TOKENS = tuple(n * 10**digits for digits in range(6) for n in (1, 2, 5))

Counts = Callable[[], Mapping[str, int]]


class Meter(NamedTuple):
    labels: tuple[str, ...]
    buckets: tuple[float, ...]  # a histogram's; a counter has none
    what: str


Kind = Literal["gauge", "counter"]


class Reading(NamedTuple):
    kind: Kind
    what: str
    read: Callable[[Mapping[str, int]], float]  # raises KeyError where the worker has no such thing


got = operator.itemgetter


def used(counts: Mapping[str, int]) -> float:
    return 1 - counts["free_pages"] / max(counts["pages"], 1)


# fmt: off
#  behind the prefix                              labels   buckets   what
METERS = {
    "prompt_tokens":                         Meter((),      (),       "Tokens of prompts."),
    "generation_tokens":                     Meter((),      (),       "Tokens generated; aborted runs: 0."),
    "prefix_cache_queries":                  Meter((),      (),       "Tokens of prompts looked for in it."),
    "prefix_cache_hits":                     Meter((),      (),       "Tokens of prompts found in it."),
    "request_success":                       Meter(REASON,  (),       "Runs that have ended, and how."),
    "time_to_first_token_seconds":           Meter((),      SECONDS,  "To a run's first piece."),
    "request_time_per_output_token_seconds": Meter((),      SECONDS,  "Of a run, behind its first piece."),
    "e2e_request_latency_seconds":           Meter((),      SECONDS,  "To a run's end."),
    "request_prompt_tokens":                 Meter((),      TOKENS,   "Tokens of a prompt."),
    "request_generation_tokens":             Meter((),      TOKENS,   "Tokens generated in a run."),
    "http_requests":                         Meter(HTTP,    (),       "Requests answered."),
    "http_request_duration_seconds":         Meter(ROUTE,   SECONDS,  "From head to last byte."),
}

#  behind the prefix                       kind       what                        read
READINGS = {
    "num_requests_running":            Reading("gauge",   "Sequences with a place.",  got("running")),
    "num_requests_waiting":            Reading("gauge",   "Those that wait for one.", got("waiting")),
    "kv_cache_usage_perc":             Reading("gauge",   "Share of the KV cache.",   used),
    "num_preemptions":                 Reading("counter", "Those put back to wait.",  got("preemptions")),
    "spec_decode_num_draft_tokens":    Reading("counter", "Tokens guessed.",          got("drafted")),
    "spec_decode_num_accepted_tokens": Reading("counter", "Tokens guessed right.",    got("accepted")),
    "engine_steps":                    Reading("counter", "Forward passes.",          got("steps")),
    "upstreams_down":                  Reading("gauge",   "Upstreams not asked now.", got("upstreams_down")),
    "relayed_requests_done":           Reading("counter", "Upstreams have answered.", got("relayed_done")),
    "relayed_requests_failed":         Reading("counter", "They have not.",           got("relayed_error")),
    "relayed_requests_left":           Reading("counter", "The client has left.", got("relayed_disconnect")),
    "relayed_tokens":                  Reading("counter", "Weighed as they cost.",   got("relayed_total")),
    "relayed_cost":                    Reading("counter", "In units of the price.",   got("relayed_cost")),
}

#  behind the prefix                   kind      what, by status
BACKGROUND: dict[str, tuple[Kind, str]] = {
    "background_responses":           ("gauge",   "Background responses that have not ended."),
    "background_responses_ended":     ("counter", "Background responses that have ended, since the start."),
}

#  Finish.reason    as vLLM says it
REASONS = {
    "stop":         "stop",
    "length":       "length",
    "failed":       "error",
    "cancelled":    "abort",
    "content_filter": "content_filter",
}
# fmt: on

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which nobody asks for


class Run:
    """The watch on one run of the worker."""

    def __init__(self, metrics: "Metrics") -> None:
        self._metrics = metrics
        self._started_at = time.perf_counter()
        self._first_at: float | None = None

    def piece(self) -> None:
        """A piece of output came."""
        if self._first_at is None:
            self._first_at = time.perf_counter()
            self._metrics.observe("time_to_first_token_seconds", self._first_at - self._started_at)

    def end(self, reason: str, n_prompt: int, n_cached: int, n_generated: int) -> None:
        """The run has ended; what was not counted any more is 0."""
        add, observe, ended_at = self._metrics.add, self._metrics.observe, time.perf_counter()
        add("request_success", 1, REASONS[reason])
        observe("e2e_request_latency_seconds", ended_at - self._started_at)
        for name, n in (("prompt_tokens", n_prompt), ("generation_tokens", n_generated)):
            add(name, n)
            observe(f"request_{name}", n)
        add("prefix_cache_queries", n_prompt)
        add("prefix_cache_hits", n_cached)
        if self._first_at is not None and n_generated > 1:
            seconds = (ended_at - self._first_at) / (n_generated - 1)
            observe("request_time_per_output_token_seconds", seconds)


class Metrics(Collector):
    """`engine` counts what the worker holds; `live` and `ended` the background responses, by status."""

    def __init__(self, model: str, engine: Counts, live: Counts, ended: Counts) -> None:
        self._model, self._engine = model, engine
        self._background = {"background_responses": live, "background_responses_ended": ended}
        self._registry = CollectorRegistry()
        self._meters = {name: self._meter(name, meter) for name, meter in METERS.items()}
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # process_resident_memory_bytes, process_open_fds, ...

    def _meter(self, name: str, meter: Meter) -> Counter | Histogram:
        labels = (MODEL, *meter.labels)
        if meter.buckets:
            return Histogram(
                PREFIX + name, meter.what, labels, buckets=meter.buckets, registry=self._registry
            )
        return Counter(PREFIX + name, meter.what, labels, registry=self._registry)

    def add(self, name: str, n: float, *labels: str) -> None:
        counter = self._meters[name]
        assert isinstance(counter, Counter)
        counter.labels(self._model, *labels).inc(n)

    def observe(self, name: str, value: float, *labels: str) -> None:
        histogram = self._meters[name]
        assert isinstance(histogram, Histogram)
        histogram.labels(self._model, *labels).observe(value)

    def run(self) -> Run:
        return Run(self)

    def collect(self) -> Iterable[Metric]:
        """At a scrape: what is held now."""
        counts = self._engine()
        for name, (kind, what, read) in READINGS.items():
            with suppress(KeyError):
                yield self._family(name, kind, what, {(): read(counts)})
        for name, (kind, what) in BACKGROUND.items():
            states = self._background[name]()
            yield self._family(name, kind, what, {(status,): n for status, n in states.items()}, ("status",))

    def _family(
        self,
        name: str,
        kind: Kind,
        help: str,
        values: Mapping[tuple[str, ...], float],
        labels: Sequence[str] = (),
    ) -> Metric:
        family = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
        metric = family(PREFIX + name, help, labels=[MODEL, *labels])
        for values_of_labels, value in values.items():
            metric.add_metric([self._model, *values_of_labels], value)
        return metric

    def render(self) -> bytes:
        return generate_latest(self._registry)
