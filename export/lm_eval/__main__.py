"""`python -m export.lm_eval ARGS`: lm-eval's own command line, with the model `kvpack` known to it."""

from __future__ import annotations

import sys

from plugins.errors import UserError


def main() -> int:
    """Run lm-eval on sys.argv; returns the exit code: 2 on bad input to the model."""
    try:
        import lm_eval.models  # noqa: F401  # its own models first: lm-eval lists them only while none is registered
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        print(f"error: lm-eval cannot be imported ({error}): pip install 'kvpack[lm-eval]'.", file=sys.stderr)
        return 2
    from . import model  # noqa: F401  # registers itself

    try:
        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
