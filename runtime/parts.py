"""A step of more tokens than a backend takes at once, as several: which tokens and which logits each of them has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Part:
    """Columns `start` to `stop` of a step.

    tokens: int64 [B, S]. new: int32 [B], how many of them each sequence has. picks: int64 [B, P], of these columns.
    """

    start: int
    stop: int
    tokens: np.ndarray
    new: np.ndarray
    picks: np.ndarray


def split(tokens: np.ndarray, new: np.ndarray, picks: np.ndarray, most: tuple[int, int] | None) -> list[Part]:
    """The parts of a step that appends new[b] of tokens[b] and wants the logits at picks[b].

    most: tokens and logits per sequence that one part may have; None: any number. A last token is not left to a part of
    its own, for a step of one token is a decode step, which may read a selection only: it gets a padded one beside.
    """
    width = tokens.shape[1]
    if most is None or (width <= most[0] and picks.shape[1] <= most[1]):
        return [Part(0, width, tokens, new, picks)]
    wanted = [np.unique(row) for row in picks]
    largest = max(len(row) for row in wanted)
    step = min(most[0], width) if largest <= most[1] else min(most)  # no part has more picks than tokens
    parts = []
    for start in range(0, width, step):
        columns = tokens[:, start : start + step]
        if columns.shape[1] == 1 < min(step, width):
            columns = np.pad(columns, ((0, 0), (0, 1)))
        inside = [row[(row >= start) & (row < start + step)] - start for row in wanted]
        own = np.zeros((len(inside), max(1, *map(len, inside))), np.int64)
        for row, found in zip(own, inside, strict=True):
            row[: len(found)] = found
        parts.append(Part(start, start + step, columns, np.clip(new - start, 0, step).astype(np.int32), own))
    return parts


def joined(parts: Sequence[Part], logits: Sequence[np.ndarray], picks: np.ndarray) -> np.ndarray:
    """The logits at `picks`, float32 [B, P, V], from those of the parts."""
    if len(parts) == 1 and parts[0].picks is picks:
        return logits[0]
    result = np.empty((*picks.shape, logits[0].shape[-1]), np.float32)
    for part, found in zip(parts, logits, strict=True):
        inside = (picks >= part.start) & (picks < part.stop)  # [B, P]
        for b, mask in enumerate(inside):
            result[b, mask] = found[b, np.unique(picks[b, mask], return_inverse=True)[1]]
    return result
