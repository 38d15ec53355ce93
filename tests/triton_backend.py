"""A stand-in for `triton_python_backend_utils`: what Triton's Python backend gives a model, strict about its use.

Everything is checked against the model's configuration: inputs that it does not declare, outputs of another name, dtype
or shape, a second final response, a sender used after it.
"""

from __future__ import annotations

import importlib.util
import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from google.protobuf import json_format, text_format

NUMPY = {"TYPE_BOOL": np.bool_, "TYPE_INT32": np.int32, "TYPE_INT64": np.int64, "TYPE_FP32": np.float32}
NUMPY |= {"TYPE_STRING": np.object_}
PATIENCE = 60  # seconds


def model_config_pb2() -> ModuleType:
    """Triton's own ModelConfig, from its client's wheel, whose package would want gRPC."""
    package = importlib.util.find_spec("tritonclient")
    assert package is not None and package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a protobuf younger than the wheel
        spec.loader.exec_module(module)
    return module


def read_config(path: Path) -> dict[str, Any]:
    """config.pbtxt as Triton hands it to a model. Unknown fields, enum values and repeated scalars are errors."""
    parsed = text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2().ModelConfig())
    options = {"preserving_proto_field_name": True, "always_print_fields_with_no_presence": True}
    return json.loads(json_format.MessageToJson(parsed, **options))


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int) -> None:
        assert isinstance(message, str) and code in range(8)
        self.message = message
        self.code = code


class TritonModelException(Exception):
    pass


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        assert isinstance(name, str) and isinstance(array, np.ndarray)
        assert array.dtype != np.object_ or all(isinstance(value, bytes) for value in array.reshape(-1))
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        assert isinstance(output_tensors, list) and (error is None or not output_tensors)
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class Sender:
    """Collects a request's responses; `done` is set by the final one."""

    def __init__(self, check: Callable[[InferenceResponse], None]) -> None:
        self.responses: list[InferenceResponse] = []
        self.done = threading.Event()
        self.cancelled = threading.Event()
        self._check = check
        self._lock = threading.Lock()

    def is_cancelled(self) -> bool:
        with self._lock:
            assert not self.done.is_set(), "asked after the final response"
            return self.cancelled.is_set()

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        with self._lock:
            assert not self.done.is_set(), "sent after the final response"
            assert flags in (0, 1)
            self._check(response)
            self.responses.append(response)
            if flags:
                self.done.set()


class InferenceRequest:
    def __init__(self, inputs: dict[str, Tensor], sender: Sender) -> None:
        self._inputs = inputs
        self._sender: Sender | None = sender

    def get_response_sender(self) -> Sender:
        sender, self._sender = self._sender, None
        assert sender is not None, "one sender per request"
        return sender


class Backend(ModuleType):
    """The module, and the server's side of it: `request` makes one of plain values."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__("triton_python_backend_utils")
        self.config = config
        self.asked: set[str] = set()  # names of inputs that the model looked for
        self.errors: list[str] = []  # what it logged

        class Logger:
            log_error = self.errors.append

        self.Logger = Logger
        self.TritonError = TritonError
        self.TritonModelException = TritonModelException
        self.Tensor = Tensor
        self.InferenceResponse = InferenceResponse

    def using_decoupled_model_transaction_policy(self, config: dict[str, Any]) -> bool:
        return config.get("model_transaction_policy", {}).get("decoupled", False)

    def get_input_tensor_by_name(self, request: InferenceRequest, name: str) -> Tensor | None:
        assert name in self._declared("input"), f"{name} is not declared"
        self.asked.add(name)
        return request._inputs.get(name)

    def request(self, **values: Any) -> tuple[InferenceRequest, Sender]:
        declared = self._declared("input")
        assert all(name in values or spec.get("optional") for name, spec in declared.items())
        sender = Sender(self._check)
        return InferenceRequest(
            {name: self._tensor(declared[name], value) for name, value in values.items()}, sender
        ), sender

    def _tensor(self, spec: dict[str, Any], value: Any) -> Tensor:
        listed = value if isinstance(value, list) else [value]
        listed = [item.encode() if isinstance(item, str) else item for item in listed]
        return Tensor(spec["name"], np.array(listed, NUMPY[spec["data_type"]]))

    def _check(self, response: InferenceResponse) -> None:
        declared = self._declared("output")
        if response.error is None:
            assert response.outputs.keys() == declared.keys()
        for name, array in response.outputs.items():
            dims = [int(dim) for dim in declared[name]["dims"]]
            assert array.dtype == NUMPY[declared[name]["data_type"]] and array.ndim == len(dims)
            assert all(dim in (-1, size) for dim, size in zip(dims, array.shape, strict=True))

    def _declared(self, side: str) -> dict[str, dict[str, Any]]:
        return {spec["name"]: spec for spec in self.config[side]}
