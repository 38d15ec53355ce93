"""VQKVAttention's kernels, run by the CPU emulator, against the float32 reference fed the same 16-bit numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir
import pytest
import torch
from native import emulated, follow, step

from plugins.layer import LayerSpec
from plugins.native.abi import TILES, Library, NativeError
from plugins.native.layer import NativeLayer
from plugins.vqkv import onnx_body
from plugins.vqkv.config import VQKVConfig
from plugins.vqkv.reference import LayerCache, LayerCodec, Quantiser, byte_values, stored_rows

LIMIT, CAPACITY, TIE = 512, 448, 1e-4
BARS = {torch.float16: 5e-3, torch.bfloat16: 1e-2}
HALF, BFLOAT = torch.float16, torch.bfloat16
# appended tokens per sequence and step: ragged prompts, single tokens, chunks on a past, an idle and an empty sequence
STEPS = [[60, 33], [1, 1], [1, 0], [21, 40], [1, 1], [0, 5], [1, 1]]


@pytest.fixture(scope="module")
def library() -> Library:
    return emulated()


@dataclass
class Case:
    """A layer and its codec, with random tables."""

    dim: int = 64
    group: int = 2
    heads: int = 1
    rotary_dim: int = -1
    softcap: float = 0.0
    dtype: torch.dtype = HALF
    config: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        rotary = self.dim if self.rotary_dim < 0 else self.rotary_dim
        rope = 0 if rotary else None
        scale = self.dim**-0.5
        heads = self.heads * self.group
        self.spec = LayerSpec(0, heads, self.heads, self.dim, scale, softcap=self.softcap, rope=rope, rotary_dim=rotary)
        quarter = self.dim // 4
        values = {"head_dim": self.dim, "k_groups": quarter, "v_groups": quarter, "k_stages": (quarter,),
                  "v_stages": (quarter,), "sinks": 2, "window": 9, "block": 16}  # fmt: skip
        self.settings = VQKVConfig(**(values | self.config))
        generator = torch.Generator().manual_seed(0)
        self.codec = LayerCodec(self.settings, *(self._side(side, generator) for side in "kv"))
        frequency = 100.0 ** (-torch.arange(rotary // 2) / max(rotary // 2, 1))
        angle = torch.arange(LIMIT)[:, None] * frequency
        self.rope = (1.25 * angle.cos(), 1.25 * angle.sin()) if rotary else None  # scaled, as YaRN does

    def _side(self, side: str, generator: torch.Generator) -> Quantiser:
        config = self.settings
        sets = self.heads if config.tables == "head" else 1
        groups, stages = getattr(config, f"{side}_groups"), getattr(config, f"{side}_stages")
        matrix = 1.5 * torch.linalg.qr(torch.randn(sets, self.dim, self.dim, generator=generator))[0]
        shape = sets, sum(stages), getattr(config, f"{side}_entries"), self.dim // groups
        books = torch.randn(shape, generator=generator)
        for lookup in range(groups, sum(stages)):
            books[:, lookup] *= 0.5
        if config.layout == "tiles" and side == "v":
            books = byte_values(books)
        mean = torch.randn(self.heads, self.dim, generator=generator)
        return Quantiser(books, matrix.contiguous(), torch.linalg.inv(matrix).contiguous(), mean, stages)

    def native(self, library: Library, batch: int) -> NativeLayer:
        plan = onnx_body.plan(self.spec, self.settings, ir.DataType.FLOAT16)
        tables, geometry = onnx_body.tables(self.codec), self.settings.geometry()
        return NativeLayer(library, plan, self.spec, tables, batch, CAPACITY, geometry, self.dtype, "cpu", self.rope)

    def reference(self) -> LayerCache:
        twice = self.rope and tuple(torch.cat((t, t), -1) for t in self.rope)
        return LayerCache(self.spec, twice, self.codec, self.dtype)

    def tokens(self, batch: int, length: int, generator: torch.Generator) -> list[torch.Tensor]:
        heads = (self.spec.num_heads, self.heads, self.heads)
        return [torch.randn(batch, h, length, self.dim, generator=generator).to(self.dtype) for h in heads]


def codes_of(native: NativeLayer, case: Case, member: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = stored_rows(case.settings, {n: native.states[n][member] for n in ("codes_k", "codes_v")})
    rows = int(case.settings.geometry().encoded(int(native.lengths[member])))
    return tuple(codes[:, :rows] for codes in found)


def run(library: Library, case: Case, steps: list[list[int]]) -> tuple[float, NativeLayer, list[LayerCache]]:
    """The worst relative difference of a step's outputs."""
    batch = len(steps[0])
    native, references = case.native(library, batch), [case.reference() for _ in range(batch)]
    worst = follow(
        *(native, references, steps),
        lambda length, generator: case.tokens(batch, length, generator),
        lambda member: codes_of(native, case, member),
    )
    return worst, native, references


