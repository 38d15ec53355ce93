"""Where each position of a sequence lives in a compressed cache: sinks, recent window, codes.

Every quantity follows from the number of stored tokens alone, so host, graph and reference agree without sharing state.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

SELECT_STEP = 32  # the room for selected rows is rounded up to this many


@dataclass(frozen=True)
class Geometry:
    """Sizes of the exact part of the cache, in tokens.

    sinks: first tokens, exact for ever. window: most recent tokens guaranteed exact, the current one included.
    block: rows encoded together; the exact tail holds between `window` and `window + block - 1` stored tokens.
    stride: every stride-th code row, the first one included, has a reference row (DeltaKV's reference tokens, or a row
    of what a whole block shares); 0: there are none.
    select_fraction, select_count: code rows that a decode step reads, as a part of those there are or as a number;
    0 and 0: all of them.
    """

    sinks: int = 4
    window: int = 128
    block: int = 32
    stride: int = 0
    select_fraction: float = 0.0
    select_count: int = 0

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 1 or self.block < 1:
            raise ValueError(
                f"sinks={self.sinks}, window={self.window}, block={self.block}: sinks must be >= 0, the others >= 1"
            )
        if self.stride < 0 or not 0 <= self.select_fraction < 1 or self.select_count < 0:
            raise ValueError(
                f"stride={self.stride}, select_fraction={self.select_fraction}, select_count={self.select_count}: "
                "none may be negative and the fraction must be below 1"
            )

    @property
    def ring(self) -> int:
        """Rows of the circular buffer of recent tokens."""
        return self.window + self.block

    @property
    def dense_rows(self) -> int:
        """Rows of the exact state: sinks, then the ring."""
        return self.sinks + self.ring

    def encoded(self, stored: int | np.ndarray) -> int | np.ndarray:
        """Number of code rows once `stored` tokens are in the cache; code row j is position sinks + j."""
        beyond = np.maximum(np.asarray(stored) - self.sinks - self.window, 0)
        rows = beyond // self.block * self.block
        return rows if isinstance(stored, np.ndarray) else int(rows)

    def references(self, stored: int | np.ndarray) -> int | np.ndarray:
        """Number of reference rows once `stored` tokens are in the cache; row r is code row r * stride."""
        return -(-self.encoded(stored) // self.stride) if self.stride else 0 * self.encoded(stored)

    @property
    def selects(self) -> bool:
        """Whether a decode step reads only some of the code rows."""
        return self.select_fraction > 0 or self.select_count > 0

    def selected(self, stored: np.ndarray) -> np.ndarray:
        """Code rows that a decode step over `stored` tokens [B] reads, int32 [B]."""
        rows = self.encoded(stored)
        if self.select_count:
            return np.minimum(rows, self.select_count).astype(np.int32)
        if self.select_fraction:
            # float32 products would round differently on another host
            return np.ceil(np.float64(self.select_fraction) * rows - 1e-9).astype(np.int32)
        return rows.astype(np.int32)

    def selection(self, past: np.ndarray, live: int, single: bool) -> tuple[np.ndarray, np.ndarray]:
        """Code rows that a step reads, int32 [B], and how many its tensors have room for, int32 [].

        past: stored tokens per sequence, int [B], at most `live`. single: the step appends one token; others read all.
        """
        room = self.encoded(live)
        if not single:
            return self.encoded(past).astype(np.int32), np.array(room, np.int32)
        count = self.selected(past)
        width = -(-int(count.max()) // SELECT_STEP) * SELECT_STEP
        return count, np.array(min(width, room), np.int32)

    def slot(self, position: np.ndarray) -> np.ndarray:
        """Row of the exact state that holds `position`."""
        return np.where(position < self.sinks, position, self.sinks + (position - self.sinks) % self.ring)

    def schedule(self, past: np.ndarray, new: np.ndarray, trash: int) -> tuple[np.ndarray, np.ndarray]:
        """Which rows a step encodes.

        past, new: stored and appended tokens per sequence, int [B]. trash: the code row that padding writes to.
        Returns (enc_src, enc_dst), int32 [B, E]: indices into the old exact rows followed by the new tokens, and code
        rows. E is the largest count of the batch: 0 or a multiple of `block`.
        """
        first, last = self.encoded(past), self.encoded(past + new)
        count = int((last - first).max(initial=0))
        row = first[:, None] + np.arange(count)[None, :]  # [B, E]
        position = row + self.sinks
        source = np.where(position < past[:, None], self.slot(position), self.dense_rows + position - past[:, None])
        real = row < last[:, None]
        return (
            np.where(real, source, 0).astype(np.int32),
            np.where(real, row, trash).astype(np.int32),
        )

    def to_json(self) -> dict[str, int | float]:
        return asdict(self)
