"""The public definition of VQKV: what is coded, by how many codewords, and how much of the cache remains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import log2
from typing import Any, ClassVar

from plugins.config import RATIO_SLACK, MethodConfig
from plugins.contract import TILE_ROWS
from plugins.errors import UserError
from plugins.geometry import Geometry
from plugins.layer import LayerSpec

BYTE_ENTRIES = 256  # the largest codebook whose codes fit the engine's bytes


@dataclass(frozen=True)
class VQKVConfig(MethodConfig):
    """Vector-quantised KV cache (VQKV, arXiv:2603.16435, with the groups of product quantisation added).

    One vector is the key or value [head_dim] of one KV head of one token. It is centred, multiplied by a matrix
    [head_dim, head_dim], cut into `groups` parts of d = head_dim / groups values, and coded in residual
    stages: stage r codes the first `stages[r]` groups, each by the nearest of `entries` codewords [d]. A vector
    thus takes sum(stages) codes ("lookups"); the tables of a layer are [Hkv or 1, sum(stages), entries, d].

    head_dim: D, values per vector.
    k_groups, v_groups: parts of a vector; 1 is the paper's residual quantiser, D / 4 decodes fastest.
    k_stages, v_stages: groups coded by each stage, non-increasing. In text "16+12"; "56x1" is 56 stages of 1.
    k_entries, v_entries: codewords per table; at most 256 fit the byte codes that export writes.
    key_space: "pre_rope" codes keys before the rotary embedding, "post_rope" after it (as the paper does).
    tables: "head" fits one set per KV head, "layer" shares one between a layer's heads (as the paper does).
    mean: subtract the mean [Hkv, D] first; Qwen2.5's key bias makes this essential.
    rotation: principal axes, dealt to the groups so that each has the same log-variance.
    query_weighting: measure key errors by the queries' second moment [D, D] (by the scores they change).
    value_weighting: measure value errors by o_proj's metric [D, D] (by the hidden states they change).
    projection: codebooks are a Gaussian base times a least-squares matrix (RSimVQ), then refined.
    layout: "plain" stores a token's codes in a row. "tiles" is for the GPU kernel that looks scores up in a table per
        query: codes of 16 tokens in its own order (`plugins.vqkv.layout`), and value codewords of one byte a value. It
        takes keys after RoPE, groups of 4 values, and one stage of them for values.
    full_layers: layers that keep an uncompressed cache.
    sinks, window, block: the exact part of the cache, in tokens; see `plugins.geometry.Geometry`.

    Raises UserError when a field is out of range.
    """

    METHOD: ClassVar[str] = "vqkv"

    head_dim: int
    k_groups: int
    v_groups: int
    k_stages: tuple[int, ...]
    v_stages: tuple[int, ...]
    k_entries: int = 256
    v_entries: int = 256
    key_space: str = "pre_rope"
    tables: str = "head"
    mean: bool = True
    rotation: bool = True
    query_weighting: bool = True
    value_weighting: bool = True
    projection: bool = False
    layout: str = "plain"
    full_layers: tuple[int, ...] = ()
    sinks: int = 4
    window: int = 128
    block: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim < 1:
            raise UserError(f"head_dim={self.head_dim} must be positive")
        for side in ("k", "v"):
            self._check_side(side)
        if self.key_space not in ("pre_rope", "post_rope"):
            raise UserError(f"key_space={self.key_space} must be pre_rope or post_rope")
        if self.tables not in ("head", "layer"):
            raise UserError(f"tables={self.tables} must be head or layer")
        if self.layout not in ("plain", "tiles"):
            raise UserError(f"layout={self.layout} must be plain or tiles")
        if self.layout == "tiles":
            self._check_tiles()

    def _check_side(self, side: str) -> None:
        groups, stages, entries = (getattr(self, f"{side}_{n}") for n in ("groups", "stages", "entries"))
        if groups < 1 or self.head_dim % groups:
            raise UserError(f"{side}_groups={groups} must divide head_dim={self.head_dim}")
        descending = list(stages) == sorted(stages, reverse=True)
        if not stages or stages[-1] < 1 or stages[0] > groups or not descending:
            raise UserError(
                f"{side}_stages={stages_to_text(stages) or '(none)'} must be non-increasing numbers "
                f"from 1 to {side}_groups={groups}"
            )
        if not 2 <= entries <= 65536:
            raise UserError(f"{side}_entries={entries} must be from 2 to 65536")

    def _check_tiles(self) -> None:
        groups = self.head_dim // 4
        wanted = {
            "key_space": "post_rope",
            "k_groups": groups,
            "v_groups": groups,
            "v_stages": (groups,),
            "k_entries": BYTE_ENTRIES,
            "v_entries": BYTE_ENTRIES,
        }
        wrong = [name for name, value in wanted.items() if getattr(self, name) != value]
        if wrong or self.head_dim % 4 or self.k_stages[0] != groups or self.block % TILE_ROWS:
            raise UserError(
                f"layout=tiles takes key_space=post_rope, {groups} groups of both sides, v_stages={groups}, k_stages "
                f"that begin with {groups}, {BYTE_ENTRIES} entries and a block that is a multiple of {TILE_ROWS}, not "
                f"{', '.join(f'{name}={self.write_field(name, getattr(self, name))}' for name in wrong or ('block',))}"
            )

    # -- accounting

    def lookups(self, side: str) -> int:
        """Codes per vector of side "k" or "v": the length of a row of codes."""
        return sum(getattr(self, f"{side}_stages"))

    def bits(self) -> float:
        """Index bits of one KV head and token, K and V together (fp16 takes 32 * head_dim)."""
        return self.lookups("k") * log2(self.k_entries) + self.lookups("v") * log2(self.v_entries)

    def layer_ratio(self) -> float:
        """Index bits only (the paper counts this way)."""
        return self.bits() / (32 * self.head_dim)

    def geometry(self) -> Geometry:
        return Geometry(sinks=self.sinks, window=self.window, block=self.block)

    def check_exportable(self) -> None:
        for side, entries in (("k", self.k_entries), ("v", self.v_entries)):
            if entries > BYTE_ENTRIES:
                raise UserError(
                    f"{side}_entries={entries} does not fit the engine's byte codes: use at most {BYTE_ENTRIES} "
                    f"(--set {side}_entries={BYTE_ENTRIES}), larger codebooks can only be fitted and measured"
                )

    # -- making one

    @classmethod
    def for_layers(cls, ratio: float, specs: Sequence[LayerSpec]) -> VQKVConfig:
        """`from_ratio` for a model with these layers."""
        return cls.from_ratio(ratio, next((s.head_dim for s in specs if s.window == 0), specs[0].head_dim))

    @classmethod
    def from_ratio(cls, ratio: float, head_dim: int, **overrides: Any) -> VQKVConfig:
        """The best configuration known whose ratio is at most `ratio` + 0.005.

        Codes are bytes; beyond 0.125 groups are 4 wide and a second stage goes to keys and values by quarters, as
        measured best on SmolLM2-135M and Qwen2.5-Coder-0.5B at 0.125 and 0.172 (in between it is interpolated). For
        one stage on values, which decodes faster on a GPU, set v_stages=16 and k_stages=16+12 (head_dim 64, 0.172).
        `overrides` replace fields afterwards. Raises UserError when the ratio is out of reach.
        """
        points = sorted(_points(head_dim), key=lambda config: config.bits())
        fitting = [config for config in points if config.ratio() <= ratio + RATIO_SLACK]
        top = points[-1].ratio()
        if not fitting or ratio > top + RATIO_SLACK:
            raise UserError(
                f"ratio {ratio:g} is out of reach for head_dim {head_dim}: "
                f"--ratio takes {points[0].ratio():.4f} to {top:.4f} for vqkv"
            )
        return replace(fitting[-1], **overrides)

    @classmethod
    def paper_llama31_8b(cls) -> VQKVConfig:
        """The paper's Llama-3.1-8B configuration: 560 + 144 bits per head and token, ratio 0.171875."""
        return cls(
            head_dim=128,
            k_groups=1,
            v_groups=1,
            k_stages=(1,) * 56,
            v_stages=(1,) * 16,
            k_entries=1024,
            v_entries=512,
            key_space="post_rope",
            tables="layer",
            mean=False,
            rotation=False,
            query_weighting=False,
            value_weighting=False,
            projection=True,
            window=1024,
            block=1024,
        )

    def faster_on_gpu(self) -> str:
        fast = self.head_dim != 128 or self.layout == "tiles"
        return "" if fast else "--set layout=tiles, which stores keys after RoPE"

    def tiled(self) -> VQKVConfig:
        """The like of this with layout "tiles": as many lookups, those beyond a stage of either side given to keys."""
        groups = self.head_dim // 4
        spare = self.lookups("k") + self.lookups("v") - 2 * groups
        if self.head_dim % 4 or spare < 0:
            raise UserError(
                f"layout=tiles reads at least {2 * groups} codes of a key and a value of {self.head_dim}, and "
                f"{self.summary()} has {self.lookups('k') + self.lookups('v')}: use a larger --ratio"
            )
        stages = (groups,) * (1 + spare // groups) + ((spare % groups,) if spare % groups else ())
        return replace(
            self,
            **dict.fromkeys(("k_groups", "v_groups"), groups),
            **dict.fromkeys(("k_entries", "v_entries"), BYTE_ENTRIES),
            k_stages=stages,
            v_stages=(groups,),
            key_space="post_rope",
            layout="tiles",
        )

    def override(self, settings: Iterable[str]) -> VQKVConfig:
        """As `MethodConfig.override`; "layout=tiles" brings what that layout takes along, unless it is set too."""
        settings = list(settings)
        asked = any("".join(text.split()) == "layout=tiles" for text in settings)
        return MethodConfig.override(self.tiled() if asked and self.layout == "plain" else self, settings)

    # -- reading and writing

    @classmethod
    def read_field(cls, key: str, text: str) -> Any:
        return stages_from_text(text) if key in _STAGES else super().read_field(key, text)

    @classmethod
    def write_field(cls, key: str, value: Any) -> str:
        return stages_to_text(value) if key in _STAGES else super().write_field(key, value)

    def summary(self) -> str:
        """One line: "K 16+12 of 16x4-d, V 16 of 16x4-d, 256 entries, pre_rope"."""
        sides = []
        for side in ("k", "v"):
            groups = getattr(self, f"{side}_groups")
            stages = stages_to_text(getattr(self, f"{side}_stages"))
            sides.append(f"{side.upper()} {stages} of {groups}x{self.head_dim // groups}-d")
        entries = "/".join(map(str, dict.fromkeys((self.k_entries, self.v_entries))))
        layout = ", in tiles" if self.layout == "tiles" else ""
        return f"{', '.join(sides)}, {entries} entries, {self.key_space}{layout}"


_CLIMB = "vkkvkvkvkkkk"  # which side gets the next quarter of a stage
_STAGES = ("k_stages", "v_stages")


def _points(head_dim: int) -> list[VQKVConfig]:
    """The ladder `from_ratio` climbs: 8-d groups, 4-d groups, then further stages on some of the groups."""
    if head_dim % 8:
        raise UserError(
            f"head_dim {head_dim} is not a multiple of 8, so --ratio knows no configuration for it with vqkv"
        )
    coarse, fine = head_dim // 8, head_dim // 4
    ladder = [((coarse,), (coarse,)), ((fine,), (coarse,)), ((fine,), (fine,))]
    extra = {"k": 0, "v": 0}  # quarters of the groups that have a further stage
    for side in _CLIMB:
        extra[side] += 1
        ladder.append(tuple(_stages(fine, extra[side]) for side in ("k", "v")))
    return [
        VQKVConfig(head_dim=head_dim, k_groups=k[0], v_groups=v[0], k_stages=k, v_stages=v)
        for k, v in dict.fromkeys(ladder)
    ]


def _stages(groups: int, quarters: int) -> tuple[int, ...]:
    """All the groups once, and then as many further quarters of them as asked for: (16, 12) is 3 quarters."""
    whole, rest = divmod(quarters, 4)
    return (groups,) * (1 + whole) + ((groups * rest // 4,) if groups * rest // 4 else ())


def stages_to_text(stages: tuple[int, ...]) -> str:
    """(16, 12) -> "16+12"; three or more equal stages are written as "56x1"."""
    runs = [(groups, len(list(run))) for groups, run in groupby(stages)]
    terms = [f"{count}x{groups}" if count > 2 else "+".join([str(groups)] * count) for groups, count in runs]
    return "+".join(terms)


def stages_from_text(text: str) -> tuple[int, ...]:
    """Inverse of `stages_to_text`. Raises ValueError when the text is not of that form."""
    stages: list[int] = []
    for term in text.split("+"):
        count, _, groups = term.rpartition("x")
        stages += [int(groups)] * int(count or 1)
    return tuple(stages)
