"""IntKVAttention's kernels, run by the CPU emulator, against the float32 reference fed the same 16-bit numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir
import pytest
import torch
from native import emulated, follow, step

from plugins.intkv import onnx_body
from plugins.intkv.config import IntKVConfig
from plugins.intkv.reference import LayerCache, LayerCodec, Rows, stored_rows
from plugins.layer import LayerSpec
from plugins.native import nodes
from plugins.native.abi import Library
from plugins.native.layer import NativeLayer

LIMIT, CAPACITY = 512, 448
BARS = {torch.float16: 5e-3, torch.bfloat16: 1e-2}
HALF, BFLOAT = torch.float16, torch.bfloat16
# appended tokens per sequence and step: ragged prompts, single tokens, chunks on a past, an idle and an empty sequence
STEPS = [[60, 33], [1, 1], [1, 0], [21, 40], [1, 1], [0, 5], [1, 1]]
KIVI = {"k_bits": 2, "v_bits": 2, "k_axis": "channel", "group": 32, "rotation": False, "mean": False,
        "key_space": "post_rope"}  # fmt: skip
INT3, INT8 = {"k_bits": 3, "v_bits": 3}, {"k_bits": 8, "v_bits": 8}
POST = {"key_space": "post_rope"}


@pytest.fixture(scope="module")
def library() -> Library:
    return emulated()


@dataclass
class Case:
    """A layer and its codec, with random means. config: what differs from 4 bits in the strong form."""

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
        heads, scale = self.heads * self.group, self.dim**-0.5
        self.spec = LayerSpec(0, heads, self.heads, self.dim, scale, softcap=self.softcap, rope=rope, rotary_dim=rotary)
        self.settings = IntKVConfig(**({"head_dim": self.dim, "sinks": 2, "window": 9, "block": 16} | self.config))
        center = 2 * torch.randn(2, self.heads, self.dim, generator=torch.Generator().manual_seed(0))
        self.codec = LayerCodec(self.settings, center if self.settings.mean else torch.zeros_like(center))
        frequency = 100.0 ** (-torch.arange(rotary // 2) / max(rotary // 2, 1))
        angle = torch.arange(LIMIT)[:, None] * frequency
        self.rope = (1.25 * angle.cos(), 1.25 * angle.sin()) if rotary else None  # scaled, as YaRN does

    def native(self, library: Library, batch: int) -> NativeLayer:
        plan = onnx_body.plan(self.spec, self.settings, ir.DataType.FLOAT16)
        tables, geometry = onnx_body.tables(self.codec), self.settings.geometry()
        return NativeLayer(library, plan, self.spec, tables, batch, CAPACITY, geometry, self.dtype, "cpu", self.rope)

    def reference(self) -> LayerCache:
        twice = self.rope and tuple(torch.cat((t, t), -1) for t in self.rope)
        return LayerCache(self.spec, twice, self.codec, self.dtype)

    def tokens(self, batch: int, length: int, generator: torch.Generator) -> list[torch.Tensor]:
        heads = (self.spec.num_heads, self.heads, self.heads)
        tokens = [torch.randn(batch, h, length, self.dim, generator=generator) for h in heads]
        tokens[2][..., : self.dim // 8] *= 4  # channels of another size than the rest
        return [x.to(self.dtype) for x in tokens]


def rows_of(native: NativeLayer, case: Case, member: int) -> dict[str, Rows]:
    """The stored rows of one sequence."""
    count, found = int(case.settings.geometry().encoded(int(native.lengths[member]))), {}
    for name in "kv":
        for part in ("codes", "scales", "zeros"):
            tokens = 1 if part == "codes" else case.settings.side(name).tokens
            found[f"{part}_{name}"] = native.states[f"{part}_{name}"][member][:, : count // tokens]
    return stored_rows(case.settings, found)


def run(library: Library, case: Case, steps: list[list[int]]) -> tuple[float, NativeLayer, list[LayerCache]]:
    """The worst relative difference of a step's outputs."""
    batch = len(steps[0])
    native, references = case.native(library, batch), [case.reference() for _ in range(batch)]
    worst = follow(
        *(native, references, steps),
        lambda length, generator: case.tokens(batch, length, generator),
        lambda member: rows_of(native, case, member),
    )
    return worst, native, references


