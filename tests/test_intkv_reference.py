"""The integer reference and the engines' packed state against quantisers written out number by number."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import make_engine
from families import VOCAB

from calib.record import read
from export.verify import stored_rows as engine_rows
from plugins.attention import rotate
from plugins.intkv.config import Int4Config, IntKVConfig, KIVI2Config
from plugins.intkv.reference import LayerCache, LayerCodec, stored_rows, unpacked
from plugins.layer import LayerSpec
from runtime import Engine

SINKS, DIM, TOKENS = 4, 64, 260


def rounded(values: np.ndarray, bits: int) -> tuple[list[int], float, float]:
    """Codes, scale and zero of the values that share them."""
    low, high = float(min(values)), float(max(values))
    scale = (high - low) / (2**bits - 1)
    return [int(np.rint((float(x) - low) / scale)) for x in values], scale, low


# The Hadamard matrix: entry (i, j) has the sign of the parity of the bits that i and j share.
WALSH = np.array([[(-1) ** bin(i & j).count("1") for j in range(DIM)] for i in range(DIM)]) / math.sqrt(DIM)


def strong_int4(x: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each token of one head [n, D]: its mean taken out, rotated, 4 bits. Codes, and what they are read as."""
    codes, read_back = [], []
    for row in x:
        code, scale, zero = rounded((row - mean) @ WALSH, 4)
        codes.append(code)
        read_back.append((np.array(code) * scale + zero) @ WALSH.T + mean)
    return np.array(codes), np.array(read_back)


