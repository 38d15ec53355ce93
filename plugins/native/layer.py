"""One layer's op run through the native library, with torch tensors: for tests and for the kernels' bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Structure
from dataclasses import dataclass

import numpy as np
import torch

from plugins.contract import LIVE_STEP, state_sizes
from plugins.geometry import Geometry
from plugins.graph import NodePlan
from plugins.layer import LayerSpec
from plugins.native import nodes
from plugins.native.abi import Library, Step

CARRIERS = {"int8": torch.int8, "int16": torch.int16, "int32": torch.int32}
ALIGNMENT = 256


@dataclass(frozen=True)
class Bound:
    """One step of a layer; calling it launches it on torch's current stream. kept: what the structures point to."""

    layer: NativeLayer
    step: Step
    state: Structure
    kept: tuple[object, ...]

    def __call__(self) -> None:
        self.step.stream = torch.cuda.current_stream().cuda_stream if self.layer.device != "cpu" else None
        self.layer.library.attention(self.layer.op, self.layer.layer, self.step, self.state)


class NativeLayer:
    """A layer's state for `batch` sequences with room for `capacity` tokens each, and its steps.

    plan: the layer's node; its 16-bit states are held in `dtype`, float16 or bfloat16. tables: the op's table inputs by
    name, float32. geometry: None for a dense layer. rope: cos and sin, float32 [limit, rotary_dim / 2].
    states: tensors by name. lengths: stored tokens per sequence, int32 [B]. selected: what the last step of an
    observing layer chose, int32 [B, M].
    """

    def __init__(
        self,
        library: Library,
        plan: NodePlan,
        spec: LayerSpec,
        tables: Mapping[str, np.ndarray],
        batch: int,
        capacity: int,
        geometry: Geometry | None,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
        rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.library, self.plan, self.spec, self.geometry = library, plan, spec, geometry
        self.batch, self.capacity, self.dtype, self.device = batch, capacity, dtype, device
        name = str(dtype).removeprefix("torch.")
        self.op, self.layer, self.structure = nodes.describe(plan.op, plan.attributes, name)
        sizes = state_sizes(capacity, geometry, batch)
        self.states = {
            key: torch.zeros(
                [d if isinstance(d, int) else sizes[d] for d in shape],
                dtype=CARRIERS.get(np.dtype(kind.numpy()).name, dtype),
                device=device,
            )
            for key, (kind, shape) in plan.states.items()
        }
        arrays = {key: np.ascontiguousarray(array, np.float32) for key, array in tables.items()}
        self.tables = {key: torch.from_numpy(array).to(device) for key, array in arrays.items()}
        self.rope = None if rope is None else tuple(x.float().contiguous().to(device) for x in rope)
        self.lengths = np.zeros(batch, np.int32)
        self.selected: torch.Tensor | None = None
        self._trash = 0 if geometry is None else int(geometry.encoded(capacity))
        self._bind()
        size = library.prepared(self.op, self.layer, self.structure)
        self.tables["prepared"] = self._buffer(size)
        if size:
            self._prepare()

    def step(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        new: Sequence[int] | None = None,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Append S tokens per sequence, of which the first new[b] are real (None: all): [B, S, Hq * D].

        q [B, S, Hq * D], k and v [B, S, H * D], before RoPE, or all three in q [B, S, (Hq + 2 H) * D]. selected: code
        rows to read, int32 [B, M], where the op selects; None reads the rows 0, 1, ....
        """
        length = q.shape[1]
        counts = np.full(self.batch, length, np.int32) if new is None else np.asarray(new, np.int32)
        feeds = self.feeds(counts, length, selected)
        out = self.output(length)
        self.launch(q, k, v, out, feeds)
        self.lengths = self.lengths + counts
        return out

    def feeds(self, new: np.ndarray, length: int, selected: torch.Tensor | None = None) -> dict[str, object]:
        """What the host gives a step that appends `new` tokens, int32 [B], of `length`: device tensors and numbers."""
        past, geometry = self.lengths, self.geometry
        source = target = np.zeros((self.batch, 0), np.int32)
        live = min(-(-int(past.max()) // LIVE_STEP) * LIVE_STEP, self.capacity)
        feeds: dict[str, object] = {"live": live, "length": length}
        if geometry is not None:
            source, target = geometry.schedule(past, new, self._trash)
            count, width = geometry.selection(past, live, length == 1)
            feeds |= {"select_width": int(width), "select_len": self._tensor(count)}
            if selected is None and self.structure_has("selects"):
                selected = torch.arange(int(width), dtype=torch.int32).expand(self.batch, -1)
        if selected is not None:
            feeds["selected"] = selected.to(torch.int32).contiguous().to(self.device)
        names = ("past_len", "new_len", "enc_src", "enc_dst")
        return feeds | dict(zip(names, map(self._tensor, (past, new, source, target)), strict=True))

    def structure_has(self, name: str) -> bool:
        return bool(getattr(self.structure, name, 0))

    def output(self, length: int) -> torch.Tensor:
        """A place for the outputs of a step of `length` tokens: NaN [B, S, Hq * D]."""
        shape = (self.batch, length, self.spec.num_heads * self.spec.head_dim)
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)

    def launch(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        out: torch.Tensor,
        feeds: Mapping[str, object],
    ) -> None:
        """The bare call, on torch's current stream. Everything must be on the layer's device."""
        self.bound(q, k, v, out, feeds)()

    def bound(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        out: torch.Tensor,
        feeds: Mapping[str, object],
    ) -> Bound:
        """That call with everything prepared, to be made again and again.

        Tokens of q, k and v may lie any number of elements apart, the same in k and v. Raises ValueError.
        """
        step = Step(batch=self.batch, length=feeds["length"], live=feeds["live"])
        state = type(self.structure).from_buffer_copy(self.structure)
        heads = self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads
        sizes = [count * self.spec.head_dim for count in heads]
        given = (q, k, v)
        if k is None and v is None and q.shape[-1] == sum(sizes):
            given = q.split(sizes, dim=-1)
        rows = []
        for name, tensor, size in zip("qkv", given, sizes, strict=True):
            if tensor is None or tensor.shape != (step.batch, step.length, size) or tensor.dtype != self.dtype:
                raise ValueError(f"{name} must be {self.dtype} [{step.batch}, {step.length}, {size}]")
            rows.append(_token_stride(name, tensor))
            setattr(step, name, tensor.data_ptr())
        step.q_row, step.kv_row, v_row = rows
        if v_row != step.kv_row:
            raise ValueError(f"tokens of k and v must lie equally far apart, not {step.kv_row} and {v_row} elements")
        if not out.is_contiguous() or out.dtype != self.dtype:
            raise ValueError(f"out must be contiguous and {self.dtype}")
        step.out = out.data_ptr()
        for name in ("past_len", "new_len", "enc_src", "enc_dst"):
            setattr(step, name, feeds[name].data_ptr())
        step.encode = feeds["enc_src"].shape[1]
        if self.rope is not None:
            step.cos, step.sin = (x.data_ptr() for x in self.rope)
            step.rope_rows = len(self.rope[0])
        selected = feeds.get("selected")
        if self.plan.op == "DenseObservedAttention":
            shape = (self.batch, feeds["select_width"])
            selected = self.selected = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        if selected is not None:
            state.selected, state.select_width = selected.data_ptr(), selected.shape[1]
            state.select_len = feeds["select_len"].data_ptr()
        workspace = self._buffer(self.library.workspace(self.op, self.layer, step, state))
        step.workspace, step.workspace_bytes = workspace.data_ptr(), workspace.numel()
        return Bound(self, step, state, (q, k, v, out, feeds, selected, workspace))

    def fill(self, length: int, seed: int = 0) -> None:
        """Pretend that every sequence stores `length` tokens of plausible random content."""
        generator = torch.Generator(self.device).manual_seed(seed)
        geometry = self.geometry
        for name, tensor in self.states.items():
            if name == "index":
                row = torch.arange(tensor.shape[2], device=self.device)[None, None, :, None]
                last = geometry.sinks + row // geometry.stride
                drawn = torch.rand(tensor.shape, generator=generator, device=self.device)
                tensor.copy_((drawn * (last + 1)).long().minimum(last))
            elif tensor.dtype == torch.int8:
                tensor.random_(-128, 128, generator=generator)
            else:
                tensor.normal_(generator=generator)
                if "scales" in name:
                    tensor.abs_().mul_(0.05)
        self.lengths = np.full(self.batch, length, np.int32)

    def _bind(self) -> None:
        """The addresses of states and tables, and the rows they have, in the structure."""
        state, states = self.structure, self.states
        for name, tensor in states.items():
            field = {"state_k": "k", "state_v": "v"}.get(name, name)
            setattr(state, field, tensor.data_ptr())
        for name, tensor in self.tables.items():
            setattr(state, name, tensor.data_ptr())
        if self.op == "dense":
            state.rows = states["state_k"].shape[2]
        else:
            codes = states["latents" if self.op == "deltakv" else "codes_k"]
            state.code_rows = codes.shape[2]
            if self.structure_has("layout"):
                lookups = sum(self.plan.attributes["k_stages"])
                state.code_rows = codes.shape[2] * codes.shape[3] // lookups
        if self.op == "deltakv":
            state.ref_rows, state.index_bytes = states["references"].shape[2], states["index"].element_size()
        if self.op == "intkv":
            state.scale_rows = states["scales_k"].shape[2]

    def _prepare(self) -> None:
        prepared = self.tables["prepared"].data_ptr()
        stream = torch.cuda.current_stream().cuda_stream if self.device != "cpu" else 0
        self.library.prepare(self.op, self.layer, self.structure, prepared, stream)
        self.structure.prepared = prepared

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(self.device)

    def _buffer(self, size: int) -> torch.Tensor:
        """`size` bytes, aligned, full of NaN."""
        raw = torch.full((size + ALIGNMENT,), 255, dtype=torch.uint8, device=self.device)
        start = -raw.data_ptr() % ALIGNMENT
        return raw[start : start + size]


def _token_stride(name: str, x: torch.Tensor) -> int:
    """Elements from a token of x [B, S, C] to the next; 0 where there is only one."""
    batch, length, _ = x.shape
    if batch * length == 1:
        return 0
    row = x.stride(1) if length > 1 else x.stride(0)
    if x.stride(2) != 1 or row < x.shape[2] or (batch > 1 and x.stride(0) != length * row):
        raise ValueError(f"the tokens of {name} must lie equally far apart, each in one piece")
    return row
