"""What IntKVAttention means, in float32 torch: the oracle for graphs and kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..attention import attend, causal_mask
from ..dense.reference import Rope, turn
from ..layer import LayerSpec
from .config import IntKVConfig, Side, hadamard

# How far two implementations may disagree: a code's distance from a rounding boundary, in steps, that makes it a tie; a
# row's numbers relative to its largest, by the dtype they are stored in (fp16 rounds either way); a scale, relatively.
TIE = 1e-3
NOISE = {torch.float32: 1e-5, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
LOOSE = 1e-3
STATE = torch.float16  # what engines hold exact rows, scales and zeros in, unless built with --kv-dtype fp32


@dataclass
class Rows:
    """What is stored of keys or values [..., H, n, D]: codes, whole numbers in a float tensor, of the same shape, and
    scales and zeros [..., H, n / tokens, scales], see `plugins.intkv.config.Side`."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def append(self, other: Rows) -> Rows:
        """The rows of both."""
        return Rows(*(torch.cat((getattr(self, n), getattr(other, n)), dim=-2) for n in ("codes", "scales", "zeros")))


@cache
def rotation(dim: int, device: torch.device) -> Tensor:
    """`plugins.intkv.config.hadamard` on a device."""
    return torch.from_numpy(hadamard(dim)).to(device)


