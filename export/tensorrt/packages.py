"""The Python packages that build plans, and what each of them can do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from plugins.errors import UserError
from runtime.plan import MODULES


@dataclass(frozen=True)
class Package:
    """A backend's package.

    modules: where it may be imported from. extra: of this distribution, which installs it. least, below: its versions.
    plugins: whether it takes plugins; without, a graph is of standard operators alone. prefill_tokens: of its plans'
    prefill profiles, unless others are asked for: operators keep the scores of all new tokens at once, plugins do not.
    """

    backend: str
    modules: tuple[str, ...]
    extra: str
    least: tuple[int, ...]
    below: tuple[int, ...]
    plugins: bool
    prefill_tokens: tuple[int, ...]

    def load(self) -> ModuleType:
        """Raises UserError when it is missing or of another version."""
        for name in self.modules:
            try:
                module = import_module(name)
            except ModuleNotFoundError as error:
                if error.name != name:
                    raise UserError(f"--backend {self.backend}: {name} is broken ({error}): {self._mend}") from error
                continue
            except (ImportError, OSError) as error:  # its libraries
                reason = str(error).splitlines()[0]
                raise UserError(f"--backend {self.backend}: {name} is broken ({reason}): {self._mend}") from error
            found = tuple(int(part) for part in re.findall(r"\d+", module.__version__)[:2])
            if not self.least <= found < self.below:
                least, below = (".".join(map(str, version)) for version in (self.least, self.below))
                raise UserError(
                    f"--backend {self.backend} needs {name} from {least} on, before {below}, and {module.__version__} "
                    f"is installed: {self._mend}"
                )
            return module
        raise UserError(f"--backend {self.backend} needs the package {self.modules[0]}: {self._mend}")

    @property
    def _mend(self) -> str:
        return f'pip install "kvpack[{self.extra}]"'


PACKAGES = {
    "tensorrt": Package("tensorrt", MODULES["tensorrt"][0], "tensorrt", (10, 14), (12,), True, (512, 8192)),
    "tensorrt-rtx": Package("tensorrt-rtx", MODULES["tensorrt-rtx"][0], "tensorrt-rtx", (1, 7), (2,), False, (512,)),
}
