"""What a decode step needs beside the cache, as the operating system counts it."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import make_engine
from real import run

from plugins.deltakv.config import DeltaKVConfig
from plugins.vqkv.config import VQKVConfig

SHORT, LONG = 6_000, 60_000
CONFIGS = {
    "none": None,
    "vqkv, keys before RoPE": VQKVConfig.from_ratio(0.125, 32),
    "vqkv, keys after RoPE": VQKVConfig.from_ratio(0.125, 32, key_space="post_rope"),
    "deltakv": DeltaKVConfig(32, 2, "32x8+64x4", stride=64, full_layers=()),
    "an observing layer": DeltaKVConfig(32, 2, "8x8", stride=200, select_count=32),
}


def decode_scratch(folder: Path, *tokens: int) -> list[int]:
    """For each number of stored tokens the bytes by which a decode step raises the highest resident memory."""
    script = (
        "import sys\n"
        "from runtime import Engine\n"
        "def resident(name):\n"
        "    return int(open('/proc/self/status').read().split(name + ':')[1].split()[0])\n"
        "with Engine.open(sys.argv[1], threads=1) as engine:\n"
        "    for tokens in map(int, sys.argv[2:]):\n"
        "        with engine.session(capacity=tokens + 64) as session:\n"
        "            session.fill(tokens)\n"
        "            session.decode([5])\n"  # whatever stays, RoPE tables for one, is there now
        "            open('/proc/self/clear_refs', 'w').write('5')\n"  # the peak starts anew
        "            before = resident('VmRSS')\n"
        "            session.decode([5])\n"
        "            print(resident('VmHWM') - before)\n"
    )
    # every larger array gets pages of its own, which go back to the system when it is freed
    found = run(script, str(folder), *map(str, tokens), MALLOC_MMAP_THRESHOLD_="65536")
    return [kibibytes * 1024 for kibibytes in found]


@pytest.mark.parametrize("name", CONFIGS)
def test_scratch_of_a_decode_step_does_not_grow_with_the_context(tmp_path: Path, name: str) -> None:
    changes = {"num_hidden_layers": 2, "max_position_embeddings": LONG + 128}
    make_engine(tmp_path / "engine", "llama", CONFIGS[name], {"kv_dtype": "fp16"}, **changes)
    short, long = decode_scratch(tmp_path / "engine", SHORT, LONG)
    print(f"{name}: {short:,} bytes beside {SHORT:,} tokens, {long:,} beside {LONG:,}")
    # one layer's keys and values are 256 bytes a token in half precision; the observing layer has scores, 16 bytes each
    assert long - short < 64 * (LONG - SHORT)