@dataclass
class LayerCodec:
    """One layer's means: center [2, H, D] float32, of its keys (in the key space) and its values.

    They are 0 where `config.mean` is false.
    """

    config: IntKVConfig
    center: Tensor

    @staticmethod
    def shapes(config: IntKVConfig, num_kv_heads: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a layer, all float32."""
        return {"center": (2, num_kv_heads, config.head_dim)}

    def tensors(self) -> dict[str, Tensor]:
        return {"center": self.center}

    @classmethod
    def from_tensors(cls, config: IntKVConfig, tensors: dict[str, Tensor]) -> LayerCodec:
        return cls(config, **tensors)

    def to(self, device: torch.device | str) -> LayerCodec:
        return LayerCodec(self.config, self.center.to(device))

    # -- one side, "k" or "v"

    def turned(self, name: str, x: Tensor) -> Tensor:
        """x [..., H, n, D] without its mean, rotated."""
        y = x - self._center(name)
        return y @ rotation(self.config.head_dim, y.device) if self.config.rotation else y

    def quantised(self, name: str, y: Tensor, state_dtype: torch.dtype = torch.float32) -> Rows:
        """y [..., H, n, D] from `turned`; n must be whole blocks where keys share scales along tokens."""
        side = self.config.side(name)
        low, high = shared(side, y).aminmax(dim=_along(side))
        scales = ((high - low) / (2**side.bits - 1)).to(state_dtype).float()
        zeros = low.to(state_dtype).float()
        return Rows(self.steps(name, y, scales, zeros).round(), scales, zeros)

    def steps(self, name: str, y: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """y [..., H, n, D] in steps of its scale from its zero, within the codes' range; 0 where the scale is 0."""
        side = self.config.side(name)
        scales, zeros = (x.unsqueeze(_along(side)) for x in (scales, zeros))
        steps = torch.where(scales > 0, (shared(side, y) - zeros) / scales, 0.0)
        return steps.clamp(0, 2**side.bits - 1).reshape(y.shape)

    def restored(self, name: str, rows: Rows) -> Tensor:
        """The keys or values [..., H, n, D] that stored rows are read as."""
        side = self.config.side(name)
        scales, zeros = (x.unsqueeze(_along(side)) for x in (rows.scales, rows.zeros))
        y = (shared(side, rows.codes) * scales + zeros).reshape(rows.codes.shape)
        if self.config.rotation:
            y = y @ rotation(self.config.head_dim, y.device)  # its own inverse
        return y + self._center(name)

    def _center(self, name: str) -> Tensor:
        return self.center["kv".index(name)][:, None]

    # -- whole sequences

    def approximate(self, k: Tensor, v: Tensor, rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Keys before RoPE and values [B, Hkv, N, D] as the cache gives them back, keys rotated by `rotate`.

        Sinks stay as they are; rows, scales and zeros are rounded to STATE, as engines do, for with few bits a last
        digit decides many codes; a block that is not whole is quantised by itself.
        """
        if self.config.key_space == "pre_rope":
            return rotate(self.rebuild("k", k)), self.rebuild("v", v)
        return self.rebuild("k", rotate(k)), self.rebuild("v", v)

    def rebuild(self, name: str, x: Tensor) -> Tensor:
        """One side of sequences x [B, H, N, D] from position 0, see `approximate`."""
        sinks, tokens = self.config.sinks, self.config.side(name).tokens
        rest = x[:, :, sinks:]
        count = rest.shape[2]
        if missing := -count % tokens:  # more of the last row, which changes no range
            rest = torch.cat((rest, rest[:, :, -1:].expand(-1, -1, missing, -1)), dim=2)
        rows = self.quantised(name, self.turned(name, rest.to(STATE).float()), STATE)
        return torch.cat((x[:, :, :sinks], self.restored(name, rows)[:, :, :count].to(x.dtype)), dim=2)


def shared(side: Side, y: Tensor) -> Tensor:
    """y [..., n, D] with the values that share a scale along one axis, see `_along`."""
    return y.unflatten(-1, (side.scales, -1)) if side.tokens == 1 else y.unflatten(-2, (-1, side.tokens))


def _along(side: Side) -> int:
    """That axis: of [..., n, scales, D / scales], or of [..., n / tokens, tokens, D]."""
    return -1 if side.tokens == 1 else -2


# -- one sequence


class LayerCache:
    """One layer of one sequence: the whole history is kept, and the encoded rows are replaced when they are read."""

    def __init__(
        self, spec: LayerSpec, rope: Rope, codec: LayerCodec, state_dtype: torch.dtype = torch.float32
    ) -> None:
        self.spec, self.rope, self.codec, self.state_dtype = spec, rope, codec, state_dtype
        self.geometry, self.pre_rope = codec.config.geometry(), codec.config.key_space == "pre_rope"
        empty = torch.zeros(1, spec.num_kv_heads, 0, spec.head_dim)
        self.rows = {name: empty.clone() for name in "kv"}  # K in the key space, V; rounded to state_dtype
        self.restored = {name: empty.clone() for name in "kv"}  # what the encoded rows read as; frozen once made
        self.stored = {name: self._encode(name, empty) for name in "kv"}

    def _encode(self, name: str, x: Tensor) -> Rows:
        if x.shape[2] == 0:
            none = x.new_zeros(*x.shape[:2], 0, self.codec.config.side(name).scales)
            return Rows(x, none, none.clone())
        return self.codec.quantised(name, self.codec.turned(name, x), self.state_dtype)

    def step(self, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Rows] | None = None) -> Tensor:
        """Attend over the old state and the new tokens, then store them and encode what leaves the window.

        q [1, Hq, S, D], k and v [1, H, S, D] before RoPE -> [1, Hq, S, D]. `given`, for "k" and "v", replaces the
        stored rows first: what another implementation arrived at.
        """
        past, sinks = self.rows["k"].shape[2], self.geometry.sinks
        count = self.geometry.encoded(past)
        old = {}
        for name in "kv":
            known = self.restored[name].shape[2]
            if count > known:
                fresh = self.codec.restored(name, self._part((given or self.stored)[name], name, known, count))
                self.restored[name] = torch.cat((self.restored[name], fresh), dim=2)
            rows = self.rows[name]
            old[name] = torch.cat((rows[:, :, :sinks], self.restored[name], rows[:, :, sinks + count :]), dim=2)
        key = turn(k, self.rope, past)
        old_key = turn(old["k"], self.rope, 0) if self.pre_rope else old["k"]
        out = attend(
            turn(q, self.rope, past),
            torch.cat((old_key, key), dim=2),
            torch.cat((old["v"], v), dim=2),
            causal_mask(q.shape[2], past + q.shape[2], 0),
            self.spec.scale,
            self.spec.softcap,
        )
        last = self.geometry.encoded(past + q.shape[2])
        for name, new in (("k", k if self.pre_rope else key), ("v", v)):
            self.rows[name] = torch.cat((self.rows[name], new.to(self.state_dtype).float()), dim=2)
            fresh = self._encode(name, self.rows[name][:, :, sinks + count : sinks + last])
            self.stored[name] = self.stored[name].append(fresh)
        return out

    def _part(self, rows: Rows, name: str, first: int, last: int) -> Rows:
        """Code rows first .. last, whole blocks."""
        tokens = self.codec.config.side(name).tokens
        span = slice(first // tokens, last // tokens)
        return Rows(rows.codes[..., first:last, :], rows.scales[..., span, :], rows.zeros[..., span, :])

    def compare(self, given: dict[str, Rows], tie: float = TIE) -> tuple[int, int, int]:
        """Numbers in all, those in which `given` differs from our own, and how many more are flipped ties.

        Counted are codes, scales and zeros. Scales and zeros may differ by what rounding to their dtype leaves. Codes
        are compared with those that our own rows get from the given scales and zeros; one that differs by a step is a
        flipped tie when ours lies within TIE steps of a boundary, or as near as the noise of the row could bring it
        over. tie, a gap of distances, has no meaning here. Raises ValueError when the rows differ in number.
        """
        total = wrong = flips = 0
        for name in "kv":
            own, other, side = self.stored[name], given[name], self.codec.config.side(name)
            for part in ("codes", "scales", "zeros"):
                shapes = [list(getattr(rows, part).shape) for rows in (own, other)]
                if shapes[0] != shapes[1]:
                    raise ValueError(f"{part} of shape {shapes[1]}, expected {shapes[0]}")
                total += getattr(own, part).numel()
            if not own.codes.numel():
                continue
            first = self.geometry.sinks
            x = self.rows[name][:, :, first : first + own.codes.shape[-2]]
            noise = NOISE[self.state_dtype] * x.abs().amax(-1, keepdim=True).expand_as(x)
            noisy = shared(side, noise).amax(_along(side))  # [1, H, n / tokens, scales]
            wrong += int(((own.scales - other.scales).abs() > LOOSE * own.scales + noisy).sum())
            wrong += int(((own.zeros - other.zeros).abs() > LOOSE * own.zeros.abs() + noisy).sum())
            y = self.codec.turned(name, x)
            steps = self.codec.steps(name, y, other.scales, other.zeros)
            scales = shared(side, torch.ones_like(x)) * other.scales.unsqueeze(_along(side))
            margin = TIE + noise / scales.reshape(x.shape).clamp_min(1e-30)
            apart = (steps - other.codes).abs()
            same = apart <= 0.5
            tied = ~same & (apart - 0.5 <= margin)
            wrong += int((~same & ~tied).sum())
            flips += int(tied.sum())
        return total, wrong, flips


def unpacked(carrier: Tensor, bits: int) -> Tensor:
    """Codes [..., D], float32, from an engine's bytes int8 [..., D * bits / 8].

    A word of w bytes (3 with 3 bits, else 1) holds 8 w / bits codes. Byte i of word j is at i * words + j, the lowest
    byte first, and holds its value - 128; code i of word j is code i * words + j, the lowest bits first.
    """
    size = 3 if bits == 3 else 1
    planes = (carrier.int() + 128).unflatten(-1, (size, -1)).unbind(-2)
    word = sum(plane << (8 * n) for n, plane in enumerate(planes))
    return torch.cat([(word >> low) & (2**bits - 1) for low in range(0, 8 * size, bits)], dim=-1).float()


def stored_rows(config: IntKVConfig, state: dict[str, Tensor]) -> dict[str, Rows]:
    """What LayerCache.step takes as `given`, from one sequence's state of an engine: name -> tensor, used rows only."""
    return {
        name: Rows(
            unpacked(state[f"codes_{name}"], config.side(name).bits)[None],
            state[f"scales_{name}"].float()[None],
            state[f"zeros_{name}"].float()[None],
        )
        for name in "kv"
    }
