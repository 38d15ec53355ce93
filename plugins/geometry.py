"""Where each position of a sequence lives in a compressed cache: sinks, recent window, codes.

Every quantity follows from the number of stored tokens alone, so host, graph and reference agree without sharing state.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Geometry:
    """Sizes of the exact part of the cache, in tokens.

    sinks: first tokens, exact for ever. window: most recent tokens guaranteed exact, the current one included.
    block: rows encoded together; the exact tail holds between `window` and `window + block - 1` stored tokens.
    """

    sinks: int = 4
    window: int = 128
    block: int = 32

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 1 or self.block < 1:
            raise ValueError(
                f"sinks={self.sinks}, window={self.window}, block={self.block}: sinks must be >= 0, the others >= 1"
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

    def to_json(self) -> dict[str, int]:
        return asdict(self)
