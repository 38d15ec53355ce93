"""DeltaKVAttention's decode step, emulated, against what its stored codes say in float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest
import torch
from native import emulated, relative, step
from torch import Tensor

from plugins.deltakv import onnx_body
from plugins.deltakv.config import DeltaKVConfig
from plugins.deltakv.reference import LayerCodec, stored_rows
from plugins.layer import LayerSpec
from plugins.native.layer import NativeLayer

HALF, BFLOAT = torch.float16, torch.bfloat16
KINDS = {HALF: ir.DataType.FLOAT16, BFLOAT: ir.DataType.BFLOAT16}
BARS = {HALF: 5e-3, BFLOAT: 1e-2}
CAPACITY = 400


@pytest.fixture(scope="module")
def library():
    return emulated()


@pytest.fixture
def sm90(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """From here on the emulated GPU is one of sm_90; sizes that its own kernel takes."""
    monkeypatch.setenv("KVPACK_EMULATE_SM90", "1")
    return {"head_dim": 128, "kv_heads": 2}


class Case:
    """A layer on the emulator with drawn states; codes, scales and references are NaN or far out where nothing is."""

    def __init__(
        self,
        library,
        lengths: Sequence[int],
        dtype: torch.dtype = BFLOAT,
        group: int = 2,
        rotary_dim: int = 64,
        softcap: float = 0.0,
        seed: int = 0,
        **changes,
    ) -> None:
        small = {"head_dim": 64, "kv_heads": 1, "latents": "32x4", "stride": 5, "sinks": 4, "window": 16, "block": 8}
        self.config = config = DeltaKVConfig(**small | {"full_layers": ()} | changes)
        heads, d = config.kv_heads, config.head_dim
        rope = 0 if rotary_dim else None
        self.spec = LayerSpec(0, heads * group, heads, d, 1.5 * d**-0.5, softcap, 0, rope, rotary_dim)
        generator = torch.Generator().manual_seed(5)
        axes = torch.randn(config.width, config.latent_dim, generator=generator) * config.latent_dim**-0.5
        self.codec = LayerCodec(config, torch.zeros(config.width), axes, axes.T.contiguous())
        self.tables = None
        if rotary_dim:
            angle = torch.arange(CAPACITY)[:, None] * 0.8 ** torch.arange(rotary_dim // 2)
            self.tables = angle.cos(), angle.sin()
        plan = onnx_body.plan(self.spec, config, KINDS[dtype])
        rows = onnx_body.tables(self.codec)
        self.native = NativeLayer(
            library, plan, self.spec, rows, len(lengths), CAPACITY, config.geometry(), dtype, "cpu", self.tables
        )
        self.dtype, self.lengths = dtype, lengths
        for b, length in enumerate(lengths):
            self._draw(b, length, torch.Generator().manual_seed(seed + b))

    def _draw(self, b: int, length: int, generator: torch.Generator) -> None:
        config, geometry, states = self.config, self.config.geometry(), self.native.states
        encoded, references = int(geometry.encoded(length)), int(geometry.references(length))
        for name, state in states.items():
            rows = {"ring": geometry.dense_rows, "references": references}.get(name, encoded)
            part = state[b, 0]
            if part.dtype == torch.int8:
                part[:rows] = torch.randint(-128, 128, part[:rows].shape, generator=generator, dtype=torch.int8)
            elif name == "index":
                ordinal = geometry.sinks + torch.arange(rows)[:, None] // config.stride + 1
                part[:rows] = (torch.rand(rows, config.neighbors, generator=generator) * ordinal).to(part.dtype)
                part[rows:] = 30000
            else:
                part[:] = torch.nan
                part[:rows] = 0.6 * torch.randn(part[:rows].shape, generator=generator)
                if name == "scales":
                    part[:rows] = part[:rows].abs() * 4 / 2.0 ** torch.tensor([bits for _, bits in config.segments])
                if name == "ring":
                    part[geometry.slot(np.arange(length, geometry.dense_rows))] = torch.nan
        self.native.lengths[b] = length

    def tokens(self, seed: int = 9) -> tuple[Tensor, Tensor, Tensor]:
        d = self.spec.head_dim
        parts = [torch.Generator().manual_seed(seed + b) for b in range(len(self.lengths))]
        heads = (self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads)
        return tuple(torch.stack([torch.randn(h, 1, d, generator=g) for g in parts]).to(self.dtype) for h in heads)

    def turned(self, x: Tensor, position: Tensor) -> Tensor:
        """x [H, n, D] rotated at positions [n]."""
        if self.tables is None:
            return x
        half = self.spec.rotary_dim // 2
        cos, sin = (table[position] for table in self.tables)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), dim=-1)

    def expected(self, q: Tensor, k: Tensor, v: Tensor, selected: list[list[int]] | None = None) -> Tensor:
        """Of one new token per sequence, from the states before it: [B, Hq, 1, D]."""
        config, geometry, spec = self.config, self.config.geometry(), self.spec
        found = []
        for b, length in enumerate(self.lengths):
            encoded = int(geometry.encoded(length))
            state = {name: tensor[b, :, :encoded] for name, tensor in self.native.states.items()}
            stored = stored_rows(config, state)
            ring = self.native.states["ring"][b, 0].float()
            pool = torch.cat((ring[: geometry.sinks], self.native.states["references"][b, 0].float()))
            rows = self.codec.g(self.codec.decoded(stored.codes, stored.scales))[0] + pool[stored.index[0]].mean(1)
            read = torch.arange(encoded) if selected is None else torch.tensor(selected[b], dtype=torch.int64)
            exact = torch.tensor([p for p in range(length) if not 0 <= p - geometry.sinks < encoded], dtype=torch.int64)
            x = torch.cat((rows[read], ring[torch.from_numpy(geometry.slot(exact.numpy()))]))
            position = torch.cat((read + geometry.sinks, exact, torch.tensor([length])))
            key, value = x.view(len(x), 2, spec.num_kv_heads, spec.head_dim).permute(1, 2, 0, 3)
            key = self.turned(torch.cat((key, k[b].float()), dim=1), position).repeat_interleave(spec.group, 0)
            value = torch.cat((value, v[b].float()), dim=1).repeat_interleave(spec.group, 0)
            score = self.turned(q[b].float(), torch.tensor([length])) @ key.transpose(1, 2) * spec.scale
            if spec.softcap:
                score = spec.softcap * (score / spec.softcap).tanh()
            found.append(score.softmax(-1) @ value)
        return torch.stack(found)

    def error(self, selected: list[list[int]] | None = None) -> float:
        """Largest relative error of a sequence's output."""
        tokens = self.tokens()
        wanted = self.expected(*tokens, selected)
        found = self.step(tokens, selected)
        return max(relative(a, b) for a, b in zip(found, wanted, strict=True))

    def step(self, tokens: tuple[Tensor, Tensor, Tensor], selected: list[list[int]] | None = None) -> Tensor:
        if selected is None:
            return step(self.native, *tokens)
        width = max(map(len, selected)) + 3
        table = torch.full((len(selected), width), 1 << 20, dtype=torch.int32)
        for b, rows in enumerate(selected):
            table[b, : len(rows)] = torch.tensor(rows)
        counts = np.array([len(rows) for rows in selected], np.int32)
        layer, geometry = self.native, self.config.geometry()
        object.__setattr__(geometry, "selected", lambda stored: counts)
        layer.geometry = geometry
        return step(layer, *tokens, selected=table)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("latents", ["32x4", "24x8", "56x2", "16x8+16x4+8x2", "40x16"])
