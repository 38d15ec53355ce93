"""examples/service over real HTTP: answers, sessions, limits, clients that leave, memory, metrics, the command line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import tiny_artefact as tiny
import uvicorn

from plugins.contract import bytes_at
from runtime import Engine, SamplingParams, Session, Token
from runtime.session import StepFailed

SERVICE = Path(__file__).parent.parent / "examples" / "service"
sys.path.insert(0, str(SERVICE))
from generations import Limits  # noqa: E402
from server import create_app  # noqa: E402

PATIENCE = 60  # seconds after which something that should happen soon has failed
LONG = 1 << 20  # tokens that no test would see the end of
GEOMETRY = tiny.Geometry(sinks=2, window=5, block=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("service") / "engine", geometry=GEOMETRY, max_length=LONG)


@dataclass
class Service:
    """A running service, and what a client does with it."""

    port: int
    engine: Engine

    def connect(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> HTTPConnection:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request(
            method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"}
        )
        return connection

    def ask(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and answer of a request that does not stream."""
        return self.request("POST", path, body)

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        connection = self.connect(path, body, method)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, json.loads(content) if content else {}

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All events of a stream; checks that it is one, and ends as it should."""
        connection = self.connect(path, {**body, "stream": True})
        response = connection.getresponse()
        assert (response.status, response.getheader("content-type")) == (200, "text/event-stream; charset=utf-8")
        blocks = response.read().decode().split("\n\n")
        connection.close()
        assert blocks[-2:] == ["data: [DONE]", ""]
        return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]

    def metrics(self) -> dict[str, float]:
        connection = self.connect("/metrics", method="GET")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("kvpack_"): float(value) for name, value in pairs}

    def wait(self, **expected: float) -> dict[str, float]:
        """The metrics, once these have these values."""
        until = time.monotonic() + PATIENCE
        while any((found := self.metrics())[name] != value for name, value in expected.items()):
            assert time.monotonic() < until, (expected, found)
            time.sleep(0.01)
        return found

    def outcomes(self) -> dict[str, int]:
        """Requests by outcome, without those that there were none of."""
        found = (
            (re.fullmatch(r'requests_total{outcome="(\w+)"}', name), count) for name, count in self.metrics().items()
        )
        return {match[1]: int(count) for match, count in found if match and count}


@contextmanager
def serving(folder: Path, memory_limit: int | None = None, **limits: Any) -> Iterator[Service]:
    """The service on a free port, in a thread of its own event loop."""
    engine = Engine.open(folder, threads=1, memory_limit=memory_limit)
    app = create_app(engine, Limits(**limits))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until = time.monotonic() + PATIENCE
        while not server.started:
            assert thread.is_alive() and time.monotonic() < until
            time.sleep(0.01)
        yield Service(server.servers[0].sockets[0].getsockname()[1], engine)
    finally:
        server.should_exit = True
        thread.join()
    assert engine.closed


class Gate:
    """Holds every session at its first token from `closed` until `open()`, so that a test knows who is running."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside = threading.Semaphore(0)
        self._open = threading.Event()
        decode = Session.decode

        def held(session: Session, tokens: list[int]) -> Any:
            if not self._open.is_set():
                self.inside.release()
                assert self._open.wait(PATIENCE)
            return decode(session, tokens)

        monkeypatch.setattr(Session, "decode", held)

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self.inside.acquire(timeout=PATIENCE)

    def open(self) -> None:
        self._open.set()


def alone(engine: Engine, *turns: Any, **params: Any) -> list[list[Token]]:
    """What a session of its own generates, turn by turn."""
    with engine.session() as session:
        return [list(session.generate(prompt, SamplingParams(**params))) for prompt in turns]


def answer_to(engine: Engine, body: dict[str, Any]) -> list[Token]:
    """What a session of its own generates for a request."""
    given = dict(body)
    prompt = given.pop("messages", None) or given.pop("prompt")
    return alone(engine, prompt, **given)[0]


def text_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def ids_of(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events for token in event["choices"][0]["token_ids"]]


def size(engine: Engine, tokens: int) -> int:
    """Bytes of one session with room for `tokens`."""
    return bytes_at(engine.artefact.states, tokens, engine.artefact.geometry)


