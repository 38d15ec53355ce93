"""What the service tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

OUTCOMES = ("ok", "invalid", "busy", "memory", "cancelled", "failed")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """One registry per service, so that several live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = {"namespace": "kvpack", "registry": self.registry}
        self.requests = Counter("requests", "Requests that ended, by outcome.", ["outcome"], **own)
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens stored.", **own)
        self.generated_tokens = Counter("generated_tokens", "Tokens generated.", **own)
        self.first_token = Histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", buckets=SECONDS, **own
        )
        self.next_token = Histogram(
            "time_per_output_token_seconds", "Between two tokens of a request.", buckets=SECONDS, **own
        )
        for outcome in OUTCOMES:
            self.requests.labels(outcome)

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """A value that is read when it is asked for."""
        Gauge(name, help, namespace="kvpack", registry=self.registry).set_function(read)
