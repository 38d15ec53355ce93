"""The uncompressed attention that is installed beside kvpack: what a compressed cache has to beat.

A baseline makes, from one instance of random keys and values, a call that attends with one query per sequence. One that
cannot run on this machine raises; the bench then says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from plugins.layer import LayerSpec

PAGE = 64  # tokens of a page, where caches are paged
SCRATCH = 256 << 20  # bytes that FlashInfer is given
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """One decode step of an uncompressed layer: length stored tokens of each of batch sequences."""

    spec: LayerSpec
    batch: int
    length: int
    dtype: torch.dtype

    def cache_bytes(self, itemsize: int = 2) -> int:
        return 2 * self.batch * self.spec.num_kv_heads * self.length * self.spec.head_dim * itemsize

    def draw(self, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        drawn = torch.empty(sizes, dtype=self.dtype, device="cuda").normal_()
        return drawn if dtype is None else drawn.to(dtype)

    def query(self) -> torch.Tensor:
        """[B, Hq, 1, D]."""
        return self.draw(self.batch, self.spec.num_heads, 1, self.spec.head_dim)

    def heads_first(self) -> list[torch.Tensor]:
        """Keys and values, [B, H, N, D] each."""
        return [self.draw(self.batch, self.spec.num_kv_heads, self.length, self.spec.head_dim) for _ in range(2)]

    def tokens_first(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Keys and values, [B, N, H, D] each."""
        sizes = (self.batch, self.length, self.spec.num_kv_heads, self.spec.head_dim)
        return [self.draw(*sizes, dtype=dtype) for _ in range(2)]


@dataclass(frozen=True)
class Baseline:
    """name: the row of the table. itemsize: bytes of a cached value, 2 or 1. make: the call of one problem."""

    name: str
    itemsize: int
    make: Callable[[Problem], Call]


def _sdpa(backend: SDPBackend, packed: bool = False) -> Callable[[Problem], Call]:
    """torch's attention. packed: a KV head's query heads as so many queries, instead of `enable_gqa`."""

    def make(problem: Problem) -> Call:
        query, (key, value), spec = problem.query(), problem.heads_first(), problem.spec
        if packed:
            query = query.reshape(problem.batch, spec.num_kv_heads, spec.group, spec.head_dim)

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(query, key, value, scale=spec.scale, enable_gqa=not packed)

        return call

    return make


def _flash(module: str, dtype: torch.dtype | None = None) -> Callable[[Problem], Call]:
    """FlashAttention 3 (flash_attn_interface) or 2 (flash_attn); dtype: of queries and cache, the problem's if None."""

    def make(problem: Problem) -> Call:
        attend = import_module(module).flash_attn_with_kvcache
        chosen = dtype or problem.dtype
        key, value = problem.tokens_first(chosen)
        query = problem.query().transpose(1, 2).contiguous().to(chosen)  # [B, 1, Hq, D]
        lengths = torch.full((problem.batch,), problem.length, dtype=torch.int32, device="cuda")
        scale = problem.spec.scale
        return lambda: attend(query, key, value, cache_seqlens=lengths, softmax_scale=scale, causal=True)

    return make


def _flashinfer(dtype: torch.dtype | None = None) -> Callable[[Problem], Call]:
    """FlashInfer's paged decoding on tensor cores; dtype: of the cache, the problem's if None."""

    def make(problem: Problem) -> Call:
        wrapper_class = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
        spec, chosen = problem.spec, dtype or problem.dtype
        pages = -(-problem.length // PAGE)
        sizes = (problem.batch * pages, spec.num_kv_heads, PAGE, spec.head_dim)
        key, value = (problem.draw(*sizes, dtype=chosen) for _ in range(2))
        query = problem.query().squeeze(2)
        whole = {"dtype": torch.int32, "device": "cuda"}
        indptr = torch.arange(problem.batch + 1, **whole) * pages
        indices = torch.arange(problem.batch * pages, **whole)
        last = torch.full((problem.batch,), problem.length - (pages - 1) * PAGE, **whole)
        wrapper = wrapper_class(
            torch.zeros(SCRATCH, dtype=torch.uint8, device="cuda"), "HND", use_cuda_graph=True, use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr.clone(), paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )  # fmt: skip
        wrapper.plan(
            indptr, indices, last, spec.num_heads, spec.num_kv_heads, spec.head_dim, PAGE,
            q_data_type=problem.dtype, kv_data_type=chosen, sm_scale=spec.scale,
        )  # fmt: skip
        return lambda: wrapper.run(query, (key, value))

    return make


BASELINES = (
    Baseline("torch SDPA, cuDNN", 2, _sdpa(SDPBackend.CUDNN_ATTENTION)),
    Baseline("torch SDPA, cuDNN, heads packed", 2, _sdpa(SDPBackend.CUDNN_ATTENTION, packed=True)),
    Baseline("torch SDPA, flash", 2, _sdpa(SDPBackend.FLASH_ATTENTION)),
    Baseline("torch SDPA, flash, heads packed", 2, _sdpa(SDPBackend.FLASH_ATTENTION, packed=True)),
    Baseline("FlashAttention-3", 2, _flash("flash_attn_interface")),
    Baseline("FlashAttention-2", 2, _flash("flash_attn")),
    Baseline("FlashInfer", 2, _flashinfer()),
    Baseline("FlashAttention-3, fp8", 1, _flash("flash_attn_interface", torch.float8_e4m3fn)),
    Baseline("FlashInfer, fp8 cache", 1, _flashinfer(torch.float8_e4m3fn)),
)


def causal_flash(spec: LayerSpec, batch: int, length: int, dtype: torch.dtype) -> Call:
    """torch's flash attention over a whole prompt: what a prefill is compared with."""
    problem = Problem(spec, batch, length, dtype)
    query = problem.draw(batch, spec.num_heads, length, spec.head_dim)
    key, value = problem.heads_first()

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=spec.scale, enable_gqa=spec.group > 1
            )

    return call
