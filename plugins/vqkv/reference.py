"""What VQKVAttention means, in float32 torch: the oracle for graphs and kernels (arXiv 2603.16435, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..attention import attend, causal_mask
from ..dense.reference import Rope, turn
from ..layer import LayerSpec
from .config import VQKVConfig
from .layout import permutation

PARTS = ("books", "encode", "decode", "mean")
CHUNK = 1 << 26  # distances formed at once when encoding


@dataclass
class Quantiser:
    """One side (keys or values) of one layer, float32. T is the number of KV heads, or 1 where they share tables.

    books [T, L, entries, d]; encode, decode [T, D, D]; mean [Hkv, D]; stages: groups coded per stage, L in all.
    """

    books: Tensor
    encode: Tensor
    decode: Tensor
    mean: Tensor
    stages: tuple[int, ...]

    def rebuild(self, x: Tensor) -> Tensor:
        """x [..., Hkv, n, D] coded and decoded."""
        return self.from_codes(self.codes(x))

    def codes(self, x: Tensor) -> Tensor:
        """Codewords nearest to the residual, stage by stage: [..., Hkv, n, D] -> int64 [..., Hkv, n, L]."""
        y = (x - self.mean[:, None]) @ self.encode
        lead = y.shape[:-1]
        residual = y.reshape(-1, *y.shape[-3:]).unflatten(-1, (-1, self.books.shape[-1])).permute(1, 3, 0, 2, 4)
        heads, groups, batch, rows, dim = residual.shape  # [Hkv, G, batch, n, d]
        residual = residual.flatten(2, 3).contiguous()
        books = self.books.expand(heads, -1, -1, -1)
        found, first = [], 0
        for width in self.stages:
            book = books[:, first : first + width].flatten(0, 1)
            code = nearest(residual[:, :width].flatten(0, 1), book)
            chosen = torch.take_along_dim(book, code[..., None], dim=1).view(heads, width, -1, dim)
            residual[:, :width] -= chosen
            found.append(code.view(heads, width, batch, rows))
            first += width
        return torch.cat(found, dim=1).permute(2, 0, 3, 1).reshape(*lead, -1)

    def from_codes(self, codes: Tensor) -> Tensor:
        """The vectors that codes [..., Hkv, n, L] stand for: [..., Hkv, n, D]."""
        heads, rows, lookups = codes.shape[-3:]
        size, dim = self.books.shape[-1], self.mean.shape[-1]
        index = codes.reshape(-1, heads, rows, lookups).permute(1, 3, 0, 2).reshape(heads, lookups, -1)
        books = self.books.expand(heads, -1, -1, -1)
        y = books.new_zeros(heads, index.shape[-1], dim // size, size)
        first = 0
        for width in self.stages:
            span = slice(first, first + width)
            y[:, :, :width] += torch.take_along_dim(books[:, span], index[:, span, :, None], dim=2).transpose(1, 2)
            first += width
        y = y.view(heads, -1, rows, dim).transpose(0, 1)  # [batch, Hkv, n, D]
        return (y @ self.decode + self.mean[:, None]).reshape(*codes.shape[:-1], dim)

    def codes_and_gaps(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [Hkv, n, D] -> codes int64 [Hkv, n, L], and how far each was from a tie: (second - best) / second.

        Distances are squared; the plain way, one group at a time. A second distance below a hundredth of the group's
        energy counts as that much: float32 cannot tell smaller ones apart.
        """
        residual = ((x - self.mean[:, None]) @ self.encode).unflatten(-1, (-1, self.books.shape[-1])).clone()
        floor = 0.01 * residual.square().sum(-1).clamp_min(1e-30)  # [Hkv, n, G]
        books = self.books.expand(len(x), -1, -1, -1)
        codes, gaps = [], []
        for width in self.stages:
            for group in range(width):
                book = books[:, len(codes)]  # [Hkv, entries, d]
                distance = (residual[:, :, group, None] - book[:, None]).square().sum(-1)
                near = distance.topk(2, dim=-1, largest=False).values
                code = distance.argmin(-1)
                residual[:, :, group] -= torch.take_along_dim(book, code[..., None], dim=1)
                codes.append(code)
                gaps.append((near[..., 1] - near[..., 0]) / near[..., 1].maximum(floor[:, :, group]))
        return torch.stack(codes, -1), torch.stack(gaps, -1)

    def to(self, device: torch.device | str) -> Quantiser:
        return Quantiser(*(getattr(self, part).to(device) for part in PARTS), stages=self.stages)


