"""Everything between HTTP and the engine: admission, a thread per generation, tokens back to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from metrics import Metrics
from sessions import Refused, Sessions

from plugins.errors import UserError
from runtime import ContextOverflow, Engine, SamplingParams, Session, Token

log = logging.getLogger("kvpack.service")
PRESS_SECONDS = 0.01  # between two attempts to interrupt a step


@dataclass(frozen=True)
class Limits:
    """What clients may use together, and one of them alone.

    running: generations at a time. waiting: requests that wait for one of them to end; more are refused.
    sessions, idle_seconds: see Sessions. prompt_tokens: of one request, what its session holds included.
    max_tokens: tokens that one request may ask for.
    """

    running: int = 16
    waiting: int = 64
    sessions: int = 64
    idle_seconds: float = 600.0
    prompt_tokens: int = 8192
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name != "waiting"):
                raise UserError(f"the limit {name} is {value}: it must be positive.")


@dataclass(frozen=True)
class GenerateRequest:
    """What to generate. params.max_tokens is set. session, resume: see Sessions.take."""

    prompt: str | list[int] | list[dict[str, str]]
    params: SamplingParams
    session: str | None = None
    resume: bool = False


class Generation:
    """One admitted request. Its methods belong to the event loop, `emit` to the thread that generates.

    prompt_tokens: what the answer attends to from the start; cached_tokens: those of them that the session held before.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.arrived = time.perf_counter()
        self.prompt_tokens = self.cached_tokens = self.new_tokens = 0
        self.cancel = threading.Event()
        self.session: Session | None = None  # while its thread uses one
        self.over = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Token | Refused] = asyncio.Queue()
        self._first: Token | None = None

    async def first(self) -> None:
        """Wait for the first token. Raises Refused."""
        event = await self._events.get()
        if isinstance(event, Refused):
            raise event
        self._first = event

    async def tokens(self) -> AsyncIterator[Token]:
        """All tokens, the first included; the last has a finish_reason. Raises Refused."""
        event: Token | Refused | None = self._first
        while event is not None:
            if isinstance(event, Refused):
                raise event
            yield event
            event = None if event.finish_reason else await self._events.get()

    def put(self, event: Token | Refused) -> None:
        self._events.put_nowait(event)

    def emit(self, token: Token) -> None:
        self._loop.call_soon_threadsafe(self.put, token)

    def stop(self) -> None:
        """End it at once, in the middle of a step if need be: nobody waits for its answer any more."""
        if not self.over and not self.cancel.is_set():
            self.cancel.set()
            self._press()

    def _press(self) -> None:
        session = self.session
        if session is not None:
            session.interrupt()
        if not self.over:  # an interrupt between two steps has no effect
            self._loop.call_later(PRESS_SECONDS, self._press)


