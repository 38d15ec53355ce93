"""DeltaKVAttention's kernels, emulated, against the float32 reference: what they store and what they attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import pytest
import torch
from native import emulated, relative, step
from ops import twice

from plugins.deltakv import onnx_body
from plugins.deltakv.config import DeltaKVConfig
from plugins.deltakv.reference import LayerCache, LayerCodec, Rows, stored_rows
from plugins.layer import LayerSpec
from plugins.native.layer import NativeLayer
from plugins.native.nodes import uncovered

HALF, BFLOAT = torch.float16, torch.bfloat16
BARS = {HALF: 5e-3, BFLOAT: 1e-2}
TIE = 1e-4
CAPACITY = 320
SMALL = {"head_dim": 64, "kv_heads": 2, "latents": "32x4", "stride": 5, "neighbors": 2, "full_layers": (),
         "sinks": 4, "window": 16, "block": 8}  # fmt: skip


@pytest.fixture(scope="module")
def library():
    return emulated()


def rope_tables(rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [CAPACITY, rotary_dim / 2]."""
    angle = torch.arange(CAPACITY)[:, None] * 0.8 ** torch.arange(rotary_dim // 2)
    return angle.cos(), angle.sin()


def spec_of(config: DeltaKVConfig, group: int = 2, rotary_dim: int = 64, **changes: float) -> LayerSpec:
    heads, rope = config.kv_heads, 0 if rotary_dim else None
    scale = config.head_dim**-0.5
    return LayerSpec(0, heads * group, heads, config.head_dim, scale, rope=rope, rotary_dim=rotary_dim, **changes)


def codec_of(config: DeltaKVConfig, mean: float) -> LayerCodec:
    """A projection on random axes and back; the centre is near the tokens' mean."""
    generator = torch.Generator().manual_seed(3)
    axes = torch.linalg.qr(torch.randn(config.width, config.latent_dim, generator=generator))[0]
    center = mean * means(config.width) + 0.1 * torch.randn(config.width, generator=generator)
    tensors = {"center": center, "compress": axes.contiguous(), "decompress": axes.T.contiguous()}
    for name, shape in LayerCodec.shapes(config, config.kv_heads).items():
        if name not in tensors:
            tensors[name] = torch.randn(shape, generator=generator) * shape[0] ** -0.5
    return LayerCodec.from_tensors(config, tensors)


def means(width: int) -> torch.Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(7))