def test_sixteen_streams_at_a_time_get_what_a_session_alone_gives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        {"prompt": f"Question {n} " * (n + 1), "max_tokens": 20 + 3 * n, "temperature": 20.0 + n}
        | {"top_p": 0.9, "seed": n}
        for n in range(16)
    ]
    with serving(folder, running=16) as service:
        with monkeypatch.context() as patch, ThreadPoolExecutor(16) as clients:
            tiny.prefill_together(patch, 16, PATIENCE)
            answers = list(clients.map(lambda body: service.stream("/v1/completions", **body), asked))
        for body, events in zip(asked, answers, strict=True):
            expected = answer_to(service.engine, body)
            assert ids_of(events) == [token.id for token in expected]
            assert "".join(event["choices"][0]["text"] for event in events) == text_of(expected)
            assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
            assert len({event["id"] for event in events}) == 1
        assert len({tuple(ids_of(events)) for events in answers}) == 16
        assert service.engine.nbytes == 0 and service.outcomes() == {"ok": 16}


def test_a_conversation_by_session_equals_one_runtime_session(folder: Path) -> None:
    turns = [[{"role": "user", "content": text}] for text in ("Hi", "And then?", "Why?")]
    params = {"max_tokens": 9, "temperature": 30.0, "seed": 5}
    with serving(folder) as service:
        expected = alone(service.engine, *turns, **params)
        for number, (messages, tokens) in enumerate(zip(turns, expected, strict=True)):
            body = {"messages": messages, "session": "a/b", "resume": number > 0, **params}
            if number == 1:
                events = service.stream("/v1/chat/completions", **body)
                deltas = [event["choices"][0]["delta"] for event in events]
                assert deltas[0] == {"role": "assistant", "content": tokens[0].text}
                assert "".join(delta["content"] for delta in deltas) == text_of(tokens)
                assert ids_of(events) == [token.id for token in tokens]
                usage = events[-1]["usage"]
            else:
                status, answer = service.ask("/v1/chat/completions", **body)
                assert status == 200 and answer["object"] == "chat.completion"
                assert answer["choices"][0]["message"] == {"role": "assistant", "content": text_of(tokens)}
                usage = answer["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == (number > 0)
            assert usage["total_tokens"] == usage["prompt_tokens"] + 9
        assert service.metrics()["idle_sessions"] == 1 and service.engine.nbytes > 0
        text = [alone(service.engine, "one", " two", max_tokens=4)[turn] for turn in (0, 1)]
        for prompt, tokens in zip(("one", " two"), text, strict=True):
            _, answer = service.ask("/v1/completions", prompt=prompt, session="text", max_tokens=4)
            assert answer["choices"][0]["text"] == text_of(tokens)
        for name, status in (("a/b", 204), ("a/b", 404), ("text", 204)):
            assert service.request("DELETE", f"/v1/sessions/{name}")[0] == status
        assert service.engine.nbytes == 0
        status, answer = service.ask("/v1/completions", prompt="x", session="text", resume=True)
        assert status == 404 and "there is no session 'text'" in answer["error"]["message"]


def test_memory_stays_within_its_limit_and_returns_to_the_floor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "x" * 100, "max_tokens": 100}
    with Engine.open(folder) as engine:
        limit = 3 * size(engine, 200) + 1
        expected = text_of(answer_to(engine, body))
    gate = Gate(monkeypatch)
    with serving(folder, limit, running=8, prompt_tokens=100, max_tokens=100) as service:
        watch = threading.Event()
        seen: list[float] = []

        def look() -> None:
            while not watch.is_set():
                seen.append(service.metrics()["cache_bytes"])

        watcher = threading.Thread(target=look)
        watcher.start()
        with ThreadPoolExecutor(12) as clients:
            held = [clients.submit(service.ask, "/v1/completions", **body) for _ in range(3)]
            gate.wait_for(3)
            assert service.metrics()["cache_bytes"] == 3 * size(service.engine, 200)
            status, answer = service.ask("/v1/completions", **body)
            assert status == 503
            assert re.search("needs .* bytes, other sessions hold .* limit is", answer["error"]["message"])
            gate.open()
            assert [future.result()[0] for future in held] == [200] * 3
            crowd = list(clients.map(lambda _: service.ask("/v1/completions", **body), range(24)))
        # an idle session makes room for others
        assert service.ask("/v1/completions", **body | {"session": "idle"})[0] == 200
        assert service.metrics()["cache_bytes"] == size(service.engine, 200)
        gate = Gate(monkeypatch)
        with ThreadPoolExecutor(3) as clients:
            held = [clients.submit(service.ask, "/v1/completions", **body) for _ in range(3)]
            gate.wait_for(3)
            assert service.metrics()["idle_sessions"] == 0
            gate.open()
            assert [future.result()[0] for future in held] == [200] * 3
        watch.set()
        watcher.join()
        answers = {status: 0 for status in (200, 503)}
        for status, answer in crowd:
            answers[status] += 1
            assert status == 503 or answer["choices"][0]["text"] == expected
        assert answers[200] >= 3
        assert service.outcomes() == {"ok": answers[200] + 7, "memory": answers[503] + 1}
        assert max(seen) <= limit == service.metrics()["cache_limit_bytes"]
        assert service.metrics()["cache_bytes"] == service.engine.nbytes == 0


