"""Decode attention by tables over VQKV codes in tiles, by the CPU emulator, against attention over decoded codes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import pytest
import torch
from native import emulated, relative, step

from plugins.layer import LayerSpec
from plugins.native.abi import Library
from plugins.native.layer import NativeLayer
from plugins.vqkv import onnx_body
from plugins.vqkv.config import VQKVConfig
from plugins.vqkv.layout import TILE, permutation
from plugins.vqkv.reference import LayerCodec, Quantiser, byte_values

DIM, SINKS, WINDOW = 128, 2, 5
BARS = {torch.float16: 5e-3, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def library() -> Library:
    return emulated()


@dataclass
class Case:
    """A layer with random tables, no rotation, and the codes of `encoded` tokens per sequence.

    Of the emulated multiprocessors two KV heads leave one, enough for the exact rows of a batch of one: these are then
    attended to beside the codes, else by a launch of their own.
    """

    group: int = 4
    heads: int = 2
    stages: tuple[int, ...] = (32,)
    encoded: tuple[int, ...] = (160,)
    dtype: torch.dtype = torch.float16
    tables: str = "head"
    block: int = 32
    sharpness: float = 1.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        self.settings = VQKVConfig(
            head_dim=DIM, k_groups=32, v_groups=32, k_stages=self.stages, v_stages=(32,), key_space="post_rope",
            tables=self.tables, sinks=SINKS, window=WINDOW, block=self.block, layout="tiles",
        )  # fmt: skip
        self.spec = LayerSpec(0, self.heads * self.group, self.heads, DIM, DIM**-0.5, rotary_dim=0)
        generator = torch.Generator().manual_seed(0)
        self.codec = LayerCodec(self.settings, *(self._side(side, generator) for side in "kv"))
        self.past = torch.tensor(self.encoded) + SINKS + WINDOW + torch.arange(len(self.encoded)) % self.block

    def _side(self, side: str, generator: torch.Generator) -> Quantiser:
        sets, stages = self.heads if self.tables == "head" else 1, getattr(self.settings, f"{side}_stages")
        books = torch.randn(sets, sum(stages), 256, 4, generator=generator)
        books[:, 32:] *= 0.4
        matrix = torch.linalg.qr(torch.randn(sets, DIM, DIM, generator=generator))[0].contiguous()
        scale = 2.0 ** torch.randint(-2, 3, (DIM,), generator=generator)  # the codec's axes have scales of their own
        if side == "v":
            books, scale = byte_values(books), torch.ones(DIM)
        else:
            books = books / scale.view(32, 4)[torch.cat([torch.arange(n) for n in stages])][:, None]
        mean = torch.randn(self.heads, DIM, generator=generator) + self.shift * (side == "k")
        return Quantiser(books, (matrix / scale[:, None]).mT.contiguous(), scale[:, None] * matrix, mean, stages)

    def native(self, library: Library, members: list[int]) -> NativeLayer:
        plan = onnx_body.plan(self.spec, self.settings, ir.DataType.FLOAT16)
        geometry, tables = self.settings.geometry(), onnx_body.tables(self.codec)
        capacity = int(self.past.max()) + 40
        native = NativeLayer(library, plan, self.spec, tables, len(members), capacity, geometry, self.dtype, "cpu")
        for place, member in enumerate(members):
            generator = torch.Generator().manual_seed(member)
            for name, tensor in sorted(native.states.items()):
                if name.startswith("codes"):
                    tensor[place].random_(-128, 128, generator=generator)
                else:
                    tensor[place].normal_(generator=generator)
        native.lengths = self.past[members].numpy().astype(np.int32)
        return native

    def tokens(self, members: list[int]) -> list[torch.Tensor]:
        found = []
        for member in members:
            generator = torch.Generator().manual_seed(100 + member)
            shapes = [(self.heads * self.group, self.sharpness), (self.heads, 1.0), (self.heads, 1.0)]
            found.append([(s * torch.randn(h, 1, DIM, generator=generator)).to(self.dtype) for h, s in shapes])
        return [torch.stack(x) for x in zip(*found, strict=True)]

    def expected(
        self, native: NativeLayer, place: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """[Hq, 1, D] of one sequence, from its state before the step."""
        past, ring = int(native.lengths[place]), WINDOW + self.block
        coded = max(past - SINKS - WINDOW, 0) // self.block * self.block
        tail = torch.arange(SINKS + coded, past)
        rows = torch.cat((torch.arange(min(SINKS, past)), SINKS + (tail - SINKS) % ring))
        both = []
        for side, new in (("k", k), ("v", v)):
            lookups, quantiser = self.settings.lookups(side), getattr(self.codec, side)
            codes = native.states[f"codes_{side}"][place].long() + 128
            codes = codes[..., np.argsort(permutation(side, lookups))].reshape(self.heads, -1, lookups)[:, :coded]
            exact = native.states[f"ring_{side}"][place].float()[:, rows]
            decoded = [quantiser.from_codes(codes)] if coded else []
            both.append(torch.cat((*decoded, exact, new.float()), 1).repeat_interleave(self.group, 0))
        scores = q.float() @ both[0].mT * self.spec.scale
        return scores.softmax(-1) @ both[1]


def run(library: Library, case: Case, members: list[int], idle: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and what it should be; of the sequence in place `idle`, which has no new token, 0."""
    native, tokens = case.native(library, members), case.tokens(members)
    wanted = torch.stack([case.expected(native, n, *(x[n] for x in tokens)) for n in range(len(members))])
    new = [int(place != idle) for place in range(len(members))]
    return step(native, *tokens, new=new), wanted * torch.tensor(new)[:, None, None, None]