def kivi_keys(x: np.ndarray, bits: int = 2, tokens: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """One head [n, D], every channel of every block of tokens by itself."""
    codes, read_back = np.zeros(x.shape, int), np.zeros(x.shape)
    for first in range(0, len(x), tokens):
        for channel in range(x.shape[1]):
            code, scale, zero = rounded(x[first : first + tokens, channel], bits)
            codes[first : first + tokens, channel] = code
            read_back[first : first + tokens, channel] = np.array(code) * scale + zero
    return codes, read_back


def kivi_values(x: np.ndarray, bits: int = 2, group: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """One head [n, D], every group of channels of every token by itself."""
    codes, read_back = np.zeros(x.shape, int), np.zeros(x.shape)
    for token in range(len(x)):
        for first in range(0, x.shape[1], group):
            code, scale, zero = rounded(x[token, first : first + group], bits)
            codes[token, first : first + group] = code
            read_back[token, first : first + group] = np.array(code) * scale + zero
    return codes, read_back


def bytes_to_codes(row: np.ndarray, bits: int) -> list[int]:
    """The codes of one token from its bytes: code i + n * bytes stands in bits n * `bits` and up of byte i."""
    return [((int(byte) + 128) >> (bits * n)) % 2**bits for n in range(8 // bits) for byte in row]


EXPECTED = {
    "int4": (Int4Config(DIM), strong_int4, strong_int4),
    "kivi2": (KIVI2Config(DIM), lambda x, mean: kivi_keys(x), lambda x, mean: kivi_values(x)),
}


@pytest.mark.parametrize("method", EXPECTED)
def test_reference_and_engine_state_equal_quantisers_written_out(method: str, tmp_path: Path) -> None:
    config, *sides = EXPECTED[method]
    changes = {"num_hidden_layers": 1, "head_dim": DIM, "num_attention_heads": 2}
    model, codec = make_engine(tmp_path / "engine", "qwen2", config, **changes)
    ids = np.random.default_rng(0).integers(3, VOCAB, TOKENS).tolist()
    calls = []
    read(model, [ids], lambda call, _: calls.append(call), lambda: None)
    with Engine.open(tmp_path / "engine") as engine, engine.session() as session:
        session.prefill(ids)
        state = {name.removeprefix("0.0."): torch.from_numpy(x) for name, x in engine_rows(session).items()}
    tables, count = codec.layers[0], config.geometry().encoded(TOKENS)
    assert count == 128
    k, v = calls[0].k, calls[0].v
    if config.key_space == "post_rope":
        k = rotate(k, calls[0].cos, calls[0].sin)
    engine_stored = stored_rows(config, state)
    for side, (name, x, expect) in enumerate(zip("kv", (k, v), sides, strict=True)):
        x = x[:, :, SINKS : SINKS + count]
        own = tables.quantised(name, tables.turned(name, x))
        for head in range(2):
            codes, read_back = expect(x[0, head].double().numpy(), tables.center[side, head].double().numpy())
            packed = state[f"codes_{name}"][head].numpy()
            unpacked_here = np.array([bytes_to_codes(row, config.side(name).bits) for row in packed])
            for rows in (own, engine_stored[name]):
                found = rows.codes[0, head].numpy()
                same = found == codes
                assert np.abs(found - codes).max() <= 1 and same.mean() > 0.999  # a rounding the other way
                given = tables.restored(name, rows)[0, head].numpy()
                whole = same.all(-1)  # a rotation spreads one code over the token
                np.testing.assert_allclose(given[whole], read_back[whole], rtol=0, atol=2e-5 * np.abs(read_back).max())
            np.testing.assert_array_equal(unpacked_here, found)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_come_out_of_bytes_in_the_order_they_are_numbered(bits: int) -> None:
    generator = np.random.default_rng(bits)
    size = 3 if bits == 3 else 1
    codes, words = generator.integers(0, 2**bits, (5, 24)), 24 * bits // (8 * size)
    rows = []
    for row in codes:
        word = [sum(int(row[i * words + j]) << (bits * i) for i in range(24 // words)) for j in range(words)]
        rows.append([(value >> (8 * n)) % 256 - 128 for n in range(size) for value in word])
    carrier = torch.tensor(rows, dtype=torch.int8)
    np.testing.assert_array_equal(unpacked(carrier, bits).numpy(), codes)


@pytest.mark.parametrize("config", [IntKVConfig(16, block=8), IntKVConfig(16, block=8, k_axis="channel", k_bits=2)])
def test_whole_sequences_are_approximated_as_the_cache_reads_them(config: IntKVConfig) -> None:
    generator = torch.Generator().manual_seed(0)
    codec = LayerCodec(config, torch.randn(2, 2, 16, generator=generator))
    k, v = (torch.randn(3, 2, 200, 16, generator=generator).half().float() for _ in range(2))
    rebuilt = codec.approximate(k, v, lambda x: x)
    for b in range(3):
        cache = LayerCache(LayerSpec(0, 2, 2, 16, 0.25), None, codec, torch.float16)
        cache.step(torch.zeros(1, 2, 200, 16), k[b : b + 1], v[b : b + 1])
        cache.step(torch.zeros(1, 2, 1, 16), k[b : b + 1, :, :1], v[b : b + 1, :, :1])
        for name, approximate in zip("kv", rebuilt, strict=True):
            read_back = cache.restored[name]
            assert read_back.shape[2] == 64
            torch.testing.assert_close(approximate[b : b + 1, :, 4:68], read_back, rtol=0, atol=1e-5)


def test_a_last_block_that_is_not_whole_is_quantised_by_itself() -> None:
    config = IntKVConfig(16, sinks=4, block=8, k_axis="channel", rotation=False, mean=False)
    codec = LayerCodec(config, torch.zeros(2, 1, 16))
    x = torch.randn(1, 1, 4 + 8 + 3, 16, generator=torch.Generator().manual_seed(1))
    whole, alone = codec.rebuild("k", x), codec.rebuild("k", torch.cat((x[:, :, :4], x[:, :, 12:]), 2))
    torch.testing.assert_close(whole[:, :, 12:], alone[:, :, 4:])
    codec.rebuild("k", x[:, :, :4])  # sinks alone


def test_comparing_counts_wrong_codes_scales_and_shapes() -> None:
    config = IntKVConfig(16, sinks=0, window=1, block=4)
    codec = LayerCodec(config, torch.zeros(2, 2, 16))
    cache = LayerCache(LayerSpec(0, 2, 2, 16, 0.25), None, codec)
    q, k, v = (torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    cache.step(q, k, v)
    own = cache.stored
    total = 2 * 2 * 8 * (16 + 1 + 1)
    assert cache.compare(own) == (total, 0, 0)
    codes = own["k"].codes.clone()
    codes[0, 0, 0, 0] = (codes[0, 0, 0, 0] + 3) % 15
    assert cache.compare(own | {"k": replace(own["k"], codes=codes)}) == (total, 1, 0)
    zeros = own["v"].zeros.clone()
    zeros[0, 1, 2, 0] += 1
    assert cache.compare(own | {"v": replace(own["v"], zeros=zeros)})[1] > 1  # and the codes made from it
    with pytest.raises(ValueError, match="codes of shape"):
        cache.compare(own | {"k": replace(own["k"], codes=codes[:, :, :4])})
