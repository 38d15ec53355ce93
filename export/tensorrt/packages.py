"""The Python packages that build plans, and what each of them can do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import ModuleType

from plugins.errors import UserError
from runtime.plan import MODULES, install, package


@dataclass(frozen=True)
class Package:
    """A backend's package.

    least, below: its versions. plugins: whether it takes plugins; without, a graph is of standard operators alone.
    prefill_tokens: of its plans' prefill profiles, unless others are asked for: operators keep the scores of all new
    tokens at once, plugins do not.
    """

    backend: str
    least: tuple[int, ...]
    below: tuple[int, ...]
    plugins: bool
    prefill_tokens: tuple[int, ...]

    @property
    def name(self) -> str:
        """What its versions go by, in config.json and in messages."""
        return MODULES[self.backend][0][0]

    def load(self) -> ModuleType:
        """Raises UserError when it is missing or of another version."""
        module, title = package(self.backend)
        found = tuple(int(part) for part in re.findall(r"\d+", module.__version__)[:2])
        if not self.least <= found < self.below:
            least, below = (".".join(map(str, version)) for version in (self.least, self.below))
            raise UserError(
                f"--backend {self.backend} needs {title} from {least} on, before {below}, and {module.__version__} "
                f"is installed: {install(self.backend)}."
            )
        return module


PACKAGES = {
    "tensorrt": Package("tensorrt", (10, 14), (12,), True, (512, 8192)),
    "tensorrt-rtx": Package("tensorrt-rtx", (1, 7), (2,), False, (512,)),
}
