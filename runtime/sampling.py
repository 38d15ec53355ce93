"""From logits to a token: greedy, or temperature with top-k and nucleus (top-p) sampling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plugins.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    max_tokens: None means up to the engine's limit. temperature: 0 is greedy. top_k: 0 keeps every token.
    top_p: 1 keeps every token. seed: None draws one from the system. stop: strings that end the text and are not
    part of it. stop_tokens: tokens that end it, besides the model's end-of-sequence tokens. ignore_eos: do not end
    at the latter.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        for good, complaint in (
            (self.max_tokens is None or self.max_tokens >= 1, f"max_tokens is {self.max_tokens}: use at least 1"),
            (0 <= self.temperature < float("inf"), f"temperature is {self.temperature}: use 0 (greedy) or more"),
            (self.top_k >= 0, f"top_k is {self.top_k}: use 0 (all tokens) or more"),
            (0 < self.top_p <= 1, f"top_p is {self.top_p}: it must be above 0 and at most 1"),
            (self.seed is None or self.seed >= 0, f"seed is {self.seed}: it must not be negative"),
            (all(self.stop), "a stop string is empty: leave it out"),
        ):
            if not good:
                raise UserError(f"{complaint}.")


class Sampler:
    """Draws the tokens of one sequence. What it draws depends on (seed, index) and the logits, not on the batch."""

    def __init__(self, params: SamplingParams, index: int = 0) -> None:
        self.params = params
        self._rng = np.random.default_rng(None if params.seed is None else [params.seed, index])

    def __call__(self, logits: np.ndarray) -> int:
        """logits: float32 [V]. Ties go to the lower token."""
        if self.params.temperature == 0:
            return int(logits.argmax())
        tokens, weights = candidates(logits, self.params)
        cumulative = np.cumsum(weights)
        draw = self._rng.random() * cumulative[-1]
        return int(tokens[min(int(np.searchsorted(cumulative, draw, side="right")), len(tokens) - 1)])


def candidates(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that may be drawn, most probable first, and their unnormalised weights, float64.

    Temperature comes first, then top-k, then top-p (the smallest set whose probability reaches top_p).
    """
    scaled = logits.astype(np.float64)
    scaled = (scaled - scaled.max()) / params.temperature
    tokens = np.arange(len(scaled))
    if 0 < params.top_k < len(scaled):
        cut = np.partition(scaled, -params.top_k)[-params.top_k]
        above, ties = np.flatnonzero(scaled > cut), np.flatnonzero(scaled == cut)
        tokens = np.sort(np.concatenate([above, ties[: params.top_k - len(above)]]))
    weights = np.exp(scaled[tokens])
    total = weights.sum()
    if params.top_p < 1:
        # Tokens below (1 - top_p) / count of the mass are outside the nucleus even all together: do not sort them.
        kept = weights >= (1 - params.top_p) / len(weights) * total
        tokens, weights = tokens[kept], weights[kept]
    order = np.argsort(-weights, kind="stable")
    tokens, weights = tokens[order], weights[order]
    if params.top_p < 1:
        count = int(np.searchsorted(np.cumsum(weights), params.top_p * total)) + 1
        tokens, weights = tokens[:count], weights[:count]
    return tokens, weights


def logprob(logits: np.ndarray, token: int) -> float:
    """Natural log of the probability of `token` under the model itself (temperature 1, nothing cut)."""
    shifted = logits - logits.max()
    return float(shifted[token] - np.log(np.exp(shifted).sum()))
