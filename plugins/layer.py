"""What is fixed about one layer's attention, whatever the cache behind it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerSpec:
    """Sizes and scalars of one attention layer.

    scale multiplies q.k; softcap bounds the logits (0: none); window is the sliding window in tokens (0: none);
    rope is the index of the layer's cos/sin tables and rotary_dim the dimensions they turn (None and 0: no RoPE).
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    window: int = 0
    rope: int | None = None
    rotary_dim: int = 0

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def attributes(self) -> dict[str, int | float]:
        """The attributes every attention node carries."""
        return {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "scale": self.scale,
            "softcap": self.softcap,
            "sliding_window": self.window,
            "rotary_dim": self.rotary_dim,
        }