CASES = {
    "one query head": Case(group=1),
    "one KV head": Case(heads=1, encoded=(96, 160)),
    "four, no whole pair of tiles a warp": Case(encoded=(672,)),
    "six, bf16": Case(group=6, dtype=torch.bfloat16),
    "seven, shared tables": Case(group=7, tables="layer", encoded=(160, 64)),
    "eight": Case(group=8, encoded=(96,)),
    "sixteen": Case(group=16, encoded=(640, 32, 96)),
    "ragged": Case(encoded=(160, 0, 32, 64), dtype=torch.bfloat16),
    "long": Case(encoded=(2048, 32)),
    "more sequences than a warp has lanes": Case(encoded=(1120, *((32, 0, 64) * 12))),
    "blocks of 16": Case(encoded=(16, 48), block=16),
    "stages of 8": Case(stages=(32, 8), encoded=(160, 32, 96)),
    "stages of 16": Case(stages=(32, 16), encoded=(160, 32, 96)),
    "stages of 24": Case(stages=(32, 24), encoded=(160, 32, 96)),
    "stages of 32": Case(stages=(32, 32), encoded=(160, 32, 96)),
    "many stages": Case(stages=(32, 8, 4, 4, 4, 4), encoded=(160, 32, 96)),
    "sharp": Case(sharpness=6.0, encoded=(672,)),
    "keys far from 0": Case(shift=-20.0, encoded=(672,)),
}


@pytest.mark.parametrize("name", CASES)
def test_decode_equals_attention_over_decoded_codes(library: Library, name: str) -> None:
    case = CASES[name]
    for batch in {1, len(case.encoded)}:
        found, wanted = run(library, case, list(range(batch)))
        assert relative(found.float(), wanted) < BARS[case.dtype]


@pytest.mark.parametrize("members", [[0], [0, 1, 2]])
def test_an_idle_sequence_gives_0_and_stores_nothing(library: Library, members: list[int]) -> None:
    case = Case(encoded=(64, 96, 0))
    for idle in range(len(members)):
        found, wanted = run(library, case, members, idle)
        assert (found[idle] == 0).all() and relative(found.float(), wanted) < BARS[case.dtype]
    native, tokens = case.native(library, members), case.tokens(members)
    before = {name: tensor.clone() for name, tensor in native.states.items()}
    step(native, *tokens, new=[0] * len(members))
    assert all(torch.equal(tensor, native.states[name]) for name, tensor in before.items())


def test_a_sequence_gets_the_same_bits_in_any_batch_of_a_size(library: Library) -> None:
    case = Case(encoded=(640, 0, 1120, 32, 2048, 96))
    together, again = (run(library, case, [0, 1, 2, 3])[0] for _ in range(2))
    assert torch.equal(together, again)
    others = run(library, case, [4, 2, 5, 0])[0]
    assert torch.equal(others[1], together[2]) and torch.equal(others[3], together[0])
    for member in range(4):  # how many pieces a sequence is cut in depends on the size of the batch
        alone = run(library, case, [member])[0][0]
        assert torch.equal(alone, run(library, case, [member])[0][0])
        assert relative(alone.float(), together[member].float()) < 2e-3


@pytest.mark.parametrize("stages", [(32,), (32, 8), (32, 16), (32, 24), (32, 32)])
def test_the_encoder_writes_what_the_layout_says(library: Library, stages: tuple[int, ...]) -> None:
    case = Case(stages=stages, block=16, encoded=(0,))
    native, generator = case.native(library, [0]), torch.Generator().manual_seed(5)
    native.lengths[:] = 0
    length = SINKS + WINDOW + 32
    heads = (case.heads * case.group, case.heads, case.heads)
    q, k, v = (torch.randn(1, h, length, DIM, generator=generator).half() for h in heads)
    step(native, q, k, v)
    for side, x in (("k", k), ("v", v)):
        lookups, quantiser = case.settings.lookups(side), getattr(case.codec, side)
        stored = native.states[f"codes_{side}"][0, :, : 32 // TILE].long() + 128
        stored = stored[..., np.argsort(permutation(side, lookups))].reshape(case.heads, 32, lookups)
        wanted = quantiser.codes(x[0, :, SINKS : SINKS + 32].float())
        assert (stored == wanted).float().mean() > 0.998


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("lookups", [4, 16, 32, 33, 40, 48, 56, 64, 72])
def test_the_layout_is_a_permutation(side: str, lookups: int) -> None:
    assert np.array_equal(np.sort(permutation(side, lookups)), np.arange(TILE * lookups))
