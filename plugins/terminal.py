"""What command lines share: how a run ends, and a progress bar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from plugins.errors import UserError


def run(args: argparse.Namespace) -> int:
    """Run args.run(args); the exit code: 0, or 2 with one sentence on stderr for bad input."""
    try:
        args.run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


@contextmanager
def bar(title: str, total: int | None) -> Iterator[Callable[[str, int], None]]:
    """A progress bar on stderr. Yields a function of what to show behind the title and how many pieces have ended."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as drawn:
        task = drawn.add_task(title, total=total)

        def update(what: str, ended: int) -> None:
            drawn.update(task, description=f"{title}: {what}" if what else title, advance=ended)

        yield update