def test_every_number_of_bits(library, dtype, latents):
    assert Case(library, [150, 61], dtype, latents=latents).error() < BARS[dtype]


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 0), (64, 20), (96, 96), (128, 64), (128, 128), (256, 64)])
def test_head_sizes_and_rotations(library, head_dim, rotary_dim):
    case = Case(library, [90], head_dim=head_dim, rotary_dim=rotary_dim, kv_heads=1, latents="24x4+8x8")
    assert case.error() < BARS[BFLOAT]


@pytest.mark.parametrize(("group", "neighbors", "softcap"), [(1, 1, 0.0), (6, 3, 2.0), (7, 4, 0.0), (11, 2, 3.0)])
def test_groups_neighbors_and_softcap(library, group, neighbors, softcap):
    case = Case(library, [61, 93], HALF, group, kv_heads=2, neighbors=neighbors, softcap=softcap)
    assert case.error() < BARS[HALF]


@pytest.mark.parametrize("latents", ["512x4", "264x2+248x4", "152x8+200x4+128x2"])
def test_latents_of_hundreds_of_values(library, latents):
    """The last two are more than the kernel keeps on chip."""
    case = Case(library, [100], head_dim=128, kv_heads=2, latents=latents, rotary_dim=128)
    assert case.error() < BARS[BFLOAT]


