"""examples/triton: its configuration against Triton's own schema, its model against a strict stand-in of Triton."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import tiny_artefact as tiny
from triton_backend import PATIENCE, Backend, InferenceResponse, Sender, TritonError, TritonModelException, read_config

from plugins.contract import bytes_at
from runtime import Engine, SamplingParams, Session, Token

REPOSITORY = Path(__file__).parent.parent / "examples" / "triton"
LONG = 1 << 20  # tokens that no test would see the end of
SERVER = os.environ.get("KVPACK_TRITONSERVER")  # how to start a Triton server whose Python has kvpack[cpu]
Start = Callable[..., tuple[Any, Backend]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("triton") / "engine", geometry=tiny.SMALL, max_length=LONG)


@pytest.fixture
def start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Loads model.py with these parameters on top of the configuration's; finalizes it in the end."""
    models = []

    def load(decoupled: bool = True, **parameters: str) -> tuple[Any, Backend]:
        config = read_config(REPOSITORY / "kvpack" / "config.pbtxt")
        config["model_transaction_policy"]["decoupled"] = decoupled
        for key, value in ({"engine": str(folder), "threads": "1"} | parameters).items():
            assert key in config["parameters"]
            config["parameters"][key] = {"string_value": value}
        backend = Backend(config)
        monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
        model = runpy.run_path(str(REPOSITORY / "kvpack" / "1" / "model.py"))["TritonPythonModel"]()
        arguments = {"model_config": json.dumps(config), "model_repository": str(REPOSITORY / "kvpack")}
        model.initialize(arguments | {"model_version": "1", "model_name": "kvpack"})
        models.append(model)
        return model, backend

    yield load
    for model in models:
        model.finalize()
        assert model._engine.closed and not model._jobs  # nothing is left running


def send(model: Any, backend: Backend, **values: Any) -> Sender:
    request, sender = backend.request(**values)
    assert model.execute([request]) is None
    return sender


def answer(sender: Sender) -> list[InferenceResponse]:
    assert sender.done.wait(PATIENCE)
    return sender.responses


def refusal(sender: Sender) -> tuple[int, str]:
    last = answer(sender)[-1].error
    assert last is not None
    return last.code, last.message


def ids(responses: list[InferenceResponse]) -> list[int]:
    return [int(token) for response in responses for token in response.outputs["token_ids"]]


def text(responses: list[InferenceResponse]) -> str:
    return "".join(response.outputs["text_output"][0].decode() for response in responses)


def alone(folder: Path, prompt: Any, **params: Any) -> list[Token]:
    with Engine.open(folder, threads=1) as engine, engine.session() as session:
        return list(session.generate(prompt, SamplingParams(**params)))


def answer_to(folder: Path, values: dict[str, Any]) -> list[Token]:
    """What a session alone generates for a request."""
    given = dict(values)
    return alone(folder, given.pop("text_input"), **given)


def test_the_configuration_is_one_that_triton_knows() -> None:
    config = read_config(REPOSITORY / "kvpack" / "config.pbtxt")
    assert config["name"] == "kvpack" and config["backend"] == "python" and config.get("max_batch_size", 0) == 0
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert [group["kind"] for group in config["instance_group"]] == ["KIND_CPU"]
    assert [spec["name"] for spec in config["input"] if not spec.get("optional")] == ["text_input"]
    assert [spec["name"] for spec in config["output"]] == ["text_output", "token_ids", "finish_reason"]