class Generations:
    """Runs requests on one engine. To be made and used on one event loop; closes the engine in the end."""

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics) -> None:
        """Raises UserError when not even one session of the largest allowed size fits into the memory."""
        self.engine = engine
        self.limits = limits
        self.metrics = metrics
        self.sessions = Sessions(engine, limits.sessions, limits.idle_seconds)
        self._capacity = min(limits.prompt_tokens + limits.max_tokens, engine.artefact.max_length)
        engine.session(capacity=self._capacity).close()
        with suppress(UserError):  # an engine without a tokenizer takes prompts as tokens only
            _ = engine.text  # read now, not for the first request
        self._slots = asyncio.Semaphore(limits.running)
        self._waiting = 0
        self._running: dict[Generation, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(limits.running, thread_name_prefix="generation")
        metrics.gauge("running_requests", "Requests that are being answered.", lambda: len(self._running))
        metrics.gauge("waiting_requests", "Requests that wait to be answered.", lambda: self._waiting)
        metrics.gauge("idle_sessions", "Named sessions that wait for their next request.", lambda: len(self.sessions))
        metrics.gauge("cache_bytes", "Bytes of all caches, as allocated.", lambda: engine.nbytes)
        metrics.gauge("cache_limit_bytes", "Their limit; 0: none.", lambda: engine.memory_limit or 0)

    async def start(self, request: GenerateRequest) -> Generation:
        """Wait for a turn and for the first token; cancelling ends the request. Raises Refused."""
        generation = Generation(request)
        try:
            await self._turn()
        except (Refused, asyncio.CancelledError) as error:
            self.metrics.requests.labels(getattr(error, "outcome", "cancelled")).inc()
            raise
        self._running[generation] = asyncio.create_task(self._run(generation))
        try:
            await generation.first()
        except asyncio.CancelledError:
            generation.stop()
            raise
        return generation

    async def close(self) -> None:
        for generation in self._running:
            generation.stop()
        await asyncio.gather(*self._running.values())
        self._threads.shutdown()
        self.engine.close()

    async def _turn(self) -> None:
        if self._slots.locked() and self._waiting >= self.limits.waiting:
            raise Refused(503, "busy", f"{self._waiting} requests are waiting already: try again later.")
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1

    async def _run(self, generation: Generation) -> None:
        try:
            event = await asyncio.get_running_loop().run_in_executor(self._threads, self._generate, generation)
            outcome = "cancelled" if event.finish_reason == "cancelled" else "ok"
        except Exception as error:
            event = error if isinstance(error, Refused) else Refused(500, "failed", "the service failed: see its log.")
            outcome = "cancelled" if generation.cancel.is_set() else event.outcome
            if outcome == "failed":
                log.exception("a generation failed")
            if outcome == "memory":
                log.warning("%s", event)
        generation.over = True
        del self._running[generation]
        self._slots.release()
        self.metrics.requests.labels(outcome).inc()
        generation.put(event)  # last, so that a client that has its answer finds everything as it should be

    def _generate(self, generation: Generation) -> Token:
        """In a thread: emit all tokens but the last, and return that one once the session is free. Raises Refused."""
        request = generation.request
        session = self.sessions.take(request.session, request.resume)
        generation.session = session
        keep, status, outcome = True, 400, "invalid"
        try:
            tokens = session.encode(request.prompt)
            generation.cached_tokens = int(session.lengths[0])
            generation.prompt_tokens = generation.cached_tokens + len(tokens)
            if generation.prompt_tokens > self.limits.prompt_tokens:
                raise ContextOverflow(
                    f"the prompt has {generation.prompt_tokens} tokens, what its session holds included, and this "
                    f"service allows {self.limits.prompt_tokens}: shorten it, or start a new session."
                )
            stream = session.generate(request.prompt, request.params, generation.cancel)
            status, outcome = 503, "memory"  # what fails from here on is not the request's fault
            self._reserve(session, generation.prompt_tokens + request.params.max_tokens)
            keep = False
            before = generation.arrived
            for token in stream:
                now, first = time.perf_counter(), generation.new_tokens == 0
                (self.metrics.first_token if first else self.metrics.next_token).observe(now - before)
                before = now
                self.metrics.prompt_tokens.inc(len(tokens) if first else 0)
                self.metrics.generated_tokens.inc()
                generation.new_tokens += 1
                if token.finish_reason:
                    keep = True
                    return token
                generation.emit(token)
        except (UserError, MemoryError) as error:
            if isinstance(error, ContextOverflow):
                status = 413
            raise Refused(status, outcome, str(error)) from error
        finally:
            generation.session = None  # before `cancel` is looked at, so that no later request is interrupted
            self.sessions.give_back(request.session, session, keep and not generation.cancel.is_set())

    def _reserve(self, session: Session, tokens: int) -> None:
        """Allocate what the request can need at most, so that it cannot run out later. Raises UserError."""
        tokens = min(tokens, self._capacity)
        while tokens > session.capacity:
            try:
                session.allocate(tokens)
            except UserError:
                if session.broken or not self.sessions.evict():
                    raise