@dataclass
class Pair:
    """The native layer and the reference of each of its sequences, fed the same tokens: words that recur, and noise."""

    native: NativeLayer
    references: list[LayerCache]
    config: DeltaKVConfig
    spec: LayerSpec
    mean: float
    generator: torch.Generator

    def tokens(self, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h, d = self.spec.num_kv_heads, self.spec.head_dim
        words = torch.randn(12, self.config.width, generator=torch.Generator().manual_seed(5))
        picked = torch.randint(12, (batch, length), generator=self.generator)
        x = words[picked] + 0.7 * torch.randn(batch, length, self.config.width, generator=self.generator)
        x = x + self.mean * means(self.config.width)
        k, v = x.view(batch, length, 2, h, d).permute(2, 0, 3, 1, 4)
        q = torch.randn(batch, self.spec.num_heads, length, d, generator=self.generator)
        return tuple(t.contiguous().to(self.native.dtype) for t in (q, k, v))

    def step(self, new: list[int]) -> float:
        """The largest relative difference of a sequence's output; the reference reads the rows that we stored."""
        q, k, v = self.tokens(len(new), max(new))
        given = [self.rows(b, len(cache.stored.codes[0])) for b, cache in enumerate(self.references)]
        out, worst = step(self.native, q, k, v, new=new), 0.0
        for b, n in enumerate(new):
            assert (out[b, :, n:] == 0).all()
            if n:
                parts = (x[b : b + 1, :, :n].float() for x in (q, k, v))
                worst = max(worst, relative(out[b, :, :n], self.references[b].step(*parts, given=given[b])[0]))
        return worst

    def rows(self, sequence: int, count: int) -> Rows:
        states = self.native.states
        names = [name for name in ("latents", "scales", "index") if name in states]
        return stored_rows(self.config, {name: states[name][sequence, :, :count] for name in names})

    def check_rows(self) -> None:
        """What is stored is the reference's but for ties."""
        for b, cache in enumerate(self.references):
            count = cache.stored.codes.shape[1]
            total, wrong, flips = cache.compare(self.rows(b, count), TIE)
            assert count > 0 and wrong == 0 and flips <= 0.01 * total
            kept = self.native.states["references"][b, 0, : -(-count // self.config.stride)]
            sinks, stride = self.config.sinks, self.config.stride
            assert torch.equal(kept.float(), cache.rows[0, sinks : sinks + count : stride])


def pair(
    library: Any, dtype: torch.dtype, batch: int = 2, mean: float = 1.0, limit: int = 1 << 17, **changes: Any
) -> Pair:
    layer = {name: changes.pop(name) for name in ("group", "rotary_dim", "softcap") if name in changes}
    config = DeltaKVConfig(**(SMALL | changes))
    spec, codec = spec_of(config, **layer), codec_of(config, mean)
    rope = rope_tables(spec.rotary_dim) if spec.rotary_dim else None
    plan = onnx_body.plan(spec, config, ir.DataType.FLOAT16, limit)
    native = NativeLayer(
        library, plan, spec, onnx_body.tables(codec), batch, CAPACITY, config.geometry(), dtype, "cpu", rope
    )
    caches = [LayerCache(spec, twice(rope) if rope else None, codec, dtype) for _ in range(batch)]
    return Pair(native, caches, config, spec, mean, torch.Generator().manual_seed(1))


VARIANTS: dict[str, dict[str, Any]] = {
    "4 bits": {},
    "segments, three neighbours": {"latents": "8x8+16x4+24x2", "neighbors": 3, "rotary_dim": 32},
    "16 bits, one neighbour": {"latents": "40x16", "neighbors": 1, "stride": 1, "rotary_dim": 0},
    "four neighbours, wide indices": {"neighbors": 4, "limit": 1 << 18, "stride": 3, "softcap": 5.0},
    "swiglu": {"compressor": "swiglu", "hidden": 72, "latents": "32x8"},
    "far from the origin": {"mean": 30.0, "latents": "32x8"},
}


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts_and_chunks_attend_and_store_as_the_reference(library: Any, variant: str, dtype: torch.dtype) -> None:
    both = pair(library, dtype, **VARIANTS[variant])
    for new in ([90, 41], [3, 30], [0, 9]):
        assert both.step(new) < BARS[dtype]
    both.check_rows()


@pytest.mark.parametrize(("head_dim", "rotary_dim", "group"), [(96, 96, 1), (128, 64, 4), (256, 256, 1)])
def test_heads_of_every_size(library: Any, head_dim: int, rotary_dim: int, group: int) -> None:
    sizes = {"head_dim": head_dim, "kv_heads": 1, "rotary_dim": rotary_dim, "group": group}
    both = pair(library, HALF, **sizes)
    for new in ([60, 35], [2, 20]):
        assert both.step(new) < BARS[HALF]
    both.check_rows()


def test_more_references_than_a_tile_holds(library: Any) -> None:
    both = pair(library, BFLOAT, batch=1, stride=2)
    assert both.step([310]) < BARS[BFLOAT]
    both.check_rows()
    assert both.native.states["index"].max() > 128 + 4


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
def test_single_tokens_attend_and_encode_as_the_reference(library: Any, dtype: torch.dtype) -> None:
    both = pair(library, dtype, latents="16x8+16x4")
    for new in ([75, 58], *[[1, 1]] * 9):
        assert both.step(new) < BARS[dtype]
    both.check_rows()


def stored(both: Pair, sequence: int) -> dict[str, torch.Tensor]:
    """The used rows of every state."""
    count = both.config.geometry().encoded(int(both.native.lengths[sequence]))
    rows = {"references": -(-count // both.config.stride), "ring": both.config.geometry().dense_rows}
    return {n: x[sequence, 0, : rows.get(n, count)] for n, x in both.native.states.items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


def test_chunks_of_any_size_store_the_same_bits(library: Any) -> None:
    length, found = 95, []
    tokens = pair(library, BFLOAT, batch=1).tokens(1, length)
    for sizes in ([length], [44, 50, 1], [86, *[1] * 9]):
        both, first = pair(library, BFLOAT, batch=1), 0
        for size in sizes:
            step(both.native, *(x[:, :, first : first + size].contiguous() for x in tokens))
            first += size
        found.append(stored(both, 0))
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])


def test_a_sequence_is_the_same_to_the_bit_in_any_batch(library: Any) -> None:
    together, alone = pair(library, HALF, batch=3), pair(library, HALF, batch=1)
    for new in ([100, 33, 50], [40, 1, 12]):
        q, k, v = together.tokens(3, max(new))
        out = step(together.native, q, k, v, new=new)[2, :, : new[2]]
        assert torch.equal(out, step(alone.native, *(x[2:, :, : new[2]] for x in (q, k, v)))[0])
    assert_equal(stored(together, 2), stored(alone, 0))


def test_equal_references_are_named_from_the_lowest_and_a_reference_itself(library: Any) -> None:
    both = pair(library, HALF, batch=1, neighbors=3, stride=2)
    ones = [torch.ones(1, heads, 90, 64, dtype=HALF) for heads in (4, 2, 2)]
    step(both.native, *ones)
    index = stored(both, 0)["index"]
    own = torch.arange(len(index)) % 2 == 0
    assert (index[~own] == torch.tensor([0, 1, 2])).all()
    assert (index[own] == 4 + torch.arange(int(own.sum()))[:, None]).all()
    assert (stored(both, 0)["scales"] == 0).all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"compressor": "swiglu", "hidden": 60}, "hidden=60"),
        ({"reference_bits": 8}, "reference_bits=8"),
        ({"neighbors": 5, "sinks": 5}, "neighbors=5"),
        ({"latents": "20x16"}, "latents=20x16"),
        ({"kv_heads": 33}, "4224 numbers per token"),
    ],
)
def test_what_has_no_kernels_is_refused_in_a_sentence(library: Any, changes: dict[str, Any], reason: str) -> None:
    config = DeltaKVConfig(**(SMALL | changes))
    plan = onnx_body.plan(spec_of(config), config, ir.DataType.FLOAT16)
    assert reason in uncovered(library, plan.op, plan.attributes, "float16")
