"""A process of its own for TensorRT, whose libraries end the process when they meet what they do not expect."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plugins.errors import UserError

if TYPE_CHECKING:
    from .builder import Step


def ask(task: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """`export.tensorrt.builder`'s function `task` of a request. Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        given, taken = Path(folder) / "request.json", Path(folder) / "result.json"
        given.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", "export.tensorrt.process", task, str(given), str(taken)]
        ended = subprocess.run(command, check=False).returncode
        if ended < 0:
            raise UserError(
                f"TensorRT ended its process ({signal.Signals(-ended).name}) instead of giving a reason: its messages "
                "are above; please report this model"
            )
        if not taken.is_file():
            raise UserError(f"TensorRT's process ended with {ended} and no result: its messages are above")
        result = json.loads(taken.read_text(encoding="utf-8"))
    if "error" in result:
        raise UserError(result["error"])
    return result


def _main(task: str, given: str, taken: str) -> int:
    from . import builder

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a build runs outside Python
    request = json.loads(Path(given).read_text(encoding="utf-8"))
    try:
        if task == "build":
            with _bar() as step:
                result = builder.build(request, step)
        else:
            result = builder.inspect(request)
    except (UserError, builder.PlanError) as error:
        result = {"error": str(error)}
    Path(taken).write_text(json.dumps(result), encoding="utf-8")
    return 2 if "error" in result else 0


@contextmanager
def _bar() -> Iterator[Step]:
    """The phases of a build on stderr, where it is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as drawn:

        def step(phase: str, ended: int, steps: int) -> None:
            if steps and phase not in tasks:
                tasks[phase] = drawn.add_task(phase, total=steps)
            elif steps:
                drawn.update(tasks[phase], completed=ended)
            elif phase in tasks:
                drawn.remove_task(tasks.pop(phase))

        yield step


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
