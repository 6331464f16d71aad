"""Every metric, declared once. The only place that knows Prometheus. The loop writes per batch, never per record.

Labels are bounded: models, codes, reasons, topics and partitions; never a request id.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from forebay import __version__
from forebay.records import Partition

_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 4, 8, 16, 32, 64)
_TRANSACTION_SECONDS = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.3, 1, 3, 10, 30)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Latency(Collector):
    """A histogram by model that takes many values at once: observing one by one would cost a microsecond each."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        self.name = name
        self.documentation = documentation
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        registry.register(self)

    def observe(self, model: str, values: Iterable[float]) -> None:
        """Count `values`, in seconds."""
        counts = self._counts.get(model)
        if counts is None:
            counts = self._counts[model] = [0] * (len(_SECONDS) + 1)
            self._sums[model] = 0.0
        total = 0.0
        for value in values:
            counts[bisect_left(_SECONDS, value)] += 1
            total += value
        self._sums[model] += total

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Return the histogram as Prometheus reads it."""
        family = HistogramMetricFamily(self.name, self.documentation, labels=["model"])
        for model, counts in list(self._counts.items()):
            buckets: list[tuple[str, float]] = []
            running = 0
            for bound, found in zip((*_SECONDS, float("inf")), list(counts), strict=True):
                running += found
                buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), running))
            family.add_metric([model], buckets, self._sums[model])
        yield family

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Return the empty family, so that registering collects nothing."""
        return [HistogramMetricFamily(self.name, self.documentation, labels=["model"])]


