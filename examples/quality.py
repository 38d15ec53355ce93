"""The smallest cache that is good enough: engines of one model by their bytes, with what each loses.

python examples/quality.py int4/ engine/ --text book.txt --length 4096 --samples 8 --allow 0.01 --out evaluation/
"""

from __future__ import annotations

import argparse
import sys
from statistics import fmean

from export.eval import evaluate
from plugins.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", help="engine folders, or codec folders with --model")
    parser.add_argument("--model", help="the model that codec folders were made for")
    parser.add_argument("--text", action="append", default=[])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--allow", type=float, default=0.01, help="largest increase of perplexity, 0.01 is 1 %%")
    parser.add_argument("--out", required=True, help="a folder; a second run goes on where the first stopped")
    args = parser.parse_args()
    try:
        found = evaluate(
            args.paths,
            model=args.model,
            tasks=("ppl", "kld", "niah"),
            lengths=(args.length,),
            samples=args.samples,
            texts=args.text,
            out=args.out,
        )
    except UserError as error:
        sys.exit(f"error: {error}")
    good = []
    for subject in sorted(found["subjects"], key=lambda subject: subject["fractions"][str(args.length)]):
        own = [cell for cell in found["cells"] if cell["subject"] == subject["label"]]
        change = fmean(cell["change"] for cell in own if cell["task"] == "ppl")
        print(f"{subject['label']}: {subject['fractions'][str(args.length)]:.1%} of an fp16 cache")
        print(f"  perplexity {change:+.2%}, KL {fmean(c['value'] for c in own if c['task'] == 'kld'):.2g} nats")
        for cell in own:
            if cell["task"] == "niah":
                print(f"  needles {cell['variant']} found {cell['value']:.0%}, uncompressed {cell['exact']:.0%}")
        if change <= args.allow:
            good.append(subject)
    print(f"take {good[0]['path']}" if good else f"none loses at most {args.allow:.1%}")


if __name__ == "__main__":
    main()