@pytest.mark.parametrize("interrupts", [True, False], ids=["in a step", "after a step"])
def test_clients_that_leave_end_their_generation_and_nothing_else(
    folder: Path, interrupts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not interrupts:
        monkeypatch.setattr(Session, "interrupt", lambda session: None)
    endless = {"prompt": "x", "max_tokens": LONG - 10}
    with serving(folder, running=3, prompt_tokens=100, max_tokens=LONG) as service:
        stays = {"prompt": "stays", "max_tokens": 300, "temperature": 30.0, "seed": 1}
        with ThreadPoolExecutor(1) as clients:
            connection = service.connect("/v1/completions", endless | {"stream": True, "session": "named"})
            response = connection.getresponse()
            first = [response.readline() for _ in range(6)]
            assert sum(line.startswith(b"data: {") for line in first) == 3
            whole = service.connect("/v1/completions", endless)  # will wait for an answer that never comes
            service.wait(running_requests=2)
            other = clients.submit(service.stream, "/v1/completions", **stays)
            response.close()
            connection.close()
            service.wait(**{'requests_total{outcome="cancelled"}': 1})
            whole.close()
            service.wait(**{'requests_total{outcome="cancelled"}': 2})
            expected = answer_to(service.engine, stays)
            assert ids_of(other.result()) == [token.id for token in expected]
        found = service.wait(running_requests=0, idle_sessions=0, cache_bytes=0)
        assert 3 + 300 <= found["generated_tokens_total"] < LONG / 2
        assert service.ask("/v1/completions", prompt="x", session="named", resume=True)[0] == 404
        assert service.outcomes() == {"ok": 1, "cancelled": 2, "invalid": 1}


def test_a_client_that_leaves_during_a_step_interrupts_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, pressed = tiny.endless_prefill(monkeypatch, PATIENCE)
    with serving(folder) as service:
        connection = service.connect("/v1/completions", {"prompt": "x", "stream": True})
        assert inside.wait(PATIENCE)
        connection.close()
        found = service.wait(**{'requests_total{outcome="cancelled"}': 1})
        assert pressed.is_set()
        assert found["cache_bytes"] == found["generated_tokens_total"] == found["running_requests"] == 0


def test_more_requests_than_may_run_wait_and_more_than_may_wait_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with serving(folder, running=1, waiting=2) as service, ThreadPoolExecutor(3) as clients:
        asked = [{"prompt": f"prompt {n}", "max_tokens": 5} for n in range(3)]
        answers = [clients.submit(service.ask, "/v1/completions", **asked[0])]
        gate.wait_for(1)
        gone = service.connect("/v1/completions", asked[1])
        service.wait(waiting_requests=1)
        gone.close()  # a client that leaves while it waits frees its place
        service.wait(waiting_requests=0)
        answers += [clients.submit(service.ask, "/v1/completions", **body) for body in asked[1:]]
        service.wait(waiting_requests=2, running_requests=1)
        connection = service.connect("/v1/completions", asked[0])
        response = connection.getresponse()
        assert (response.status, response.getheader("Retry-After")) == (503, "1")
        assert "2 requests are waiting already" in response.read().decode()
        connection.close()
        gate.open()
        for body, answer in zip(asked, answers, strict=True):
            expected = answer_to(service.engine, body)
            assert answer.result()[1]["choices"][0]["text"] == text_of(expected)
        assert service.outcomes() == {"ok": 3, "busy": 1, "cancelled": 1}


def test_bad_requests_are_refused_in_one_sentence(folder: Path) -> None:
    with serving(folder, prompt_tokens=50, max_tokens=60) as service:
        session = {"prompt": "x" * 30, "max_tokens": 10, "session": "s"}
        assert service.ask("/v1/completions", **session)[0] == 200
        bad: list[tuple[int, str, dict[str, Any]]] = [
            (413, "the prompt has 51 tokens", {"prompt": "x" * 51}),
            (413, "the prompt has 70 tokens, what its session holds included", session),
            (400, "max_tokens is 61: this service allows 60", {"prompt": "x", "max_tokens": 61}),
            (400, "max_tokens is 0: use at least 1", {"prompt": "x", "max_tokens": 0}),
            (400, "top_p is 2.0", {"prompt": "x", "top_p": 2}),
            (400, "the prompt is empty", {"prompt": ""}),
            (400, "outside the vocabulary", {"prompt": [tiny.VOCAB]}),
            (400, "body.n: Extra inputs are not permitted", {"prompt": "x", "n": 2}),
            (400, "body.prompt: Field required", {}),
        ]
        for status, sentence, body in bad:
            for stream in (False, True):
                found, answer = service.ask("/v1/completions", **body, stream=stream)
                assert (found, answer["error"]["code"]) == (status, status)
                assert sentence in answer["error"]["message"]
        status, answer = service.ask("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], session="s")
        assert status == 400 and "was not started with messages" in answer["error"]["message"]
        assert service.ask("/v1/completions", **session | {"prompt": "x", "max_tokens": 60})[0] == 200  # still there
        status, answer = service.ask("/v1/completions", prompt="x" * (1 << 20))
        assert status == 413 and "more than 67136 bytes" in answer["error"]["message"]
        assert service.outcomes() == {"ok": 2, "invalid": 2 * len(bad) + 2}
    with Engine.open(folder) as engine:
        limit = engine.artefact.max_length
        with serving(folder, prompt_tokens=2 * limit) as service:
            status, answer = service.ask("/v1/completions", prompt=[1] * (limit + 1))
            assert status == 413 and f"limit of {limit}" in answer["error"]["message"]


def test_a_session_out_of_memory_fails_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Session.step
    doomed: list[Session] = []

    def failing(session: Session, token_lists: list[list[int]], *rest: Any) -> Any:
        if len(token_lists[0]) == 55:
            doomed.append(session)
        if len(token_lists[0]) == 77 or (session in doomed and session.lengths[0] == 55 + 4):
            raise StepFailed(f"appending {len(token_lists[0])} tokens failed inside ONNX Runtime (no memory).")
        return step(session, token_lists, *rest)

    others = [{"prompt": f"other {n}", "max_tokens": 200, "temperature": 30.0, "seed": n} for n in range(4)]
    with serving(folder) as service, ThreadPoolExecutor(4) as clients:
        expected = [answer_to(service.engine, body) for body in others]
        monkeypatch.setattr(Session, "step", failing)
        answers = [clients.submit(service.stream, "/v1/completions", **body) for body in others]
        for stream in (False, True):  # before the first token there is a status to say it with
            status, answer = service.ask("/v1/completions", prompt="x" * 77, session="s", stream=stream)
            assert status == 503 and "77 tokens failed inside ONNX Runtime" in answer["error"]["message"]
        *events, last = service.stream("/v1/completions", prompt="x" * 55, max_tokens=50, session="s")
        assert len(ids_of(events)) == 5 and last["error"]["code"] == 503
        for tokens, answer in zip(expected, answers, strict=True):
            assert ids_of(answer.result()) == [token.id for token in tokens]
        assert service.outcomes() == {"ok": 4, "memory": 3} and service.engine.nbytes == 0
        assert service.ask("/v1/completions", prompt="x" * 30, session="s", resume=True)[0] == 404
        monkeypatch.setattr(Session, "step", lambda *_: 1 / 0)
        status, answer = service.ask("/v1/completions", prompt="x")
        assert status == 500 and answer["error"]["message"] == "the service failed: see its log."
        monkeypatch.setattr(Session, "step", step)
        assert service.ask("/v1/completions", prompt="x")[0] == 200


def test_sessions_expire_and_the_least_recently_used_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def use(service: Service, name: str, **more: Any) -> int:
        return service.ask("/v1/completions", prompt="x", max_tokens=4, session=name, **more)[0]

    with serving(folder, sessions=2) as service:
        assert [use(service, name) for name in ("a", "b", "a", "c")] == [200] * 4
        assert [use(service, name, resume=True) for name in ("a", "b", "c")] == [200, 404, 200]
        gate = Gate(monkeypatch)
        with ThreadPoolExecutor(2) as clients:
            busy = [clients.submit(use, service, name) for name in ("a", "d")]
            gate.wait_for(2)
            assert use(service, "a") == 409  # one request at a time
            assert use(service, "e") == 503  # both are in use
            gate.open()
            assert [answer.result() for answer in busy] == [200, 200]
        assert service.outcomes() == {"ok": 8, "invalid": 2, "busy": 1}
    with serving(folder, idle_seconds=0.05) as service:
        assert use(service, "a") == 200
        service.wait(idle_sessions=0, cache_bytes=0)
        assert use(service, "a", resume=True) == 404


def test_the_metrics_add_up(folder: Path) -> None:
    with serving(folder) as service:
        usages = [service.ask("/v1/completions", prompt="x" * n, max_tokens=n)[1]["usage"] for n in (3, 4, 5)]
        usages += [service.ask("/v1/completions", prompt="xy", max_tokens=6, session="s")[1]["usage"] for _ in range(2)]
        service.ask("/v1/completions", prompt="")
        found = service.metrics()
        assert service.outcomes() == {"ok": 5, "invalid": 1}
        assert found["generated_tokens_total"] == sum(usage["completion_tokens"] for usage in usages) == 24
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached == [0, 0, 0, 0, 2 + 5]
        assert found["prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages) - sum(cached)
        assert found["time_to_first_token_seconds_count"] == 5
        assert found["time_per_output_token_seconds_count"] == 24 - 5
        assert found["cache_bytes"] == size(service.engine, 2 + 6 + 2 + 6 - 1 + 1) and found["idle_sessions"] == 1
        status, health = service.request("GET", "/health")
        assert (status, health["status"]) == (200, "ok")


@pytest.fixture
def command(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `server.py` as a user would."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> subprocess.Popen[str]:
        line = [sys.executable, str(SERVICE / "server.py"), "--engine", str(folder), "--port", "0", *options]
        variables = {"PYTHONPATH": str(SERVICE.parent.parent), "PATH": "/usr/bin:/bin"}
        started.append(subprocess.Popen(line, env=variables, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_the_command_serves_and_ends_gracefully(folder: Path, command: Callable[..., subprocess.Popen[str]]) -> None:
    process = command("--memory-limit", "20MB", "--max-tokens", "2000", "--threads", "1")
    assert process.stderr is not None
    port = next(int(found[1]) for line in process.stderr if (found := re.search(r"http://127\.0\.0\.1:(\d+)", line)))
    with Engine.open(folder) as engine:
        (expected,) = alone(engine, "hello", max_tokens=2000)
        service = Service(port, engine)
        assert service.metrics()["cache_limit_bytes"] == 20e6
        connection = service.connect("/v1/completions", {"prompt": "hello", "max_tokens": 2000, "stream": True})
        response = connection.getresponse()
        begin = response.readline()
        process.send_signal(signal.SIGTERM)
        blocks = (begin + response.read()).decode().split("\n\n")
    assert blocks[-2] == "data: [DONE]"  # what was running ends whole
    assert ids_of([json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]) == [t.id for t in expected]
    assert "Application shutdown complete" in process.stderr.read()
    assert process.wait(PATIENCE) in (0, -signal.SIGTERM)
    for options, sentence in (
        (["--memory-limit", "9KB"], "the limit is 9,000"),
        (["--max-running", "0"], "running is 0"),
    ):
        refused = command(*options)
        told = refused.communicate(timeout=PATIENCE)[1]
        assert refused.returncode == 1 and told.startswith("error: ") and sentence in told and told.count("\n") == 1


@pytest.mark.slow
def test_a_real_model_answers_sixteen_and_a_long_prompt_can_be_left(home: Path) -> None:
    from real import built

    folder = built(home / "service", "--method", "vqkv", "--ratio", "0.25", "--effort", "quick")
    asked = [
        {"messages": [{"role": "user", "content": f"Count from {n} to {n + 9}."}], "max_tokens": 12}
        | {"temperature": 0.8, "seed": n}
        for n in range(16)
    ]
    with serving(folder, running=16) as service, ThreadPoolExecutor(16) as clients:
        connection = service.connect("/v1/completions", {"prompt": "A long text. " * 1500, "max_tokens": 5})
        service.wait(running_requests=1)
        connection.close()  # in the middle of its prefill, which goes no further
        found = service.wait(**{'requests_total{outcome="cancelled"}': 1})
        assert found["prompt_tokens_total"] == found["cache_bytes"] == 0
        answers = list(clients.map(lambda body: service.stream("/v1/chat/completions", **body), asked))
        for body, events in zip(asked, answers, strict=True):
            expected = answer_to(service.engine, body)
            assert ids_of(events) == [token.id for token in expected]
            assert "".join(event["choices"][0]["delta"]["content"] for event in events) == text_of(expected)
        assert service.engine.nbytes == 0