CASES = {
    "pre_rope": Case(),
    "post_rope": Case(config={"key_space": "post_rope"}),
    "pre_rope, head_dim 128": Case(128, 4, dtype=BFLOAT),
    "pre_rope, head_dim 96, group 6": Case(96, 6, dtype=BFLOAT),
    "post_rope, head_dim 96, group 7": Case(96, 7, config={"key_space": "post_rope"}),
    "pre_rope, head_dim 256, group 1": Case(256, 1),
    "post_rope, group 16": Case(64, 16, dtype=BFLOAT, config={"key_space": "post_rope"}),
    "pre_rope, group 12": Case(64, 12, dtype=BFLOAT),
    "softcap, part of the head rotated, two heads": Case(heads=2, rotary_dim=24, softcap=4.0, dtype=BFLOAT),
    "no rope, shared tables": Case(heads=2, rotary_dim=0, config={"tables": "layer"}),
    "stages on part of the groups": Case(config={"k_stages": (16, 8, 3), "v_stages": (12, 4)}),
    "groups of 8, 100 entries": Case(
        config={"k_groups": 8, "k_stages": (8, 8), "k_entries": 100, "v_groups": 8, "v_stages": (8,), "v_entries": 3}
    ),
    "groups of 2 and 16": Case(config={"k_groups": 32, "k_stages": (32,), "v_groups": 4, "v_stages": (4, 4, 2)}),
    "groups of 3": Case(96, 3, config={"k_groups": 32, "k_stages": (32,), "v_groups": 32, "v_stages": (32, 1)}),
    "one group, many stages": Case(
        config={"k_groups": 1, "k_stages": (1,) * 9, "v_groups": 1, "v_stages": (1,) * 5}
        | {"k_entries": 70, "key_space": "post_rope", "tables": "layer"}
    ),
    "no sinks, block of 3": Case(config={"sinks": 0, "block": 3, "window": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_codes_equal_the_reference(library: Library, name: str) -> None:
    case = CASES[name]
    worst, native, references = run(library, case, STEPS)
    assert worst < BARS[case.dtype]
    for member, reference in enumerate(references):
        total, wrong, flips = reference.compare(codes_of(native, case, member), TIE)
        assert total > 0
        assert wrong == 0 and flips <= 2e-3 * total


LONG = {
    "pre_rope": Case(dtype=BFLOAT),
    "post_rope, stages in and out of shared memory": Case(
        config={"key_space": "post_rope", "k_groups": 4, "k_stages": (4,) * 9, "v_groups": 8, "v_stages": (8, 5)}
    ),
    "one group": Case(config={"k_groups": 1, "k_stages": (1, 1), "v_groups": 1, "v_stages": (1,)}),
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_sequence_is_split_and_merged(library: Library, name: str) -> None:
    """More rows than the warps of a block take at once, prompts that are encoded by many rows a lane."""
    case = LONG[name]
    worst, native, references = run(library, case, [[400, 190], [1, 1], [7, 3], [1, 1]])
    assert worst < BARS[case.dtype]
    for member, reference in enumerate(references):
        total, wrong, flips = reference.compare(codes_of(native, case, member), TIE)
        assert total > 500 and wrong == 0 and flips <= 2e-3 * total


@pytest.mark.parametrize("group", [1, 4])
def test_codes_in_tiles_equal_the_reference(library: Library, group: int) -> None:
    case = Case(128, group, heads=2, config={"key_space": "post_rope", "layout": "tiles", "k_stages": (32, 8)})
    worst, native, references = run(library, case, [[60, 33], [1, 1], [21, 40], [1, 1], [0, 5], [1, 1]])
    assert worst < BARS[case.dtype]
    for member, reference in enumerate(references):
        total, wrong, flips = reference.compare(codes_of(native, case, member), TIE)
        assert total > 0 and wrong == 0 and flips <= 2e-3 * total


@pytest.mark.parametrize("name", ["pre_rope", "post_rope"])
def test_a_sequence_does_not_depend_on_its_batch(library: Library, name: str) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(2)
    together, alone = case.native(library, 3), case.native(library, 1)
    for counts in ([5, 40, 300], [1, 1, 1], [0, 17, 1], [1, 0, 1]):
        tokens = case.tokens(3, max(counts), generator)
        out = step(together, *tokens, new=counts)[2]
        assert torch.equal(out, step(alone, *(x[2:] for x in tokens), new=counts[2:])[0])
    for codes, other in zip(codes_of(together, case, 2), codes_of(alone, case, 0), strict=True):
        assert torch.equal(codes, other)


def test_padding_writes_no_code(library: Library) -> None:
    case, generator = CASES["pre_rope"], torch.Generator().manual_seed(2)
    native = case.native(library, 2)
    native.states["codes_k"].fill_(77)
    step(native, *case.tokens(2, 60, generator), new=[60, 30])
    assert (native.states["codes_k"][0, :, 48:] == 77).all() and (native.states["codes_k"][1, :, 16:] == 77).all()


def test_layers_without_kernels_are_refused_with_the_reason(library: Library) -> None:
    native = CASES["pre_rope"].native(library, 1)
    layer, state = native.layer, native.structure

    def reason(name: str, value: int) -> str:
        kept = getattr(state, name)
        setattr(state, name, value)
        found = library.supported("vqkv", layer, state)
        setattr(state, name, kept)
        return found

    assert library.supported("vqkv", layer, state) == ""
    assert "k_entries=1024" in reason("k_entries", 1024)
    assert "65 stages" in reason("v_stage_count", 65)
    assert "v_groups=5" in reason("v_groups", 5)
    assert "sets" in reason("sets", 3)
    assert "tiles" in reason("layout", TILES)
    layer.head_dim = 80
    assert "80" in library.supported("vqkv", layer, state)


def test_a_small_workspace_is_refused(library: Library) -> None:
    native = CASES["pre_rope"].native(library, 1)
    native.library = type("Short", (), {"workspace": lambda self, *_: 256, "attention": library.attention})()
    with pytest.raises(NativeError, match="workspace"):
        step(native, *CASES["pre_rope"].tokens(1, 3, torch.Generator()))
