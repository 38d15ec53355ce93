"""The order of codes inside a tile of 16 code rows, as the GPU kernel that looks scores up in tables reads them.

A warp does a tile at a time, every lane with one wide load a side. Lane l holds the key codes of rows l // 4 and
l // 4 + 8 in the order in which it looks them up: in no step do lanes that go together read the same column of the
table, whatever the codes are. It holds the value codes of groups 8 * (l % 4 // 2) + l // 4 and 16 on, a word for four
rows. The order is also `vqkv_tile_offset` in plugins/native/src/vqkv_table.cuh.
"""

from __future__ import annotations

import numpy as np

TILE = 16


def permutation(side: str, lookups: int) -> np.ndarray:
    """int64 [16 * lookups]: byte i of a stored tile is element permutation[i] of the row-major [16, lookups] tile.

    side: "k" or "v". Numbers of lookups that the kernel has no use for are left in order.
    """
    row, lookup = (x.ravel() for x in np.indices((TILE, lookups)))
    if side == "v":
        offset = _value_offset(row, lookup) if lookups == 32 else None
    else:
        offset = _key_offset(row, lookup, lookups) if lookups in range(32, 65, 8) else None
    return np.arange(TILE * lookups) if offset is None else np.argsort(offset)


def _key_offset(row: np.ndarray, lookup: np.ndarray, lookups: int) -> np.ndarray:
    """Lookups come in blocks of 32, then of 16, then of 8: lane by lane, in a lane the 8 rows of each half together."""
    lane, half, quad = row % 8 * 4 + lookup % 4, row // 8, lookup // 4 % 4
    start = lookup // 32 * 32
    width = lookups - start
    wide = start * TILE + lane * 16 + half * 8 + lookup // 16 % 2 * 4 + (quad ^ row % 4)
    middle = start * TILE + lane * 8 + half * 4 + (quad ^ row % 4)
    start = np.where(width >= 16, start + 16, start)
    narrow = start * TILE + lane * 4 + half * 2 + (quad % 2 ^ row % 2)
    return np.select([width >= 32, (width >= 16) & (lookup < start)], [wide, middle], narrow)


def _value_offset(row: np.ndarray, lookup: np.ndarray) -> np.ndarray:
    part, pair = lookup // 8 % 2, row % 8 // 2
    lane, phase = lookup % 8 * 4 + part * 2 + pair % 2, part ^ pair // 2
    return lane * 16 + (phase * 2 + lookup // 16) * 4 + row // 8 * 2 + row % 2
