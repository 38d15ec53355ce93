"""Which engines are fast enough? Time to the first token and per token, engines of one model side by side.

python examples/latency.py none/ engine/ --input-len 1024 --output-len 64 --past 1024 4096
"""

from __future__ import annotations

import argparse
import sys

from plugins.errors import UserError
from runtime import bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="+")
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--past", type=int, nargs="*", default=[1024, 4096], help="stored tokens to decode at")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    try:
        found = bench.latency(
            args.engines,
            input_len=args.input_len,
            output_len=args.output_len,
            past=args.past,
            repeats=args.repeats,
            threads=args.threads,
            progress_bar=True,
        )
    except UserError as error:
        sys.exit(f"error: {error}")
    first = found["engines"][0]["label"]
    for entry in found["engines"]:
        itl, ratios = entry["itl_ms"], entry["ratios"]
        print(f"{entry['label']} ({entry['engine']})")
        print(f"  first token {entry['ttft_ms']:.1f} ms, {ratios['ttft']:.2f} times that of {first}")
        print(f"  then {entry['tpot_ms']:.2f} ms a token, {ratios['tpot']:.2f} times; 99 % within {itl['p99']:.2f} ms")
        for step in entry["decode"]:
            print(f"  at {step['past']:,} stored tokens {step['tokens_per_second']:.1f} tokens/s")


if __name__ == "__main__":
    main()
