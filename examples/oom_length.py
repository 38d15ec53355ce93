"""How long a context fits? Engines of one model under the same memory limit, in gibibytes.

python examples/oom_length.py none/ engine/ --memory 2
"""

from __future__ import annotations

import argparse
import sys

from plugins.errors import UserError
from runtime import bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="+")
    parser.add_argument("--memory", type=float, required=True, help="GiB")
    parser.add_argument("--provider", help="cpu or cuda (default: cuda for TensorRT plans, else cpu)")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    try:
        found = bench.oom_length(
            args.engines,
            memory=int(args.memory * 2**30),
            provider=args.provider,
            threads=args.threads,
            progress_bar=True,
        )
    except UserError as error:
        sys.exit(f"error: {error}")
    for entry in found["engines"]:
        print(f"{entry['label']}: {entry['found']:,} tokens beside {entry['base_bytes'] / 2**20:,.0f} MiB for the rest")
        print(f"  of {entry['bound']:,} that the bytes of the cache allow")
        if entry["gain"] is not None:
            print(f"  {entry['gain']:.2f} times as long as without compression, or as the first engine")
        for trial in entry["trials"]:
            if not trial["fits"]:
                print(f"  {trial['tokens']:,} tokens did not fit: {trial['why']}")


if __name__ == "__main__":
    main()
