"""A kvpack engine behind Triton Inference Server: its Python backend loads this file, config.pbtxt says the rest."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from plugins.errors import UserError
from runtime import Engine, SamplingParams, Session, Token
from runtime.cli import byte_count

DEFAULT_TOKENS = 256  # max_tokens of a request that names none
WATCH_SECONDS = 0.02  # between two looks at whether requests were cancelled
SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos")  # inputs named as in SamplingParams


class Job:
    """One request: what it asks for, and the one place that answers it."""

    def __init__(self, request: Any) -> None:
        self.cancel = threading.Event()
        self.session: Session | None = None  # while it is being answered
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._answered = False

    def read(self, request: Any, max_tokens: int) -> None:
        """Take the inputs. Raises UserError."""
        text = _value(request, "text_input")
        self.prompt = [{"role": "user", "content": text}] if _value(request, "chat") else text
        self.stream = bool(_value(request, "stream"))
        given = {name: value for name in SAMPLING if (value := _value(request, name)) is not None}
        given.setdefault("max_tokens", min(DEFAULT_TOKENS, max_tokens))
        if given["max_tokens"] > max_tokens:
            raise UserError(f"max_tokens is {given['max_tokens']}: this service allows {max_tokens}.")
        self.params = SamplingParams(**given, stop=_values(request, "stop"))

    def send(self, tokens: list[Token], final: bool) -> None:
        text = "".join(token.text for token in tokens)
        tensors = [
            pb_utils.Tensor("text_output", np.array([text.encode()], np.object_)),
            pb_utils.Tensor("token_ids", np.array([token.id for token in tokens], np.int32)),
            pb_utils.Tensor("finish_reason", np.array([(tokens[-1].finish_reason or "").encode()], np.object_)),
        ]
        self._send(pb_utils.InferenceResponse(tensors), final)

    def fail(self, code: int, sentence: str) -> None:
        self._send(pb_utils.InferenceResponse([], pb_utils.TritonError(sentence, code)), final=True)

    def _send(self, response: Any, final: bool) -> None:
        with self._lock:
            self._answered |= final
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)

    def watch(self) -> None:
        """Stop it, in the middle of a step if need be, once it was cancelled."""
        with self._lock:  # a sender must not be asked after its last response
            if not self._answered and self._sender.is_cancelled():
                self.cancel.set()
        session = self.session
        if session is not None and self.cancel.is_set():
            session.interrupt()


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        if not pb_utils.using_decoupled_model_transaction_policy(config):
            raise pb_utils.TritonModelException("kvpack streams: set model_transaction_policy { decoupled: true }.")
        given = {key: value["string_value"] for key, value in config["parameters"].items()}
        folder = Path(args["model_repository"]) / args["model_version"] / given["engine"]
        try:
            limit, threads = given.get("memory_limit"), given.get("threads")
            self._engine = Engine.open(
                folder,
                provider=given.get("provider", "cpu"),
                threads=int(threads) if threads else None,
                memory_limit=byte_count(limit) if limit else None,
            )
        except UserError as error:
            raise pb_utils.TritonModelException(str(error)) from error
        running = int(given.get("max_running", 16))
        self._max_tokens = int(given.get("max_tokens", 1024))
        self._slots = threading.Semaphore(running)
        self._pool = ThreadPoolExecutor(running, thread_name_prefix="generation")
        self._jobs: set[Job] = set()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        """Start each request as soon as a slot is free; until then Triton sends no more."""
        for request in requests:
            job = Job(request)
            try:
                job.read(request, self._max_tokens)
            except UserError as error:
                job.fail(pb_utils.TritonError.INVALID_ARG, str(error))
                continue
            self._jobs.add(job)
            self._slots.acquire()
            self._pool.submit(self._answer, job)

    def finalize(self) -> None:
        for job in list(self._jobs):
            job.cancel.set()
        self._pool.shutdown()
        self._ended.set()
        self._watcher.join()
        self._engine.close()

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_SECONDS):
            for job in list(self._jobs):
                job.watch()

    def _answer(self, job: Job) -> None:
        """In a thread: whatever happens, exactly one final response."""
        code = pb_utils.TritonError.INVALID_ARG
        try:
            with self._engine.session() as session:
                job.session = session
                stream = session.generate(job.prompt, job.params, job.cancel)
                code = pb_utils.TritonError.UNAVAILABLE  # what fails from here on is not the request's fault
                needed = len(session.encode(job.prompt)) + job.params.max_tokens
                session.allocate(min(needed, self._engine.artefact.max_length))  # so that it cannot run out later
                tokens = []
                for token in stream:
                    tokens.append(token)
                    if job.stream and not token.finish_reason:
                        job.send([token], final=False)
            last = tokens[-1]
            if last.finish_reason == "cancelled":
                job.fail(pb_utils.TritonError.CANCELLED, "the request was cancelled.")
            else:
                job.send([last] if job.stream else tokens, final=True)
        except (UserError, MemoryError) as error:
            job.fail(pb_utils.TritonError.CANCELLED if job.cancel.is_set() else code, str(error))
        except Exception as error:
            pb_utils.Logger.log_error(f"a generation failed: {error!r}")
            job.fail(pb_utils.TritonError.INTERNAL, "the model failed: see the server's log.")
        finally:
            job.session = None
            self._jobs.discard(job)
            self._slots.release()


def _values(request: Any, name: str) -> list[Any]:
    """The elements of an input, none where it was left out. Raises UserError."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    try:
        return [] if tensor is None else [_plain(value) for value in tensor.as_numpy().reshape(-1)]
    except UnicodeDecodeError:
        raise UserError(f"{name} is not UTF-8.") from None


def _value(request: Any, name: str) -> Any:
    """The one element of an input, None where it was left out. Raises UserError."""
    values = _values(request, name)
    if len(values) > 1:
        raise UserError(f"{name} has {len(values)} elements: give one.")
    return values[0] if values else None


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value.item()
