"""Measurements of engines: speed, the longest context that fits, and whether time and memory stay as promised."""

from runtime.bench.cache import capacity, sessions
from runtime.bench.latency import latency
from runtime.bench.memory import resident_bytes
from runtime.bench.oom import oom_length

__all__ = ["capacity", "latency", "oom_length", "resident_bytes", "sessions"]
