"""The native kernels on a GPU, every op step by step beside its float32 reference. Skipped where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from engines import random_compressor, random_means, random_quantisers
from native import relative, step, tokens_first
from trt_plugins import Harness, Plugin, check_elementwise, compiled

from plugins.config import MethodConfig
from plugins.deltakv.config import DeltaKVConfig
from plugins.dense import onnx_body as dense
from plugins.dense.reference import LayerCache as DenseCache
from plugins.geometry import Geometry
from plugins.intkv.config import Int3Config, Int4Config, Int8Config, KIVI2Config
from plugins.layer import LayerSpec
from plugins.methods import folder, onnx_body, reference
from plugins.native.abi import Library
from plugins.native.layer import NativeLayer
from plugins.native.library import default_path
from plugins.vqkv.config import VQKVConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICE = "cuda"
BAR = {torch.float16: 5e-3, torch.bfloat16: 1e-2}  # norm of the difference over the norm
KINDS = {torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16}
LIMIT = 8192
TIE = {torch.float16: 1e-4, torch.bfloat16: 1e-3}  # relative gaps; what is coded may round to the next bf16, 4e-3 away
TABLES = {"vqkv": random_quantisers, "deltakv": random_compressor, "intkv": random_means}
SMALL = {"sinks": 4, "window": 64, "block": 32}


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(os.environ.get("KVPACK_LIBRARY") or default_path())


@pytest.fixture(scope="module")
def harness(library: Library) -> Harness:
    return Harness(compiled(library.path, emulated=False))


def spec(head_dim: int = 128, heads: int = 2, group: int = 4, **changes: Any) -> LayerSpec:
    values = {"rope": 0, "rotary_dim": head_dim} | changes
    return LayerSpec(0, heads * group, heads, head_dim, head_dim**-0.5, **values)


def rope_tables(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [LIMIT, dim / 2]."""
    angle = torch.arange(LIMIT)[:, None] * 10000.0 ** (-torch.arange(dim // 2) / (dim / 2))
    return angle.cos(), angle.sin()


def smooth(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Random tokens [B, H, S, D] with a common mean, as keys and values have."""
    x = torch.randn(shape, generator=generator)
    return (x + 0.5 * torch.randn(1, shape[1], 1, shape[3], generator=generator)).to(dtype)


class Pair:
    """A layer on the GPU beside a reference per sequence. config: None for a dense layer."""

    def __init__(
        self,
        library: Library,
        layer: LayerSpec,
        config: MethodConfig | None,
        dtype: torch.dtype,
        batch: int,
        capacity: int = LIMIT,
        observes: Geometry | None = None,
    ) -> None:
        self.spec, self.config, self.dtype, self.batch = layer, config, dtype, batch
        self.generator = torch.Generator().manual_seed(7)
        tables = rope_tables(layer.rotary_dim) if layer.rotary_dim else None
        rope = None if tables is None else tuple(torch.cat((x, x), -1) for x in tables)
        geometry = observes
        if config is None:
            plan, arrays = dense.plan(layer, KINDS[dtype], observes), {}
            self.references = [DenseCache(layer, rope, dtype) for _ in range(batch)]
        else:
            codec = TABLES[folder(config.METHOD)](config, layer, torch.Generator().manual_seed(1))
            body, geometry = onnx_body(config.METHOD), config.geometry()
            plan, arrays = body.plan(layer, config, KINDS[dtype], LIMIT), body.tables(codec)
            self.references = [reference(config.METHOD).LayerCache(layer, rope, codec, dtype) for _ in range(batch)]
        self.native = NativeLayer(library, plan, layer, arrays, batch, capacity, geometry, dtype, DEVICE, tables)
        self.geometry = geometry

    def fresh(self, length: int) -> tuple[torch.Tensor, ...]:
        """q, k, v of a step, on the CPU."""
        heads = (self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads)
        return tuple(smooth((self.batch, h, length, self.spec.head_dim), self.generator, self.dtype) for h in heads)

    def selection(self, length: int) -> torch.Tensor | None:
        """Distinct random code rows, int32 [B, M]."""
        if not getattr(self.config, "selects", False) or length > 1:
            return None
        past = self.native.lengths
        count, width = self.geometry.selection(past, int(past.max()), True)
        room, rows = int(width), []
        for stored, some in zip(self.geometry.encoded(past.astype(np.int64)), count, strict=True):
            order = torch.randperm(int(stored), generator=self.generator)[: int(some)]
            rows.append(torch.cat((order, torch.zeros(room - len(order), dtype=order.dtype))))
        return torch.stack(rows).int()

    def step(self, counts: Sequence[int]) -> float:
        """Append counts[b] tokens; the relative error of the real rows' output."""
        length = max(counts)
        q, k, v = self.fresh(length)
        chosen, given = self.selection(length), [self.given(b) for b in range(self.batch)]
        past = self.native.lengths.copy()
        out = step(self.native, *(x.to(DEVICE) for x in (q, k, v)), new=counts, selected=chosen).cpu().float()
        wrong = total = 0.0
        for b, new in enumerate(counts):
            assert not out[b, :, new:].any()
            if not new:
                continue
            extra: dict[str, Any] = {} if self.config is None else {"given": given[b]}
            if chosen is not None:
                extra["selected"] = chosen[b, : int(self.geometry.selected(past[b : b + 1])[0])].long()
            wanted = self.references[b].step(*(x[b : b + 1, :, :new].float() for x in (q, k, v)), **extra)[0]
            wrong += float((out[b, :, :new] - wanted).square().sum())
            total += float(wanted.square().sum())
        return (wrong / total) ** 0.5

    def given(self, b: int) -> Any:
        """The codes that sequence b has stored, as its reference takes them."""
        if self.config is None:
            return None
        state, length = {}, int(self.native.lengths[b])
        for name, (_, shape) in self.native.plan.states.items():
            tensor = self.native.states[name][b].cpu()
            rows = {"code_rows": self.geometry.encoded(length), "code_tiles": self.geometry.encoded(length) // 16}
            rows["ref_rows"] = self.geometry.references(length)
            if shape[2] in rows:
                state[name] = tensor[:, : rows[shape[2]]]
        return reference(self.config.METHOD).stored_rows(self.config, state)

    def different_codes(self) -> int:
        """Stored numbers that differ from the references' own, flipped ties aside."""
        total = wrong = 0
        for b, one in enumerate(self.references):
            found = one.compare(self.given(b), TIE[self.dtype])
            total, wrong = total + found[0], wrong + found[1]
        assert total
        return wrong


VQ = {"k_groups": 32, "v_groups": 32, "k_stages": (32,), "v_stages": (32,)}
CONFIGS: dict[str, Callable[[LayerSpec], MethodConfig]] = {
    "vqkv pre_rope": lambda s: VQKVConfig.from_ratio(0.172, s.head_dim, **SMALL),
    "vqkv post_rope": lambda s: VQKVConfig.from_ratio(0.125, s.head_dim, key_space="post_rope", **SMALL),
    "vqkv one group": lambda s: VQKVConfig(
        s.head_dim, 1, 1, (1,) * 5, (1,) * 3, key_space="post_rope", tables="layer", **SMALL
    ),
    "vqkv tiles": lambda s: VQKVConfig.from_ratio(0.172, s.head_dim, **SMALL).override(["layout=tiles"]),
    "deltakv": lambda s: DeltaKVConfig(s.head_dim, s.num_kv_heads, "64x8+64x4+32x2", **(SMALL | {"sinks": 8})),
    "deltakv selects": lambda s: DeltaKVConfig(
        s.head_dim, s.num_kv_heads, "128x4", neighbors=4, select_fraction=0.3, **(SMALL | {"sinks": 8})
    ),
    "int8": lambda s: replace(Int8Config(s.head_dim), **SMALL),
    "int4": lambda s: replace(Int4Config(s.head_dim), **SMALL),
    "int3": lambda s: replace(Int3Config(s.head_dim), **SMALL),
    "kivi2": lambda s: replace(KIVI2Config(s.head_dim), **SMALL),
}
# ragged prompts around the boundaries of window, block and tile, chunks on a past, idle sequences, single tokens
STEPS = [[100, 3, 515], [1, 1, 1], [0, 96, 30], [1, 0, 1], [200, 1, 700], *[[1, 1, 1]] * 40]
LONG = [[2052, 1027, 3075], *[[1, 1, 1]] * 4]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("head_dim", "group", "window", "softcap"),
    [(128, 4, 0, 0.0), (64, 3, 0, 30.0), (96, 1, 0, 0.0), (256, 2, 0, 0.0), (128, 7, 100, 0.0), (64, 16, 33, 0.0)],
)
def test_dense_attention_equals_the_reference(
    library: Library, head_dim: int, group: int, window: int, softcap: float, dtype: torch.dtype
) -> None:
    pair = Pair(library, spec(head_dim, 2, group, window=window, softcap=softcap), None, dtype, 3)
    assert max(pair.step(counts) for counts in STEPS + LONG) < BAR[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (64, 6), (96, 1), (256, 2), (128, 7), (64, 16), (128, 1)])
@pytest.mark.parametrize("method", CONFIGS)
def test_compressed_attention_and_what_it_stores_equal_the_reference(
    library: Library, method: str, head_dim: int, group: int, dtype: torch.dtype
) -> None:
    layer = spec(head_dim, 2, group)
    try:
        pair = Pair(library, layer, CONFIGS[method](layer), dtype, 3)
    except Exception as error:  # noqa: BLE001
        pytest.skip(str(error))
    if reason := library.supported(pair.native.op, pair.native.layer, pair.native.structure):
        pytest.skip(reason)
    worst = max(pair.step(counts) for counts in STEPS)
    assert worst < BAR[dtype]
    assert pair.different_codes() == 0
    assert max(pair.step(counts) for counts in LONG) < BAR[dtype]


@pytest.mark.parametrize("length", [67, 68, 69, 99, 100, 101, 131, 132, 133, 195, 196, 197, 579, 580, 581])
@pytest.mark.parametrize("method", CONFIGS)
def test_lengths_at_every_boundary_decode_as_the_reference(library: Library, method: str, length: int) -> None:
    layer = spec()
    pair = Pair(library, layer, CONFIGS[method](layer), torch.bfloat16, 1, capacity=1024)
    if reason := library.supported(pair.native.op, pair.native.layer, pair.native.structure):
        pytest.skip(reason)
    assert max(pair.step([n]) for n in (length, 1, 1)) < BAR[torch.bfloat16]


@pytest.mark.parametrize("method", [None, *CONFIGS])
def test_results_are_the_same_bits_over_relaunches_and_in_any_batch(library: Library, method: str | None) -> None:
    """With codes in tiles the size of the batch counts, too: the same bits in any place of a batch of one size."""
    layer = spec()
    config = CONFIGS[method](layer) if method else None
    together, alone = (Pair(library, layer, config, torch.bfloat16, n) for n in (3, 1))
    if reason := library.supported(together.native.op, together.native.layer, together.native.structure):
        pytest.skip(reason)
    step(together.native, *(x.to(DEVICE) for x in together.fresh(1500)), new=[700, 1500, 1111])
    q, k, v = (x.to(DEVICE) for x in together.fresh(1))
    chosen = together.selection(1)
    before = {name: tensor.clone() for name, tensor in together.native.states.items()}
    lengths = together.native.lengths.copy()
    outs = []
    for _ in range(5):
        for name, tensor in together.native.states.items():
            tensor.copy_(before[name])
        together.native.lengths = lengths.copy()
        outs.append(step(together.native, q, k, v, selected=chosen))
    assert all(torch.equal(outs[0], out) for out in outs)
    for b in range(3):
        for name, tensor in alone.native.states.items():
            tensor.copy_(before[name][b : b + 1])
        alone.native.lengths = lengths[b : b + 1].copy()
        one = None
        if chosen is not None:
            count = int(together.geometry.selected(lengths[b : b + 1])[0])
            one = chosen[b : b + 1, : -(-count // 32) * 32]
        out = step(alone.native, *(x[b : b + 1] for x in (q, k, v)), selected=one)
        if method == "vqkv tiles":
            assert relative(out[0].float(), outs[0][b].float()) < BAR[torch.bfloat16]
        else:
            assert torch.equal(out[0], outs[0][b])
    order = [2, 0, 1]
    for name, tensor in together.native.states.items():
        tensor.copy_(before[name][order])
    together.native.lengths = lengths[order]
    moved = step(together.native, *(x[order] for x in (q, k, v)), selected=None if chosen is None else chosen[order])
    assert torch.equal(moved, outs[0][order])


@pytest.mark.parametrize("through", ["library", "TensorRT's plugins"])
@pytest.mark.parametrize("method", [None, *CONFIGS])
def test_a_captured_step_replayed_at_other_lengths_equals_the_eager_one(
    library: Library, method: str | None, through: str, request: pytest.FixtureRequest
) -> None:
    layer = spec()
    config = CONFIGS[method](layer) if method else None
    pair = Pair(library, layer, config, torch.bfloat16, 2)
    native = pair.native
    if reason := library.supported(native.op, native.layer, native.structure):
        pytest.skip(reason)
    if through != "library":
        native.launch = Plugin(request.getfixturevalue("harness"), native)
    step(native, *(x.to(DEVICE) for x in pair.fresh(900)), new=[900, 333])
    q, k, v = (tokens_first(x.to(DEVICE)) for x in pair.fresh(1))
    chosen, ones = pair.selection(1), np.ones(2, np.int32)
    before = {name: tensor.clone() for name, tensor in native.states.items()}
    lengths = native.lengths.copy()
    native.lengths = np.array([300, 100], np.int32)
    fixed, out = native.feeds(ones, 1, chosen), torch.empty_like(q)
    fixed["enc_src"], fixed["enc_dst"] = (x[:, :0] for x in (fixed["enc_src"], fixed["enc_dst"]))
    native.launch(q, k, v, out, fixed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native.launch(q, k, v, out, fixed)
    for now in (lengths, lengths - 40):
        native.lengths = now
        feeds = native.feeds(ones, 1, chosen)
        if feeds["enc_src"].shape[1]:
            continue
        for name, tensor in native.states.items():
            tensor.copy_(before[name])
        for name in ("past_len", "select_len"):
            if name in feeds:
                fixed[name].copy_(feeds[name])
        graph.replay()
        replayed = out.clone()
        for name, tensor in native.states.items():
            tensor.copy_(before[name])
        eager = torch.empty_like(q)
        native.launch(q, k, v, eager, feeds)
        assert torch.equal(replayed, eager) and replayed.float().norm() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (64, 6), (96, 1), (256, 2), (128, 7), (64, 16), (128, 1)])
@pytest.mark.parametrize("method", [None, "observing", *CONFIGS])
def test_tensorrt_plugins_write_the_bits_that_the_library_does(
    library: Library, harness: Harness, method: str | None, head_dim: int, group: int, dtype: torch.dtype
) -> None:
    layer = spec(head_dim, 2, group)
    observes = Geometry(sinks=4, window=64, block=32, select_fraction=0.3) if method == "observing" else None
    try:
        config = CONFIGS[method](layer) if method in CONFIGS else None
        wanted, found = (Pair(library, layer, config, dtype, 3, observes=observes) for _ in range(2))
    except Exception as error:  # noqa: BLE001
        pytest.skip(str(error))
    if reason := library.supported(wanted.native.op, wanted.native.layer, wanted.native.structure):
        pytest.skip(reason)
    found.native.launch = Plugin(harness, found.native)
    for counts in STEPS + LONG:
        tokens = [x.to(DEVICE) for x in wanted.fresh(max(counts))]
        chosen = wanted.selection(max(counts))
        outs = [step(pair.native, *tokens, new=counts, selected=chosen) for pair in (wanted, found)]
        assert torch.equal(*outs)
        if observes:
            assert torch.equal(wanted.native.selected, found.native.selected)
    assert (wanted.native.lengths > 0).all() and outs[0].float().norm() > 0
    for name, tensor in wanted.native.states.items():
        rows = tensor.shape[2] - (layer.window == 0)  # but the trash row
        assert torch.equal(tensor[:, :, :rows], found.native.states[name][:, :, :rows]), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (1, 4096), (700, 576), (33, 14336)])
def test_tensorrt_plugins_of_what_lies_between_attentions(
    harness: Harness, rows: int, size: int, dtype: torch.dtype
) -> None:
    check_elementwise(harness, dtype, DEVICE, rows, size)