CASES = {
    "int4": Case(),
    "int4, head_dim 128, group 6": Case(128, 6, dtype=BFLOAT),
    "int4, head_dim 256, group 1": Case(256, 1),
    "int8": Case(config=INT8, dtype=BFLOAT),
    "int8, head_dim 96, group 7": Case(96, 7, config=INT8),
    "int8, head_dim 256": Case(256, 1, config=INT8, dtype=BFLOAT),
    "int3, head_dim 128": Case(128, 1, config=INT3),
    "int3": Case(config=INT3),
    "int3, head_dim 96": Case(96, 6, config=INT3, dtype=BFLOAT),
    "kivi2": Case(128, 4, config=KIVI),
    "kivi2, head_dim 96": Case(96, 7, config=KIVI, dtype=BFLOAT),
    "kivi2, head_dim 64, block of 32": Case(64, 1, config=KIVI | {"block": 32, "window": 5}),
    "group 12": Case(group=12),
    "post_rope, group 16, two heads": Case(heads=2, group=16, config=POST | INT8, dtype=BFLOAT),
    "post_rope, 3 and 8 bits, head_dim 128": Case(128, config=POST | {"k_bits": 3, "v_bits": 8}),
    "post_rope, no rotation": Case(96, config=POST | {"rotation": False, "k_bits": 4, "v_bits": 3}),
    "no rotation, softcap": Case(softcap=4.0, config={"rotation": False}, dtype=BFLOAT),
    "groups of 16": Case(128, config={"group": 16, "k_bits": 8, "v_bits": 2}),
    "groups of 48": Case(96, config={"group": 48} | INT3, dtype=BFLOAT),
    "channels, rotated": Case(heads=2, config={"k_axis": "channel", "k_bits": 3}),
    "no rope": Case(rotary_dim=0, heads=2),
    "post_rope, part of the head rotated": Case(rotary_dim=24, config=POST, softcap=4.0),
    "no sinks, block of 3": Case(config={"sinks": 0, "block": 3, "window": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_codes_equal_the_reference(library: Library, name: str) -> None:
    case = CASES[name]
    worst, native, references = run(library, case, STEPS)
    assert worst < BARS[case.dtype]
    for member, reference in enumerate(references):
        total, wrong, flips = reference.compare(rows_of(native, case, member))
        assert total > 0 and wrong == 0 and flips <= 2e-3 * total


@pytest.mark.parametrize("case", [Case(), Case(128, 1, config=KIVI, dtype=BFLOAT)], ids=["int4", "kivi2"])
def test_a_long_sequence_is_read_in_pieces_and_alone_as_in_a_batch(library: Library, case: Case) -> None:
    worst, together, _ = run(library, case, [[400, 150], [1, 1]])
    assert worst < BARS[case.dtype]
    tokens = case.tokens(2, 1, torch.Generator().manual_seed(2))
    before = {name: tensor.clone() for name, tensor in together.states.items()}
    lengths = together.lengths
    first = step(together, *tokens)
    for name, tensor in before.items():
        together.states[name].copy_(tensor)
    together.lengths = lengths
    assert torch.equal(step(together, *tokens), first)
    for member in range(2):
        alone = case.native(library, 1)
        for name, tensor in before.items():
            alone.states[name].copy_(tensor[member : member + 1])
        alone.lengths = lengths[member : member + 1]
        assert torch.equal(step(alone, *(x[member : member + 1] for x in tokens)), first[member : member + 1])


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(config={"group": 8}), "group=8"),
        (Case(config={"k_axis": "channel", "block": 24}), "a block of a multiple of 16 tokens, not 24"),
        (Case(rotary_dim=32), "rotary_dim=32"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_in_a_sentence(library: Library, case: Case, reason: str) -> None:
    plan = onnx_body.plan(case.spec, case.settings, ir.DataType.FLOAT16)
    assert reason in nodes.uncovered(library, plan.op, plan.attributes, "float16")


@pytest.mark.parametrize("rotation", [False, True])
def test_equal_values_have_the_scale_0_and_come_back_as_they_are(library: Library, rotation: bool) -> None:
    case = Case(config={"mean": False, "rotation": rotation})
    native, generator = case.native(library, 1), torch.Generator().manual_seed(3)
    for length in (60, 1):
        q, k, v = case.tokens(1, length, generator)
        v[:] = 0.3 * torch.eye(case.dim)[0] * case.dim**0.5 if rotation else 0.3  # rotated they are equal
        out = step(native, q, k, v).float()
        torch.testing.assert_close(out, v[:, :, :1].float().expand_as(out), atol=1e-3, rtol=1e-3)
    used = int(case.settings.geometry().encoded(61))
    assert (native.states["scales_v"][:, :, :used] == 0).all() and used > 0


def test_padding_writes_nothing(library: Library) -> None:
    case = Case(128, config=KIVI)
    native = case.native(library, 2)
    for name in ("codes_k", "codes_v", "scales_k", "zeros_v"):
        native.states[name].fill_(77)
    step(native, *case.tokens(2, 60, torch.Generator().manual_seed(2)), new=[60, 30])
    for member, rows in enumerate((48, 16)):
        assert (native.states["codes_k"][member, :, rows:] == 77).all()
        assert (native.states["codes_v"][member, :, rows:] == 77).all()
        assert (native.states["scales_k"][member, :, rows // 16 :] == 77).all()
        assert (native.states["zeros_v"][member, :, rows:] == 77).all()
