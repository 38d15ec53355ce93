"""`python -m runtime.bench.worker JOB`: one measurement in a process of its own.

JOB is a JSON object: "task" is a key of TASKS, the rest is what that function reads. The last line of stdout is a JSON
object of what was measured, or of the one key "out_of_memory" with the reason.
"""

from __future__ import annotations

import json
import sys

from plugins.errors import UserError
from runtime.bench import static_cache
from runtime.bench.latency import visit
from runtime.bench.oom import base, curve, trial
from runtime.bench.process import BAD_INPUT, ran_out
from runtime.session import StepFailed

TASKS = {"latency": visit, "static cache": static_cache.visit, "base": base, "curve": curve, "trial": trial}


def main() -> int:
    job = json.loads(sys.argv[1])
    try:
        answer = TASKS[job["task"]](job)
    except (MemoryError, StepFailed) as error:
        answer = {"out_of_memory": str(error) or type(error).__name__}
    except UserError as error:
        if not ran_out(str(error)):
            print(f"error: {error}", file=sys.stderr)
            return BAD_INPUT
        answer = {"out_of_memory": str(error)}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