def test_parallel_requests_stream_what_a_session_alone_gives(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend = start()
    asked = [
        {"text_input": f"Question {n} " * (n + 1), "max_tokens": 20 + 3 * n, "temperature": 20.0 + n}
        | {"top_p": 0.75, "seed": n}
        for n in range(16)
    ]
    with monkeypatch.context() as patch:
        tiny.prefill_together(patch, 16, PATIENCE)
        requests, senders = zip(*(backend.request(**values, stream=True) for values in asked), strict=True)
        model.execute(list(requests))
        answers = [answer(sender) for sender in senders]
    for values, responses in zip(asked, answers, strict=True):
        expected = answer_to(folder, values)
        assert ids(responses) == [token.id for token in expected]
        assert text(responses) == "".join(token.text for token in expected)
        reasons = [response.outputs["finish_reason"][0] for response in responses]
        assert reasons == [b""] * (len(expected) - 1) + [b"length"]
    assert len({tuple(ids(responses)) for responses in answers}) == 16
    assert backend.asked == {spec["name"] for spec in backend.config["input"]}
    assert model._engine.nbytes == 0


def test_without_stream_there_is_one_response(start: Start, folder: Path) -> None:
    model, backend = start()
    expected = alone(folder, "hello", max_tokens=40)
    (whole,) = answer(send(model, backend, text_input="hello", max_tokens=40))
    assert ids([whole]) == [token.id for token in expected] and whole.outputs["finish_reason"][0] == b"length"
    stop = text([whole])[20:25]
    (cut,) = answer(send(model, backend, text_input="hello", max_tokens=40, stop=["\0", stop]))
    assert text([cut]) == text([whole])[: text([whole]).find(stop)] and cut.outputs["finish_reason"][0] == b"stop"
    (chat,) = answer(send(model, backend, text_input="hello", max_tokens=9, chat=True))
    assert ids([chat]) == [t.id for t in alone(folder, [{"role": "user", "content": "hello"}], max_tokens=9)]
    assert ids([chat]) != ids([whole])[:9]


def test_cancelled_requests_end_at_once_and_nothing_else_does(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend = start(max_running="2", max_tokens=str(LONG))
    stays = send(model, backend, text_input="stays", max_tokens=300, stream=True)
    gone = send(model, backend, text_input="x", max_tokens=LONG - 10, stream=True)
    until = time.monotonic() + PATIENCE
    while len(gone.responses) < 3:
        assert time.monotonic() < until
        time.sleep(0.001)
    gone.cancelled.set()
    code, _ = refusal(gone)
    assert code == TritonError.CANCELLED and 4 <= len(gone.responses) < LONG / 2
    assert ids(answer(stays)) == [token.id for token in alone(folder, "stays", max_tokens=300)]

    inside, _ = tiny.endless_prefill(monkeypatch, PATIENCE)
    gone = send(model, backend, text_input="x")
    assert inside.wait(PATIENCE)
    gone.cancelled.set()  # in the middle of a step
    assert refusal(gone) == (TritonError.CANCELLED, "interrupted") and len(gone.responses) == 1
    assert model._engine.nbytes == 0


def test_requests_beyond_the_slots_wait(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    go, decode = threading.Event(), Session.decode
    monkeypatch.setattr(Session, "decode", lambda *arguments: go.wait(PATIENCE) and decode(*arguments))
    model, backend = start(max_running="1")
    first = send(model, backend, text_input="first", max_tokens=5)
    request, second = backend.request(text_input="second", max_tokens=5)
    with ThreadPoolExecutor(1) as server:
        execute = server.submit(model.execute, [request])
        assert not wait([execute], 0.1).done  # Triton keeps what comes after it
        go.set()
        execute.result(PATIENCE)
    assert len(answer(first)) == len(answer(second)) == 1


def test_errors_say_whose_fault_it_is(start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.open(folder) as engine:
        limit = bytes_at(engine.artefact.states, 200, engine.artefact.geometry)
    model, backend = start(memory_limit=str(limit), max_tokens="150")
    assert len(answer(send(model, backend, text_input="x" * 60, max_tokens=140))) == 1
    for code, sentence, values in (
        (TritonError.INVALID_ARG, "max_tokens is 0: use at least 1.", {"max_tokens": 0}),
        (TritonError.INVALID_ARG, "max_tokens is 151: this service allows 150.", {"max_tokens": 151}),
        (TritonError.INVALID_ARG, "the prompt is empty", {"text_input": ""}),
        (TritonError.INVALID_ARG, "text_input is not UTF-8.", {"text_input": b"\xff"}),
        (TritonError.INVALID_ARG, "top_p has 2 elements", {"top_p": [0.5, 0.5]}),
        (TritonError.UNAVAILABLE, f"the limit is {limit:,}", {"text_input": "x" * 60, "max_tokens": 150}),
    ):
        sender = send(model, backend, **{"text_input": "x", **values})
        assert refusal(sender)[0] == code and sentence in refusal(sender)[1] and len(sender.responses) == 1
    with monkeypatch.context() as patch:
        patch.setattr(Session, "decode", lambda *_: 1 / 0)
        sender = send(model, backend, text_input="x", max_tokens=5, stream=True)
        assert refusal(sender) == (TritonError.INTERNAL, "the model failed: see the server's log.")
        assert len(sender.responses) == 2 and "ZeroDivisionError" in backend.errors[0]
    assert len(answer(send(model, backend, text_input="x", max_tokens=5))) == 1
    assert model._engine.nbytes == 0


def test_an_engine_that_cannot_be_loaded_is_told_to_triton(start: Start, tmp_path: Path) -> None:
    with pytest.raises(TritonModelException, match="is not an engine folder"):
        start(engine=str(tmp_path / "nothing"))
    with pytest.raises(TritonModelException, match="decoupled: true"):
        start(decoupled=False)


def test_unloading_the_model_ends_what_is_running(start: Start) -> None:
    model, backend = start(max_tokens=str(LONG))
    sender = send(model, backend, text_input="x", max_tokens=LONG - 10, stream=True)
    model.finalize()
    assert refusal(sender)[0] == TritonError.CANCELLED


@pytest.mark.slow
@pytest.mark.skipif(SERVER is None, reason="KVPACK_TRITONSERVER does not say how to start a server")
def test_a_real_server_streams_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    """The server's Python needs kvpack[cpu], and numpy below 2 where Triton is older than that."""
    shutil.copytree(REPOSITORY / "kvpack", tmp_path / "models" / "kvpack")
    shutil.copytree(folder, tmp_path / "models" / "kvpack" / "1" / "engine")
    ports = []
    for _ in range(3):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(str(free.getsockname()[1]))
    options = [f"--model-repository={tmp_path / 'models'}", "--http-port", ports[0], "--grpc-port", ports[1]]
    process = subprocess.Popen([*shlex.split(SERVER or ""), *options, "--metrics-port", ports[2]])
    address = f"http://127.0.0.1:{ports[0]}/v2"

    def post(path: str, **body: Any) -> str:
        with urlopen(Request(f"{address}/models/kvpack/{path}", json.dumps(body).encode())) as response:
            return response.read().decode()

    def stream(values: dict[str, Any]) -> list[int]:
        blocks = post("generate_stream", **values, stream=True).strip().split("\n\n")
        return [json.loads(block.removeprefix("data: "))["token_ids"] for block in blocks]

    try:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                urlopen(f"{address}/health/ready").close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.1)
        asked = [
            {"text_input": f"Question {n}", "max_tokens": 50 + n, "temperature": 20.0, "seed": n} for n in range(16)
        ]
        with ThreadPoolExecutor(16) as clients:
            answers = list(clients.map(stream, asked))
        for values, found in zip(asked, answers, strict=True):
            expected = answer_to(folder, values)
            assert found == [token.id for token in expected]
        whole = json.loads(post("generate", text_input="hello", max_tokens=7))
        assert whole["token_ids"] == [token.id for token in alone(folder, "hello", max_tokens=7)]
        with pytest.raises(HTTPError) as refused:
            post("generate", text_input="hello", max_tokens=0)
        assert "max_tokens is 0: use at least 1." in refused.value.read().decode()
    finally:
        process.terminate()
        process.wait()
