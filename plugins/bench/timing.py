"""Timing on a GPU: replays of CUDA graphs whose calls rotate over more data than any cache of the GPU holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

ROTATED = 400_000_000  # bytes read before the same byte is read again
SHORTEST = 8  # calls of a graph at least, so that its launch does not count
WARMUP = 3
COPIED = 1 << 30  # bytes of the copy that tells the memory's speed

Call = Callable[[], object]


def copies(read: int, held: int, share: float = 0.6) -> int:
    """How many instances to rotate over: enough to read ROTATED bytes, as far as `share` of the free memory allows.

    read, held: bytes that one instance reads per call, and that it takes.
    """
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(-(-ROTATED // max(read, 1)), int(free * share) // max(held, 1)))


def replayed(calls: Sequence[Call], repeats: int) -> float:
    """Microseconds of one call: the median over `repeats` replays of a graph in which each of `calls` has its turns."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    turns = -(-SHORTEST // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for call in calls:
                call()
    return _timed(graph.replay, repeats) / (turns * len(calls))


def called(call: Call, repeats: int) -> float:
    """Microseconds of one call that is too long for its launches to count: the median over `repeats`."""
    return _timed(call, repeats)


def copy_bandwidth(repeats: int) -> float:
    """Bytes per second, those read and those written, of copying COPIED bytes from one place in memory to another.

    By a kernel: a copy in a graph is left to the GPU's copy engine, which is slower than the memory.
    """
    source = torch.zeros(COPIED // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED / (replayed([lambda: torch.neg(source, out=target)], repeats) * 1e-6)


def _timed(call: Call, repeats: int) -> float:
    for _ in range(WARMUP):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times)
