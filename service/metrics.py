"""Metrics: the counts of the server, in the form that Prometheus reads.

    requests, runs --seen by middleware.py and jobs.py-> METRICS -----------+
                                                                            +--render()--> text of /metrics
    queue, KV cache, background runs --read at a scrape--> READINGS --------+

Authority: https://prometheus.io/docs/instrumenting/exposition_formats/; for names, units and meanings
https://docs.vllm.ai/en/stable/usage/metrics/

Rules of this file:
1. A metric that vLLM has too has the name that it has there after `vllm:`, with its unit and the label
   `model_name`. The prefix is our own: one Prometheus may scrape a relay and the vLLM that it fronts, and
   would count each token twice.
2. READINGS are asked of their owner at each scrape, never kept in step here.
3. Labels have few values, all ours: a route's template, never a path; nothing that a client has written.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from channels import Accepted, Finish, Usage, WorkerOutput

log = logging.getLogger("runs")

PREFIX = "llmref:"
MODEL = "model_name"  # the label that all metrics have, with one value: vLLM's dashboards choose by it

# From a token of a small model on a fast GPU to a long answer of a large one on a slow CPU: 1 ms to 524 s.
Seconds = partial(Histogram, buckets=[2**i / 1000 for i in range(20)])

# fmt: off
# Metrics that change when something happens: Prometheus's direct instrumentation.
#  name after the prefix                     kind     help, labels
METRICS: dict[str, tuple[Any, ...]] = {
    "prompt_tokens":                         (Counter, "Tokens of prompts."),
    "generation_tokens":                     (Counter, "Tokens generated, in aborted runs too."),
    "prefix_cache_hits":                     (Counter, "Tokens of prompts found in the prefix cache."),
    "request_success":                       (Counter, "Runs that have ended, and how.", "finished_reason"),
    "http_requests":                         (Counter, "Requests answered.", "handler", "method", "status"),
    "time_to_first_token_seconds":           (Seconds, "From a request to a run's first piece."),
    "e2e_request_latency_seconds":           (Seconds, "From a request to a run's end."),
}

Gauge, Total = GaugeMetricFamily, CounterMetricFamily
# Metrics that are read from these counts at a scrape: Prometheus's custom collector. A count that is absent
# is left out.
#  name after the prefix              kind   help                               count, label
READINGS: dict[str, tuple[Any, ...]] = {
    "num_requests_running":            (Gauge, "Sequences that run.",            "running"),
    "num_requests_waiting":            (Gauge, "Sequences that wait to run.",    "waiting"),
    "kv_cache_usage_perc":             (Gauge, "Share of the KV cache in use.",  "used_share"),
    "num_preemptions":                 (Total, "Sequences put back to wait.",    "preemptions"),
    "spec_decode_num_draft_tokens":    (Total, "Tokens guessed.",                "drafted"),
    "spec_decode_num_accepted_tokens": (Total, "Tokens guessed right.",          "accepted"),
    "engine_steps":                    (Total, "Forward passes.",                "steps"),
    "upstreams_down":                  (Gauge, "Upstreams not asked now.",       "upstreams_down"),
    "relayed_requests_done":           (Total, "Requests answered by upstreams.", "relayed_done"),
    "relayed_tokens":                  (Total, "Tokens of answers by upstreams.", "relayed_total"),
    "relayed_cost":                    (Total, "Cost in units of the price.",    "relayed_cost"),
    "background_responses":            (Gauge, "Background responses, not ended.", "live", "status"),
}
# fmt: on
# vLLM's finished_reason, if it is not our Finish.reason.
REASONS = {"failed": "error", "cancelled": "abort"}

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which is never read


@dataclass(eq=False)
class Metrics(Collector):
    """All metrics of a server."""

    model: str
    # The counts of the workers; "live": how many background responses there are, by status.
    read_counts: Callable[[], dict[str, Any]]

    def __post_init__(self) -> None:
        self._registry = CollectorRegistry()
        self._metrics = {
            name: kind(PREFIX + name, about, (MODEL, *labels), registry=self._registry)
            for name, (kind, about, *labels) in METRICS.items()
        }
        # Bounded by rule 3: labels have few values.
        self._child = cache(lambda name, *labels: self._metrics[name].labels(self.model, *labels))
        self._registry.register(self)  # its readings: collect()
        ProcessCollector(registry=self._registry)  # process_resident_memory_bytes, process_open_fds, ...

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add to a counter, or add a value to a histogram."""
        metric = self._child(name, *labels)
        record = metric.inc if isinstance(metric, Counter) else metric.observe
        record(value)

    def render(self) -> bytes:
        """Return the text of /metrics; this keeps the event loop for 5 ms."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield the readings, at a scrape."""
        counts = self.read_counts()
        if "pages" in counts:
            counts["used_share"] = 1 - counts["free_pages"] / counts["pages"]
        for name, (kind, about, count, *labels) in READINGS.items():
            if count in counts:
                family = kind(PREFIX + name, about, labels=[MODEL, *labels])
                by_label = counts[count] if labels else {"": counts[count]}
                for label, value in by_label.items():
                    family.add_metric([self.model, label], value)
                yield family


BROKEN_OFF = Finish("failed")


@dataclass
class Stopwatch:
    """Times one run of a worker, one choice of one request, and counts its tokens."""

    metrics: Metrics
    started_at: float = field(default_factory=time.perf_counter)
    is_accepted: bool = False  # by the worker: a refusal is not timed
    has_begun: bool = False
    finish: Finish = BROKEN_OFF  # until the worker reports another

    def note(self, output: WorkerOutput) -> None:
        """Note an output: the first piece, and how the run ends."""
        if isinstance(output, Accepted):
            self.is_accepted = True
        elif isinstance(output, Finish):
            self.finish = output
        elif not self.has_begun:
            self.has_begun = True
            self.metrics.add("time_to_first_token_seconds", time.perf_counter() - self.started_at)

    def end(self) -> None:
        """Count and log a run that has ended; a count that is not known is 0."""
        add = self.metrics.add
        reason, usage = self.finish.reason, self.finish.usage or Usage(0, 0)
        add("prompt_tokens", usage.input_tokens)
        add("generation_tokens", usage.output_tokens)
        add("prefix_cache_hits", usage.cached_tokens)
        if self.is_accepted:
            add("e2e_request_latency_seconds", time.perf_counter() - self.started_at)
        add("request_success", 1, REASONS.get(reason, reason))
        log.info("%s: %d tokens in, %d out", reason, usage.input_tokens, usage.output_tokens)
