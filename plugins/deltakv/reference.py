"""What DeltaKVAttention means, in float32 torch: the oracle for graphs and kernels (arXiv 2602.08005, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from ..attention import attend, causal_mask
from ..dense.reference import Rope, turn
from ..layer import LayerSpec
from .config import STEPS, DeltaKVConfig

CHUNK = 1 << 24  # distances formed at once when references are looked for
# By how much two float32 implementations may disagree: a stored scale or unquantised latent, relatively (a rounding to
# the dtype it is stored in included); any latent, against the token's f(x), which is all that is left where x is the
# mean of its references, as the values of a repeated token in a first layer are; a latent in steps of its quantiser.
LOOSE = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 2.0**-7}
NOISE, MARGIN = 1e-5, 1e-3


@dataclass
class LayerCodec:
    """One layer's f and g, float32. X: width of [K | V], h: hidden units.

    center [X]: taken out of x first; it changes no distance and no difference, and leaves float32 more digits.
    compress [X, latent_dim], decompress [latent_dim, X]. gate, up [X, h], down [h, latent_dim]: only with "swiglu".
    """

    config: DeltaKVConfig
    center: Tensor
    compress: Tensor
    decompress: Tensor
    gate: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None

    @staticmethod
    def shapes(config: DeltaKVConfig, num_kv_heads: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a layer, all float32, in the order the op takes them.

        `num_kv_heads` is the model's, which the configuration repeats.
        """
        width, dim, hidden = 2 * num_kv_heads * config.head_dim, config.latent_dim, config.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "center": (width,),
            "compress": (width, dim),
            "decompress": (dim, width),
        }
        if config.compressor == "swiglu":
            shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, dim)}
        return shapes

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.shapes(self.config, self.config.kv_heads)}

    @classmethod
    def from_tensors(cls, config: DeltaKVConfig, tensors: dict[str, Tensor]) -> LayerCodec:
        return cls(config, **tensors)

    def to(self, device: torch.device | str) -> LayerCodec:
        return LayerCodec(self.config, **{name: tensor.to(device) for name, tensor in self.tensors().items()})

    # -- f, g and what is stored

    def f(self, x: Tensor) -> Tensor:
        """x [..., X] -> [..., latent_dim]."""
        x = x - self.center
        z = x @ self.compress
        return z if self.down is None else z + self._units(x) @ self.down

    def residual(self, x: Tensor, mean: Tensor) -> Tensor:
        """f(x) - f(mean), [..., X] each -> [..., latent_dim], with the digits that subtracting first leaves."""
        z = (x - mean) @ self.compress
        if self.down is None:
            return z
        return z + (self._units(x - self.center) - self._units(mean - self.center)) @ self.down

    def _units(self, x: Tensor) -> Tensor:
        return silu(x @ self.gate) * (x @ self.up)

    def g(self, z: Tensor) -> Tensor:
        return z @ self.decompress

    def stored_references(self, x: Tensor, state_dtype: torch.dtype = torch.float32) -> Tensor:
        """References x [..., X] as their storage gives them back."""
        if self.config.reference_bits == 16:
            return x.to(state_dtype).float()
        codes, scale = self.reference_codes(x, state_dtype)
        return codes * scale + self.center

    def reference_codes(self, x: Tensor, state_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """8-bit references x [..., X]: whole numbers from -127 to 127, float [..., X], and their scale [..., 1]."""
        y = x - self.center
        scale = (y.abs().amax(-1, keepdim=True) / 127).to(state_dtype).float()
        return torch.where(scale > 0, y / scale, 0).round().clamp(-127, 127), scale

    def latents(self, x: Tensor, mean: Tensor, state_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """x and the mean of its references [..., X] -> what is stored of their residual, see `quantised`."""
        return self.quantised(self.residual(x, mean), state_dtype)

    def quantised(self, z: Tensor, state_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Latents z [..., latent_dim] -> codes [..., latent_dim] and scales [..., scales].

        Codes are whole numbers from 0 to 2^bits - 1 in a float tensor; with 16 bits the latents themselves, without
        scales.
        """
        if not self.config.scales:
            return z.to(state_dtype).float(), z.new_zeros(*z.shape[:-1], 0)
        ratio, scale = self.scaled(z, state_dtype)
        half = self.spread(z.new_tensor([1 << (bits - 1) for _, bits in self.config.segments]))
        return (ratio.floor() + half).clamp_min(0).minimum(2 * half - 1), scale

    def scaled(self, z: Tensor, state_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """z in steps of its scales [..., latent_dim], and the scales [..., scales] as stored; 0 where z is 0.

        A step is the one best for Gaussian values of the segment's root mean square, or less where no value needs it.
        """
        ratios, scales, first = [], [], 0
        for size, bits in self.config.segments:
            part = z[..., first : first + size]
            largest = part.abs().amax(-1, keepdim=True) / (1 << (bits - 1))
            best = STEPS[bits] * part.square().mean(-1, keepdim=True).sqrt()
            scale = torch.minimum(largest, best).to(state_dtype).float()
            ratios.append(torch.where(scale > 0, part / scale, 0.0))
            scales.append(scale)
            first += size
        return torch.cat(ratios, dim=-1), torch.cat(scales, dim=-1)

    def decoded(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Latents z [..., latent_dim] from what `quantised` returned."""
        if not self.config.scales:
            return codes
        half = self.spread(codes.new_tensor([1 << (bits - 1) for _, bits in self.config.segments]))
        return (codes - half + 0.5) * self.spread(scale)

    def spread(self, x: Tensor) -> Tensor:
        """What the segments have, x [..., scales], for each of their values: [..., latent_dim]."""
        sizes = [size for size, _ in self.config.segments]
        return torch.cat([part.expand(*x.shape[:-1], n) for part, n in zip(x.split(1, -1), sizes, strict=True)], dim=-1)

    # -- whole sequences

    def reference_rows(self, x: Tensor, state_dtype: torch.dtype = torch.float32) -> Tensor:
        """References of sequences x [B, N, X] as stored, sinks first: [B, sinks + ceil((N - sinks) / stride), X]."""
        sinks = self.config.sinks
        first, rest = x[:, :sinks].to(state_dtype).float(), x[:, sinks :: self.config.stride]
        return torch.cat((first, self.stored_references(rest, state_dtype)), dim=1)

    def assign(self, x: Tensor, references: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Nearest references of code rows first, first + 1, ..., x [B, n, X], among `references` (`reference_rows`).

        Reference ordinals int64 [B, n, neighbors], nearest first and the lower one of equals; a reference names itself
        only. gap [B, n]: how far the choice was from a tie, (next - last) / next in squared distance (next counts as at
        least a hundredth of the row's energy: float32 cannot tell smaller ones apart).
        """
        config = self.config
        batch, rows, _ = x.shape
        pool = references - self.center
        energy = pool.square().sum(-1)[:, None]  # [B, 1, R]
        ordinal = torch.arange(pool.shape[1], device=x.device)
        earliest = (ordinal - config.sinks) * config.stride  # code row from which a reference may be named
        index = torch.empty(batch, rows, config.neighbors, dtype=torch.int64, device=x.device)
        gap = x.new_empty(batch, rows)
        step = max(1, CHUNK // max(1, batch * pool.shape[1]))
        for start in range(0, rows, step):
            y = x[:, start : start + step] - self.center
            own = torch.arange(first + start, first + start + y.shape[1], device=x.device)
            distance = energy - 2 * y @ pool.transpose(1, 2)
            distance = distance.masked_fill(earliest > own[:, None], torch.inf)
            found = []
            for _ in range(config.neighbors):
                found.append(distance.argmin(-1, keepdim=True))
                last = distance.gather(-1, found[-1])
                distance = distance.scatter(-1, found[-1], torch.inf)
            mine, span = torch.cat(found, dim=-1), slice(start, start + y.shape[1])
            named = own % config.stride == 0
            index[:, span] = torch.where(named[:, None], (config.sinks + own // config.stride)[:, None], mine)
            size = y.square().sum(-1)
            further = distance.amin(-1) + size
            difference = (further - last[..., 0] - size) / further.maximum(0.01 * size).clamp_min(1e-30)
            gap[:, span] = torch.where(named | further.isinf(), 1.0, difference)
        return index, gap

    def means(self, references: Tensor, index: Tensor) -> Tensor:
        """Mean of the references [B, R, X] that index [B, n, neighbors] names, exact for equal ones: [B, n, X]."""
        first = take(references, index[..., 0])
        total = torch.zeros_like(first)
        for n in range(1, index.shape[-1]):
            total = total + (take(references, index[..., n]) - first)
        return first + total / index.shape[-1]

    def rebuild(self, x: Tensor) -> Tensor:
        """Sequences x [B, N, X] from position 0 as the cache gives them back: sinks and references as they are."""
        references = self.reference_rows(x)
        rows = x[:, self.config.sinks :]
        mean = self.means(references, self.assign(rows, references)[0])
        restored = self.g(self.decoded(*self.latents(rows, mean))) + mean
        return torch.cat((x[:, : self.config.sinks], restored), dim=1)

    def approximate(self, k: Tensor, v: Tensor, rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Keys before RoPE and values [B, Hkv, N, D] as the cache gives them back, keys rotated by `rotate`."""
        k, v = unpack(self.rebuild(pack(k, v)), k.shape[1])
        return rotate(k), v


def take(rows: Tensor, index: Tensor) -> Tensor:
    """rows [B, R, X] at index [B, n]: [B, n, X]."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))


def pack(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values [B, Hkv, N, D] as x [B, N, X]: all keys, then all values."""
    return torch.cat((k.transpose(1, 2).flatten(2), v.transpose(1, 2).flatten(2)), dim=-1)


def unpack(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Inverse of `pack`."""
    k, v = x.unflatten(-1, (2 * heads, -1)).transpose(1, 2).chunk(2, dim=1)
    return k, v


@dataclass
class Rows:
    """What the cache stores of code rows [1, n]: see `LayerCodec.quantised` and `LayerCodec.assign`."""

    codes: Tensor  # [1, n, latent_dim]
    scales: Tensor  # [1, n, scales]
    index: Tensor  # int64 [1, n, neighbors]

    def __getitem__(self, span: slice) -> Rows:
        return Rows(self.codes[:, span], self.scales[:, span], self.index[:, span])

    def append(self, other: Rows) -> Rows:
        return Rows(*(torch.cat((getattr(self, n), getattr(other, n)), dim=1) for n in ("codes", "scales", "index")))


class LayerCache:
    """One layer of one sequence: the whole history is kept, and the encoded rows are replaced when they are read."""

    def __init__(
        self, spec: LayerSpec, rope: Rope, codec: LayerCodec, state_dtype: torch.dtype = torch.float32
    ) -> None:
        self.spec, self.rope, self.codec, self.state_dtype = spec, rope, codec, state_dtype
        self.geometry, config = codec.config.geometry(), codec.config
        self.rows = torch.zeros(1, 0, config.width)  # x as stored
        self.stored = Rows(
            torch.zeros(1, 0, config.latent_dim),
            torch.zeros(1, 0, config.scales),
            torch.zeros(1, 0, config.neighbors, dtype=torch.int64),
        )
        self.gaps = torch.zeros(1, 0)  # of the assignments
        self.margins = torch.zeros(1, 0, config.latent_dim)  # of the latents: steps to the nearest boundary, less noise
        self.noise = torch.zeros(1, 0, 1)  # of the latents
        self.restored = torch.zeros(1, 0, config.width)  # what the encoded rows read as; frozen once made

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, selected: Tensor | None = None, given: Rows | None = None
    ) -> Tensor:
        """Attend over the old state and the new tokens, then store them and encode what leaves the window.

        q [1, Hq, S, D], k and v [1, H, S, D] before RoPE -> [1, Hq, S, D]. selected: code rows to read, int64 [M];
        None: all. `given` replaces the stored rows first: what another implementation arrived at.
        """
        past, sinks, codec = self.rows.shape[1], self.geometry.sinks, self.codec
        count = self.geometry.encoded(past)
        known = self.restored.shape[1]
        if count > known:
            part = (given or self.stored)[known:count]
            references = codec.reference_rows(self.rows[:, : sinks + count], self.state_dtype)
            z = codec.decoded(part.codes, part.scales)
            fresh = codec.g(z) + codec.means(references, part.index)
            self.restored = torch.cat((self.restored, fresh), dim=1)
        old = torch.cat((self.rows[:, :sinks], self.restored, self.rows[:, sinks + count :]), dim=1)
        old_key, old_value = unpack(old, self.spec.num_kv_heads)
        mask = causal_mask(q.shape[2], past + q.shape[2], 0)
        if selected is not None:
            read = torch.zeros(count, dtype=torch.bool)
            read[selected] = True
            mask[:, sinks : sinks + count] &= read
        out = attend(
            turn(q, self.rope, past),
            torch.cat((turn(old_key, self.rope, 0), turn(k, self.rope, past)), dim=2),
            torch.cat((old_value, v), dim=2),
            mask,
            self.spec.scale,
            self.spec.softcap,
        )
        self.rows = torch.cat((self.rows, pack(k, v).to(self.state_dtype).float()), dim=1)
        last = self.geometry.encoded(self.rows.shape[1])
        if last > count:
            self._encode(count, last)
        return out

    def _encode(self, first: int, last: int) -> None:
        codec, sinks = self.codec, self.geometry.sinks
        x = self.rows[:, sinks + first : sinks + last]
        references = codec.reference_rows(self.rows[:, : sinks + last], self.state_dtype)
        index, gap = codec.assign(x, references, first)
        mean = codec.means(references, index)
        z = codec.residual(x, mean)
        codes, scales = codec.quantised(z, self.state_dtype)
        noise = NOISE * (x @ codec.compress).square().mean(-1, keepdim=True).sqrt()
        margin = torch.full_like(codes, torch.inf)
        if codec.config.scales:
            ratio = codec.scaled(z, self.state_dtype)[0]
            steps = codec.spread(noise / scales)
            exact = (x == mean).all(-1) & (torch.arange(first, last) % codec.config.stride == 0)
            margin = torch.where(exact[..., None], torch.inf, (ratio - ratio.round()).abs() - steps)
        self.noise = torch.cat((self.noise, noise), dim=1)
        self.stored = self.stored.append(Rows(codes, scales, index))
        self.gaps = torch.cat((self.gaps, gap), dim=1)
        self.margins = torch.cat((self.margins, margin), dim=1)

    def compare(self, given: Rows, tie: float) -> tuple[int, int, int]:
        """Numbers in all, those in which `given` differs from our own, and how many more are flipped ties.

        Counted are a row's index as one number, its scales and its latents. An index differs when it names other
        references, and is a flipped tie when the choice was closer than `tie`; the rest of such a row is not
        compared. A latent is a flipped tie where noise, or MARGIN steps, could bring it over a boundary, or its scale
        was rounded the other way. Raises ValueError when the rows differ in number.
        """
        own, loose = self.stored, LOOSE[self.state_dtype]
        for name in ("codes", "scales", "index"):
            shapes = [list(getattr(rows, name).shape) for rows in (own, given)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"{name} of shape {shapes[1]}, expected {shapes[0]}")
        other = (own.index.sort(-1).values != given.index.sort(-1).values).any(-1)  # [1, n]
        tied = self.gaps < tie
        same = ~other[..., None]
        flips = int((other & tied).sum())
        wrong = int((other & ~tied).sum())
        wrong += int((same & ((own.scales - given.scales).abs() > loose * own.scales + self.noise)).sum())
        if self.codec.config.scales:
            rounded = self.codec.spread((own.scales != given.scales).float()).bool()  # the scale, the other way
            differs, near = own.codes != given.codes, (self.margins < MARGIN) | rounded
            wrong += int((same & differs & ~near).sum())
            flips += int((same & differs & near).sum())
        else:
            size = own.codes.square().mean(-1, keepdim=True).sqrt() + own.codes.abs()
            wrong += int((same & ((own.codes - given.codes).abs() > loose * size + self.noise)).sum())
        return own.codes.numel() + own.scales.numel() + other.numel(), wrong, flips


def stored_rows(config: DeltaKVConfig, state: dict[str, Tensor]) -> Rows:
    """What LayerCache.step takes as `given`, from one sequence's state of an engine: name -> tensor, used rows only."""
    latents, index = state["latents"], state["index"]
    index = (index.contiguous().view(torch.int16) if index.dtype == torch.int8 else index).long()  # two bytes each
    if not config.scales:
        return Rows(latents.float(), torch.zeros(1, latents.shape[1], 0), index)
    codes, first = [], 0
    for size, bits in config.segments:
        value = latents[..., first : first + size * bits // 8].int() + 128
        codes += [(value >> low) & ((1 << bits) - 1) for low in range(0, 8, bits)]
        first += size * bits // 8
    return Rows(torch.cat(codes, dim=-1).float(), state["scales"].float(), index)