def nearest(y: Tensor, books: Tensor) -> Tensor:
    """Index of the nearest codeword, the lowest on a tie: y [B, n, d], books [B, entries, d] -> int64 [B, n]."""
    half = -0.5 * books.square().sum(-1)[:, None]  # [B, 1, entries]
    turned = books.transpose(1, 2).contiguous()
    code = torch.empty(y.shape[:2], dtype=torch.int64, device=y.device)
    if y.is_cuda:
        step = max(1, CHUNK // (len(y) * books.shape[1]))
        for first in range(0, y.shape[1], step):
            span = slice(first, first + step)
            code[:, span] = torch.baddbmm(half, y[:, span], turned).max(dim=-1).indices
        return code
    step = max(1, (1 << 19) // books.shape[1])  # scores of a tile stay in the cache
    for table in range(len(y)):
        for first in range(0, y.shape[1], step):
            span = slice(first, first + step)
            code[table, span] = torch.addmm(half[table], y[table, span], turned[table]).max(dim=-1).indices
    return code


def byte_values(books: Tensor) -> Tensor:
    """Each value of `books` as the nearest one that a byte b can stand for as the half of the bits 257 b."""
    bits = (torch.arange(256, dtype=torch.int32, device=books.device) * 257).to(torch.int16)
    grid = bits.view(torch.float16).float()
    grid = grid[grid.isfinite()].unique()  # sorted
    above = torch.searchsorted(grid, books.contiguous()).clamp(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    return torch.where(books - low <= high - books, low, high)


@dataclass
class LayerCodec:
    """One layer's tables: a quantiser for keys and one for values."""

    config: VQKVConfig
    k: Quantiser
    v: Quantiser

    @staticmethod
    def shapes(config: VQKVConfig, num_kv_heads: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a layer, all float32, in the order the op takes them."""
        tables, dim = num_kv_heads if config.tables == "head" else 1, config.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        for side, groups, entries in (
            ("k", config.k_groups, config.k_entries),
            ("v", config.v_groups, config.v_entries),
        ):
            shapes |= {
                f"{side}.books": (tables, config.lookups(side), entries, dim // groups),
                f"{side}.encode": (tables, dim, dim),
                f"{side}.decode": (tables, dim, dim),
                f"{side}.mean": (num_kv_heads, dim),
            }
        return shapes

    def tensors(self) -> dict[str, Tensor]:
        return {f"{side}.{part}": getattr(getattr(self, side), part) for side in ("k", "v") for part in PARTS}

    @classmethod
    def from_tensors(cls, config: VQKVConfig, tensors: dict[str, Tensor]) -> LayerCodec:
        sides = [
            Quantiser(*(tensors[f"{side}.{part}"] for part in PARTS), stages=stages)
            for side, stages in (("k", config.k_stages), ("v", config.v_stages))
        ]
        return cls(config, *sides)

    def to(self, device: torch.device | str) -> LayerCodec:
        return LayerCodec(self.config, self.k.to(device), self.v.to(device))

    def approximate(self, k: Tensor, v: Tensor, rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Keys before RoPE and values [B, Hkv, N, D] as the cache gives them back, keys rotated by `rotate`."""
        if self.config.key_space == "pre_rope":
            return rotate(self.k.rebuild(k)), self.v.rebuild(v)
        return self.k.rebuild(rotate(k)), self.v.rebuild(v)


class LayerCache:
    """One layer of one sequence: the whole history is kept, and the encoded rows are replaced when they are read."""

    def __init__(
        self, spec: LayerSpec, rope: Rope, codec: LayerCodec, state_dtype: torch.dtype = torch.float32
    ) -> None:
        self.spec, self.rope, self.geometry = spec, rope, codec.config.geometry()
        self.pre_rope = codec.config.key_space == "pre_rope"
        self.quantisers, self.state_dtype = (codec.k, codec.v), state_dtype
        empty = torch.zeros(1, spec.num_kv_heads, 0, spec.head_dim)
        self.rows = [empty, empty.clone()]  # K in the codec's key space, V; rounded to state_dtype
        self.coded = [empty, empty.clone()]  # what the encoded rows read as; frozen once made
        self.codes = [torch.zeros(spec.num_kv_heads, 0, sum(q.stages), dtype=torch.int64) for q in self.quantisers]
        self.gaps = [torch.zeros(c.shape) for c in self.codes]

    def step(self, q: Tensor, k: Tensor, v: Tensor, given: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Attend over the old state and the new tokens, then store them and encode what leaves the window.

        q [1, Hq, S, D], k and v [1, H, S, D] before RoPE -> [1, Hq, S, D]. `given`, codes int64 [H, n, L] for K and V,
        replace the stored rows sinks .. sinks + n first: the codes another implementation arrived at.
        """
        past, sinks = self.rows[0].shape[2], self.geometry.sinks
        stored = self.geometry.encoded(past)
        old = []
        for side in range(2):
            known = self.coded[side].shape[2]
            if stored > known:
                chosen = (given or self.codes)[side][:, known:stored]
                rebuilt = self.quantisers[side].from_codes(chosen)[None]
                self.coded[side] = torch.cat((self.coded[side], rebuilt), dim=2)
            rows = self.rows[side]
            old.append(torch.cat((rows[:, :, :sinks], self.coded[side], rows[:, :, sinks + stored :]), dim=2))
        key = turn(k, self.rope, past)
        old_key = turn(old[0], self.rope, 0) if self.pre_rope else old[0]
        out = attend(
            turn(q, self.rope, past),
            torch.cat((old_key, key), dim=2),
            torch.cat((old[1], v), dim=2),
            causal_mask(q.shape[2], past + q.shape[2], 0),
            self.spec.scale,
            self.spec.softcap,
        )
        for side, new in enumerate((k if self.pre_rope else key, v)):
            self.rows[side] = torch.cat((self.rows[side], new.to(self.state_dtype).float()), dim=2)
            last = sinks + self.geometry.encoded(past + q.shape[2])
            fresh, gap = self.quantisers[side].codes_and_gaps(self.rows[side][0, :, sinks + stored : last])
            self.codes[side] = torch.cat((self.codes[side], fresh), dim=1)
            self.gaps[side] = torch.cat((self.gaps[side], gap), dim=1)
        return out

    def compare(self, given: tuple[Tensor, Tensor], tie: float) -> tuple[int, int, int]:
        """Codes in all, codes in which `given` differs from our own, and how many of those are flipped ties.

        A vector's codes after its first flipped tie are not compared. Raises ValueError when the rows differ in number.
        """
        total = wrong = flips = 0
        for own, gap, other in zip(self.codes, self.gaps, given, strict=True):
            if own.shape != other.shape:
                raise ValueError(f"codes of shape {list(other.shape)}, expected {list(own.shape)}")
            differs, tied = own != other, gap < tie
            wrong += int((differs & ~((differs & tied).cumsum(-1) > 0)).sum())
            flips += int((differs & tied).sum())
            total += own.numel()
        return total, wrong, flips


def stored_rows(config: VQKVConfig, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What LayerCache.step takes as `given`, from one sequence's state of an engine: name -> tensor, used rows only."""
    found = []
    for side, entries in (("k", config.k_entries), ("v", config.v_entries)):
        codes, lookups = state[f"codes_{side}"].long() + entries // 2, config.lookups(side)
        if config.layout == "tiles":
            codes = codes[..., np.argsort(permutation(side, lookups))].reshape(len(codes), -1, lookups)
        found.append(codes)
    return tuple(found)
