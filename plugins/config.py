"""What every method's configuration can do: check its types, be overridden by key=value, travel as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

from plugins.errors import UserError
from plugins.geometry import Geometry

RATIO_SLACK = 0.005  # a configuration serves `ratio` when its own ratio is at most this much above it
Config = TypeVar("Config", bound="MethodConfig")

_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_EXAMPLES = {"bool": "true", "int": "32", "float": "0.25", "str": "text", "tuple[int, ...]": "0,1"}


def mean_ratio(layer_ratio: float, full: int, num_layers: int) -> float:
    """Of a model's layers, `full` of which keep everything and the others `layer_ratio`."""
    return (full + (num_layers - full) * layer_ratio) / num_layers


@dataclass(frozen=True)
class MethodConfig:
    """Base of the methods' public definitions; the fields are the subclass's, plain numbers, words and tuples of ints.

    METHOD: the method's name. SHAPE: fields that the model fixes, which --set may not change.
    Raises UserError when a field has another type than declared.
    """

    METHOD: ClassVar[str]
    SHAPE: ClassVar[tuple[str, ...]] = ("head_dim",)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "tuple[int, ...]":
                good = isinstance(value, tuple) and all(type(item) is int for item in value)
            else:
                good = type(value).__name__ == field.type
            if not good:
                raise UserError(f"{field.name}={value!r} is not of type {field.type}")
        layers = getattr(self, "full_layers", ())
        if min(layers, default=0) < 0 or len(set(layers)) != len(layers):
            raise UserError(f"full_layers={layers} must be distinct layer numbers, 0 or more")
        try:
            self.geometry()
        except ValueError as error:
            raise UserError(str(error)) from error

    def geometry(self) -> Geometry:
        """Where each position of a sequence lives."""
        raise NotImplementedError

    def summary(self) -> str:
        """The configuration in one line."""
        raise NotImplementedError

    def check_exportable(self) -> None:
        """Raises UserError when this can be fitted and measured but not written into an engine."""

    def faster_on_gpu(self) -> str:
        """What to set instead for the native library's fastest kernel; "" when it takes this, or nothing like it."""
        return ""

    def layer_ratio(self) -> float:
        """Fraction of its fp16 bytes that a compressed layer keeps, by the paper's accounting."""
        raise NotImplementedError

    def ratio(self, num_layers: int | None = None) -> float:
        """Fraction of the fp16 cache that remains by the paper's accounting: windows, scales and tables not counted.

        With `full_layers` the mean over the model's `num_layers` layers, which then must be given.
        """
        layers = getattr(self, "full_layers", ())
        if not layers:
            return self.layer_ratio()
        if num_layers is None:
            raise ValueError("ratio() of a configuration with full_layers needs num_layers")
        if max(layers) >= num_layers:
            raise UserError(f"full_layers={layers} names layers of a model that has {num_layers}")
        return mean_ratio(self.layer_ratio(), len(layers), num_layers)

    def override(self: Config, settings: Iterable[str]) -> Config:
        """This configuration with "key=value" settings applied, values written as in `describe`.

        Raises UserError for an unknown key or a value that cannot be read.
        """
        keys = [field.name for field in fields(self) if field.name not in self.SHAPE]
        changes: dict[str, Any] = {}
        for setting in settings:
            key, equals, text = (part.strip() for part in setting.partition("="))
            if not equals or key not in keys:
                raise UserError(f"--set {setting}: expected key=value with one of the keys {', '.join(keys)}")
            try:
                changes[key] = self.read_field(key, text)
            except (ValueError, KeyError):
                example = self.write_field(key, getattr(self, key)) or _EXAMPLES[self.type_of(key)]
                raise UserError(f"--set {key}={text}: cannot be read; write it like {key}={example}") from None
        return replace(self, **changes)

    @classmethod
    def type_of(cls, key: str) -> str:
        return next(str(field.type) for field in fields(cls) if field.name == key)

    @classmethod
    def read_field(cls, key: str, text: str) -> Any:
        """The value of field `key` from its text. Raises ValueError or KeyError when it cannot be read."""
        kind = cls.type_of(key)
        if kind == "tuple[int, ...]":
            return tuple(int(item) for item in text.split(",") if item.strip())
        if kind == "bool":
            return _WORDS[text.lower()]
        return {"int": int, "float": float, "str": str}[kind](text)

    @classmethod
    def write_field(cls, key: str, value: Any) -> str:
        """Inverse of `read_field`."""
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return str(value).lower() if isinstance(value, bool) else str(value)

    def describe(self) -> dict[str, str]:
        """Every field as the text that `override` reads."""
        return {field.name: self.write_field(field.name, getattr(self, field.name)) for field in fields(self)}

    def to_json(self) -> dict[str, Any]:
        return {key: list(item) if isinstance(item, tuple) else item for key, item in asdict(self).items()}

    @classmethod
    def from_json(cls: type[Config], data: Mapping[str, Any] | str) -> Config:
        """Inverse of `to_json` (a mapping, or its text). Raises UserError on unknown or missing keys."""
        if isinstance(data, str):
            data = json.loads(data)
        known = {field.name for field in fields(cls)}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        if unknown := sorted(set(data) - known):
            raise UserError(f"unknown {cls.METHOD} configuration keys: {', '.join(unknown)}")
        if missing := sorted(required - set(data)):
            raise UserError(f"missing {cls.METHOD} configuration keys: {', '.join(missing)}")
        return cls(**{key: tuple(item) if isinstance(item, list) else item for key, item in data.items()})
