"""Metrics: what the server counts, in the form that Prometheus reads.

    requests, runs --seen by middleware.py and api.py--> COUNTERS, HISTOGRAMS --+
                                                                            +--render()--> text of /metrics
    queue, KV cache, background runs --read at a scrape--> READINGS ------------+

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
from functools import cache
from typing import Any, Literal, NamedTuple

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
MODEL = "model_name"  # the label that all metrics have, with one value: vLLM's dashboards choose by it

# From a token of a small model on a fast GPU to a long answer of a large one on a slow CPU.
SECONDS = (.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)  # fmt: skip
TOKENS = tuple(n * 10**digits for digits in range(6) for n in (1, 2, 5))
REASON = ("finished_reason",)
ROUTE = ("handler",)
HTTP = ("handler", "method", "status")

MetricType = Literal["gauge", "counter"]
Labels = tuple[str, ...]
Buckets = tuple[float, ...]
ReadCounts = Callable[[], Mapping[str, int]]


class Reading(NamedTuple):
    """A metric that is read from the worker's counts at a scrape: Prometheus's custom collector."""

    type: MetricType
    help: str
    read: Callable[[Mapping[str, int]], float]  # raises KeyError where the worker has no such count


item = operator.itemgetter


def cache_usage(counts: Mapping[str, int]) -> float:
    return 1 - counts["free_pages"] / max(counts["pages"], 1)


# fmt: off
# Metrics that change when something happens: Prometheus's direct instrumentation.
#  name behind the prefix    labels   help
COUNTERS: dict[str, tuple[Labels, str]] = {
    "prompt_tokens":        ((),      "Tokens of prompts."),
    "generation_tokens":    ((),      "Tokens generated, in aborted runs too."),
    "prefix_cache_queries": ((),      "Tokens of prompts looked for in it."),
    "prefix_cache_hits":    ((),      "Tokens of prompts found in it."),
    "request_success":      (REASON,  "Runs that have ended, and how."),
    "http_requests":        (HTTP,    "Requests answered."),
}

#  name behind the prefix                     labels   buckets   help
HISTOGRAMS: dict[str, tuple[Labels, Buckets, str]] = {
    "time_to_first_token_seconds":           ((),      SECONDS,  "To a run's first piece."),
    "request_time_per_output_token_seconds": ((),      SECONDS,  "Of a run, behind its first piece."),
    "e2e_request_latency_seconds":           ((),      SECONDS,  "To a run's end."),
    "request_prompt_tokens":                 ((),      TOKENS,   "Tokens of a prompt."),
    "request_generation_tokens":             ((),      TOKENS,   "Tokens generated in a run."),
    "http_request_duration_seconds":         (ROUTE,   SECONDS,  "From head to last byte."),
}

#  name behind the prefix                    type       help                        read
READINGS = {
    "num_requests_running":            Reading("gauge",   "Sequences with a place.",  item("running")),
    "num_requests_waiting":            Reading("gauge",   "Those that wait for one.", item("waiting")),
    "kv_cache_usage_perc":             Reading("gauge",   "Share of the KV cache.",   cache_usage),
    "num_preemptions":                 Reading("counter", "Those put back to wait.",  item("preemptions")),
    "spec_decode_num_draft_tokens":    Reading("counter", "Tokens guessed.",          item("drafted")),
    "spec_decode_num_accepted_tokens": Reading("counter", "Tokens guessed right.",    item("accepted")),
    "engine_steps":                    Reading("counter", "Forward passes.",          item("steps")),
    "upstreams_down":                  Reading("gauge",   "Upstreams not asked now.", item("upstreams_down")),
    "relayed_requests_done":           Reading("counter", "Upstreams have answered.", item("relayed_done")),
    "relayed_requests_failed":         Reading("counter", "They have not.",           item("relayed_error")),
    "relayed_requests_left":           Reading("counter", "The client has left.", item("relayed_disconnect")),
    "relayed_tokens":                  Reading("counter", "Weighed as they cost.",   item("relayed_total")),
    "relayed_cost":                    Reading("counter", "In units of the price.",   item("relayed_cost")),
}

#  name behind the prefix            type       help; the label `status` has the value of each
BACKGROUND: dict[str, tuple[MetricType, str]] = {
    "background_responses":           ("gauge",   "Background responses that have not ended."),
    "background_responses_ended":     ("counter", "Background responses that have ended, since the start."),
}

#  Finish.reason      vLLM's finished_reason
REASONS = {
    "stop":           "stop",
    "length":         "length",
    "failed":         "error",
    "cancelled":      "abort",
    "content_filter": "content_filter",
}
# fmt: on

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which nobody asks for


class Run:
    """Times one run of a worker, one choice of one request."""

    def __init__(self, metrics: "Metrics") -> None:
        self._metrics = metrics
        self._started_at = time.perf_counter()
        self._first_output_at: float | None = None

    def piece(self) -> None:
        """A piece of output came."""
        if self._first_output_at is None:
            self._first_output_at = time.perf_counter()
            seconds = self._first_output_at - self._started_at
            self._metrics.observe("time_to_first_token_seconds", seconds)

    def end(self, reason: str, n_prompt: int, n_cached: int, n_generated: int) -> None:
        """The run has ended; a count that is not known is 0."""
        ended_at = time.perf_counter()
        metrics = self._metrics
        metrics.add("request_success", 1, REASONS[reason])
        metrics.add("prompt_tokens", n_prompt)
        metrics.add("generation_tokens", n_generated)
        metrics.add("prefix_cache_queries", n_prompt)
        metrics.add("prefix_cache_hits", n_cached)
        metrics.observe("request_prompt_tokens", n_prompt)
        metrics.observe("request_generation_tokens", n_generated)
        metrics.observe("e2e_request_latency_seconds", ended_at - self._started_at)
        if self._first_output_at is not None and n_generated > 1:
            seconds = (ended_at - self._first_output_at) / (n_generated - 1)
            metrics.observe("request_time_per_output_token_seconds", seconds)


class Metrics(Collector):
    """All metrics of a server. `worker` reads the counts of its workers; `live` and `ended` read how many
    background responses there are, by status.
    """

    def __init__(self, model: str, worker: ReadCounts, live: ReadCounts, ended: ReadCounts) -> None:
        self._model = model
        self._worker = worker
        self._background = {"background_responses": live, "background_responses_ended": ended}
        self._registry = CollectorRegistry()
        self._counters = {
            name: Counter(PREFIX + name, help_, (MODEL, *labels), registry=self._registry)
            for name, (labels, help_) in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(PREFIX + name, help_, (MODEL, *labels), buckets=buckets, registry=self._registry)
            for name, (labels, buckets, help_) in HISTOGRAMS.items()
        }
        self._counter = cache(self._find_counter)  # labels have few values: rule 3
        self._histogram = cache(self._find_histogram)
        self._registry.register(self)  # its readings: collect()
        ProcessCollector(registry=self._registry)  # process_resident_memory_bytes, process_open_fds, ...

    def add(self, name: str, n: float, *labels: str) -> None:
        self._counter(name, *labels).inc(n)

    def observe(self, name: str, value: float, *labels: str) -> None:
        self._histogram(name, *labels).observe(value)

    def _find_counter(self, name: str, *labels: str) -> Counter:
        return self._counters[name].labels(self._model, *labels)

    def _find_histogram(self, name: str, *labels: str) -> Histogram:
        return self._histograms[name].labels(self._model, *labels)

    def run(self) -> Run:
        return Run(self)

    def collect(self) -> Iterable[Metric]:
        """The readings, at a scrape."""
        counts = self._worker()
        for name, reading in READINGS.items():
            with suppress(KeyError):
                yield self._family(name, reading.type, reading.help, {(): reading.read(counts)})
        for name, (type_, help_) in BACKGROUND.items():
            n_by_status = self._background[name]()
            values = {(status,): n for status, n in n_by_status.items()}
            yield self._family(name, type_, help_, values, ("status",))

    def _family(
        self,
        name: str,
        type_: MetricType,
        help_: str,
        values: Mapping[Any, float],
        labels: Sequence[str] = (),
    ) -> Metric:
        """A metric with its values, by the values of its labels."""
        family = GaugeMetricFamily if type_ == "gauge" else CounterMetricFamily
        metric = family(PREFIX + name, help_, labels=[MODEL, *labels])
        for label_values, value in values.items():
            metric.add_metric([self._model, *label_values], value)
        return metric

    def render(self) -> bytes:
        return generate_latest(self._registry)