def test_sequences_of_several_splits_and_of_none(library):
    case = Case(library, [330, 5, 0, 29])
    assert case.error() < BARS[BFLOAT]


def test_only_selected_rows_are_read_in_any_order(library):
    case = Case(library, [300, 120, 20, 60], kv_heads=2, select_count=8)
    draw = np.random.default_rng(1)
    selected = [draw.permutation(280)[:140].tolist(), draw.permutation(96)[:31].tolist(), [], [3]]
    assert case.error(selected) < BARS[BFLOAT]


def test_selected_rows_that_are_not_stored_are_left_out(library):
    case = Case(library, [100], select_count=8)
    tokens = case.tokens()
    wanted = case.expected(*tokens, [[4, 9, 2]])
    assert relative(case.step(tokens, [[4, 99999, 9, -1, 2, 80]]), wanted) < BARS[BFLOAT]


def test_results_do_not_depend_on_the_batch_or_the_launch(library):
    def run(lengths: list[int], first: int) -> Tensor:
        case = Case(library, lengths, HALF, 3, seed=first)
        return case.step(case.tokens(first + 50))

    both = run([170, 333], 0)
    assert torch.equal(run([170, 333], 0), both)
    assert torch.equal(run([333], 1)[0], both[1])


def test_a_sequence_without_a_new_token_gives_zeros(library):
    case = Case(library, [100, 60])
    out = step(case.native, *case.tokens(), new=[0, 1])
    assert not out[0].any()
    assert out[1].isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "latents", "group", "neighbors", "rotary_dim", "softcap"),
    [
        (BFLOAT, "512x4", 4, 2, 128, 0.0),
        (HALF, "480x4", 7, 1, 64, 2.0),
        (BFLOAT, "256x4", 8, 4, 16, 0.0),
        (HALF, "96x4", 1, 3, 0, 0.0),
    ],
)
def test_the_kernel_of_sm90(library, sm90, dtype, latents, group, neighbors, rotary_dim, softcap):
    lengths = [61, 330, 5, 0, 170]
    case = Case(library, lengths, dtype, group, rotary_dim, softcap, latents=latents, neighbors=neighbors, **sm90)
    assert case.error() < BARS[dtype]


def test_the_kernel_of_sm90_reads_selected_rows_in_any_order(library, sm90):
    def case() -> Case:
        return Case(library, [300, 120, 20, 60], latents="96x4", select_count=8, **sm90)

    draw = np.random.default_rng(1)
    selected = [draw.permutation(280)[:260].tolist(), draw.permutation(96)[:31].tolist(), [], [3]]
    assert case().error(selected) < BARS[BFLOAT]
    tokens = case().tokens()
    wanted = case().step(tokens, [[4, 9, 2], [1], [], [3]])
    assert torch.equal(case().step(tokens, [[4, 9, 2, 99999, -1, 280], [1, 96], [], [3]]), wanted)


def test_results_of_the_kernel_of_sm90_do_not_depend_on_the_batch(library, sm90):
    def run(lengths: list[int], first: int) -> Tensor:
        case = Case(library, lengths, HALF, 3, seed=first, latents="96x4", **sm90)
        return case.step(case.tokens(first + 50))

    both = run([170, 333], 0)
    assert torch.equal(run([170, 333], 0), both)
    assert torch.equal(run([333], 1)[0], both[1])


def test_the_kernel_of_sm90_stores_new_tokens_and_nothing_of_an_idle_sequence(library, sm90):
    lengths = [100, 60, 0]
    case = Case(library, lengths, latents="96x4", **sm90)
    q, k, v = case.tokens()
    ring = case.native.states["ring"].view(torch.int16)
    wanted = ring.clone()
    for b in (0, 2):
        row = int(case.config.geometry().slot(np.array([lengths[b]]))[0])
        wanted[b, 0, row] = torch.cat((k[b].flatten(), v[b].flatten())).view(torch.int16)
    out = step(case.native, q, k, v, new=[1, 0, 1])
    assert not out[1].any()
    assert out[[0, 2]].isfinite().all()
    assert torch.equal(ring, wanted)