class Metrics:
    """The metrics of one worker, in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Info("forebay_build", "The version that runs.", registry=registry).info({"version": __version__})

        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(f"forebay_{name}", documentation, labels, registry=registry)

        def gauge(name: str, documentation: str, *labels: str) -> Gauge:
            return Gauge(f"forebay_{name}", documentation, labels, registry=registry)

        self.requests = counter(
            "requests_total", "Requests answered, by outcome: ok or an error code.", "model", "outcome"
        )
        self.rows = counter("rows_total", "Rows that came back from the model.", "model")
        self.request_duration = Latency(
            "forebay_request_duration_seconds", "From reading a request to its acknowledged outcome.", registry
        )
        self.queue_duration = Latency("forebay_queue_seconds", "From reading a request to cutting its batch.", registry)
        self.prepare_duration = Latency(
            "forebay_prepare_seconds", "What prepare() took for a request, in inference.prepare_workers.", registry
        )
        self.batch_size = Histogram(
            "forebay_batch_size", "Rows of a batch.", ["model"], buckets=_ROWS, registry=registry
        )
        self.batch_stage = Histogram(
            "forebay_batch_stage_seconds",
            "Time of a batch by stage: stage (slot to device), forward, encode (results to Kafka).",
            ["model", "stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.transaction_duration = Histogram(
            "forebay_transaction_duration_seconds",
            "exactly_once: a transaction from its begin to its commit, with outcomes, dead letters and offsets.",
            buckets=_TRANSACTION_SECONDS,
            registry=registry,
        )
        self.model_seconds = counter(
            "model_seconds_total", "Seconds that batches took in replicas; what a model's share is counted by.", "model"
        )
        self.oldest_wait = Latency(
            "forebay_batch_oldest_wait_seconds", "How long the oldest request of a batch waited for it.", registry
        )
        self.steps = counter("steps_total", "Steps, of models that run in steps.", "model")
        self.step_rows = counter(
            "step_rows_total", "Rows of all steps; by steps_total it is how many ran together.", "model"
        )
        self.step_seconds = counter("step_seconds_total", "Seconds that steps took.", "model")
        self.restarted_rows = counter(
            "restarted_rows_total",
            "Rows that had to begin again: a step failed that they were in, or had no memory.",
            "model",
        )
        self.running_rows = gauge("running_rows", "Rows that run in steps now, by replica.", "model", "replica")
        self.cuts = counter(
            "batch_cuts_total",
            "Executions by why their batch was cut; split and isolation run parts.",
            "model",
            "reason",
        )
        self.elements = counter(
            "batch_elements_total", "Elements of ragged inputs: real, and padding beside them.", "model", "kind"
        )
        self.service_time = gauge(
            "service_time_seconds",
            "Measured time of an execution, by padded elements per row (bucket), rows and quantile.",
            "model",
            "bucket",
            "rows",
            "quantile",
        )
        self.peak = gauge(
            "batch_peak_bytes", "Most device memory that a batch took in the warm-up.", "model", "bucket", "rows"
        )
        self.difference = gauge(
            "self_check_difference", "Largest relative difference of a row's outputs, alone and in company.", "model"
        )
        self.precision = Info(
            "forebay_model_precision", "What a model computes in, and how it is compiled.", ["model"], registry=registry
        )
        self.deviation = gauge(
            "precision_deviation", "How far a model's golden outputs are from those in fp32, relative.", "model"
        )
        self.recompiles = counter(
            "recompiles_total", "Executions that ran uncompiled, for a shape that the warm-up did not compile.", "model"
        )
        self.out_of_memory = counter(
            "out_of_memory_total", "Executions for which the device had no memory; they ran again in pieces.", "model"
        )
        self.cap = gauge("batch_cap_rows", "Rows that a batch may have now, by bucket.", "model", "bucket")
        self.executions = counter("executions_total", "Forward calls, isolation included.", "model")
        self.isolation = counter(
            "isolation_executions_total", "Forward calls that only separated guilty requests from the others.", "model"
        )
        self.queue_requests = gauge("queue_requests", "Requests that wait for a batch or a preparer.")
        self.queue_bytes = gauge("queue_bytes", "Bytes of records that were read and are not settled.")
        self.in_flight = gauge("in_flight_requests", "Requests that replicas or preparers have.")
        self.preparing = gauge("preparing_requests", "Requests that wait for a preparer or are in one.")
        self.unacknowledged = gauge("unacknowledged_outcomes", "Outcomes sent and not acknowledged.")
        self.lag = gauge("partition_lag_records", "Records behind the end of a partition.", "topic", "partition")
        self.committed = gauge("committed_offset", "The committed offset of a partition.", "topic", "partition")
        self.commits = counter("commits_total", "Commits by result: ok or the error's name.", "result")
        self.dead_letters = counter("dead_letters_total", "Dead letters by error code.", "code")
        self.rebalances = counter("rebalances_total", "Assignment changes: assigned, revoked, lost.", "kind")
        self.assigned = gauge("partitions_assigned", "Partitions assigned to this worker.")
        self.paused = gauge("paused", "1 while partitions are paused because the queue is full.")
        self.replicas_ready = gauge("replicas_ready", "Replicas that can take batches.")
        self.replica_restarts = counter("replica_restarts_total", "Replicas that were replaced.")
        self.canaries = counter(
            "canary_runs_total", "Runs of the canary in idle replicas: ok, wrong or failed.", "model", "result"
        )
        self.replica_gain = gauge(
            "replica_gain",
            "Throughput of a model's replicas together, relative to one, measured at the start.",
            "model",
        )
        self.replica_memory = gauge(
            "replica_memory_bytes",
            "Memory of a replica: resident, staging, allocated, reserved, device_used, device_total, device_process, "
            "and batch_room, which batches may take by prediction.",
            "replica",
            "kind",
        )
        self.preparer_restarts = counter("preparer_restarts_total", "Preparers that were replaced.")
        self.preparer_memory = gauge("preparer_memory_bytes", "Resident memory of a preparer.", "preparer")
        self.recalled = counter(
            "recalled_records_total", "Records read again after a restart or rebalance that were answered already."
        )
        self.duplicates = counter(
            "duplicates_total", "Records without an outcome of their own: their id was answered within the window."
        )
        self.remembered_ids = gauge("remembered_ids", "Request ids that are remembered to find duplicates.")
        self.forgotten_ids = counter("forgotten_ids_total", "Request ids forgotten before their window was over.")
        self.reloads = counter(
            "reloads_total",
            "Reloads of a model: reloaded, failed, refused, abandoned, or invalid_settings.",
            "model",
            "outcome",
        )
        self.version = gauge("model_version", "1 for the version of a model that serves.", "model", "version")
        self.breaker_open = gauge(
            "breaker_open", "1 while a model fails its own example and its requests wait for it.", "model"
        )
        self.breaker_opened = counter("breaker_opened_total", "Times that a model was found broken.", "model")
        self.dropped = counter("dropped_requests_total", "Requests given back unanswered, by why.", "reason")
        self.skipped = counter(
            "skipped_requests_total",
            "Requests passed over that were deleted before they were answered (kafka.offset_out_of_range: skip).",
            "topic",
            "partition",
        )
        self.throttled = counter(
            "throttled_seconds_total",
            "What quotas of the brokers made the worker's consumer or producer wait.",
            "client",
        )
        self.events = counter("client_events_total", "Events of the Kafka client, by its name for them.", "name")

    def declared(self) -> list[tuple[str, str, tuple[str, ...], str]]:
        """Return name, kind, labels and meaning of every metric of ours."""
        return _declared(self)

    def outcomes(self) -> dict[str, int]:
        """Return how many requests were answered by now, by outcome: ok or an error code."""
        counts: dict[str, int] = {}
        for sample in next(iter(self.requests.collect())).samples:
            if sample.name.endswith("_total") and sample.value:
                outcome = sample.labels["outcome"]
                counts[outcome] = counts.get(outcome, 0) + int(sample.value)
        return counts

    def forget(self, partitions: Iterable[Partition]) -> None:
        """Remove the gauges of partitions that belong to somebody else now."""
        for topic, partition in partitions:
            for family in (self.lag, self.committed):
                try:
                    family.remove(topic, str(partition))
                except KeyError:
                    continue


class SupervisorMetrics:
    """The metrics of a supervisor of several workers (`--devices`), in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.running = Gauge("forebay_workers_running", "Workers of `--devices` that run.", registry=registry)
        self.restarts = Counter(
            "forebay_worker_restarts_total", "Workers of `--devices` that were started again.", ["device"],
            registry=registry,
        )  # fmt: skip

    def declared(self) -> list[tuple[str, str, tuple[str, ...], str]]:
        """Return name, kind, labels and meaning of every metric of ours."""
        return _declared(self)


def _declared(holder: object) -> list[tuple[str, str, tuple[str, ...], str]]:
    found: list[tuple[str, str, tuple[str, ...], str]] = []
    for metric in vars(holder).values():
        if isinstance(metric, Latency):
            found.append((metric.name, "histogram", ("model",), metric.documentation))
        elif isinstance(metric, Counter | Gauge | Histogram | Info):
            family = next(iter(metric.describe()))
            name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
            found.append((name, family.type, tuple(metric._labelnames), family.documentation))
    return found
