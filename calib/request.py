"""What a fit is asked for: the options that `calib fit` and `export build` share, and what follows from them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from plugins.errors import UserError
from plugins.methods import DEFAULT_METHOD, DEFAULT_RATIOS, METHODS

if TYPE_CHECKING:
    from .texts import Text

FITS = ("fast", "quality")


@dataclass(frozen=True)
class FitRequest:
    """The arguments of a fit; see `add_arguments`. settings: "key=value" overrides of the method's configuration.

    None stands for a default: of the method, or of this machine. method "none" fits nothing. Raises UserError for an
    unknown method and for a ratio with one that knows a single one.
    """

    method: str | None = None
    ratio: float | None = None
    settings: tuple[str, ...] = ()
    fit: str | None = None
    effort: str | None = None
    seed: int = 0
    context: int | None = None
    texts: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.method not in (None, "none", *METHODS):
            raise UserError(f"method {self.method!r} is unknown: use one of none, {', '.join(METHODS)}")
        if self.ratio is not None and self.name not in ("none", *DEFAULT_RATIOS):
            raise UserError(
                f"--ratio has no meaning with --method {self.name}, whose bits decide it: leave it out or set them "
                "with --set k_bits=4 --set v_bits=4"
            )

    @property
    def name(self) -> str:
        """The method asked for, or the default one."""
        return self.method or DEFAULT_METHOD

    @property
    def target(self) -> float | None:
        """The ratio asked for, or the method's default; None where the method's own bits decide it."""
        return DEFAULT_RATIOS.get(self.name) if self.ratio is None else self.ratio

    @cached_property
    def contents(self) -> list[Text]:
        """The texts, read once; without any the default one. Raises UserError for an unreadable one."""
        from .texts import read_texts

        return read_texts(self.texts)

    def given(self) -> dict[str, object]:
        """Options that were set, by their names on the command line."""
        options = {
            "--ratio": self.ratio,
            "--set": self.settings or None,
            "--fit": self.fit,
            "--effort": self.effort,
            "--context": self.context,
            "--text": self.texts or None,
        }
        return {name: value for name, value in options.items() if value is not None}


def add_reading(command: argparse.ArgumentParser) -> None:
    """Which model reads which text in windows of which length."""
    command.add_argument("--model", metavar="MODEL", help="folder, .gguf file or hub id (default: the built-in model)")
    command.add_argument(
        "--text", nargs="+", action="extend", default=[], metavar="FILE",
        help="UTF-8 text (default: the topics of Python's help())",
    )  # fmt: skip
    command.add_argument("--context", type=int, help="tokens per window (default: 4096, or the model's limit)")


def add_arguments(command: argparse.ArgumentParser, methods: Sequence[str]) -> None:
    """The options of a fit."""
    add_reading(command)
    command.add_argument("--method", help=f"one of {', '.join(methods)} (default: {DEFAULT_METHOD})")
    ratios = ", ".join(f"{ratio} for {name}" for name, ratio in DEFAULT_RATIOS.items())
    command.add_argument("--ratio", type=float, help=f"part of the fp16 KV bytes that remains (default: {ratios})")
    command.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE",
        help="override a field of the method's configuration; may be repeated",
    )  # fmt: skip
    select = command.add_mutually_exclusive_group()
    select.add_argument(
        "--select", choices=("all",), help="deltakv: decode steps read every compressed token (the default)"
    )
    select.add_argument("--select-fraction", metavar="F", help="deltakv: they read this part of them")
    select.add_argument("--select-count", metavar="N", help="deltakv: they read this many of them")
    command.add_argument(
        "--fit", choices=FITS,
        help="deltakv: layer by layer, or jointly through the model (default: quality on a GPU, fast without one)",
    )  # fmt: skip
    command.add_argument("--effort", choices=("quick", "full"), help="default: full on a GPU, quick without one")
    command.add_argument("--seed", type=int, default=0, help="of the fit")


def from_arguments(options: argparse.Namespace) -> FitRequest:
    """Raises UserError for a seed out of range and for a selection with a method that has none."""
    if not 0 <= options.seed < 1 << 31:
        raise UserError(f"--seed {options.seed} must be from 0 to 2147483647")
    settings = list(options.settings)
    for key in ("select_fraction", "select_count"):
        value = getattr(options, key)
        if value is not None:
            settings.append(f"{key}={value}")
    if options.select == "all":
        settings += ["select_fraction=0", "select_count=0"]
    if options.method not in (None, "deltakv") and len(settings) > len(options.settings):
        raise UserError(f"--select and its like have no meaning with --method {options.method}: leave them out")
    return FitRequest(
        method=options.method,
        ratio=options.ratio,
        settings=tuple(settings),
        fit=options.fit,
        effort=options.effort,
        seed=options.seed,
        context=options.context,
        texts=tuple(Path(path) for path in options.text),
    )
