"""A service over a kvpack engine: completions as OpenAI's clients ask for them, sessions kept between requests.

python examples/service/server.py --engine engine/ --memory-limit 4GiB
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from generations import GenerateRequest, Generation, Generations, Limits
from metrics import Metrics
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict
from sessions import Refused

from plugins.errors import UserError
from runtime import Engine, SamplingParams, Token
from runtime.cli import byte_count

DEFAULT_TOKENS = 256  # max_tokens of a request that names none
BODY_BYTES_PER_TOKEN = 32  # a request's body has at most so many for each token of the longest prompt


class Options(BaseModel):
    """What both kinds of request share. A field that is not here is an error, not something to be ignored."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""  # clients send one; the service has only one
    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] = []
    ignore_eos: bool = False
    stream: bool = False
    session: str | None = None  # keep the cache under this name; later requests with it send only what is new
    resume: bool = False  # refuse with 404 when the session is not there any more

    def params(self, limits: Limits) -> SamplingParams:
        """Raises UserError."""
        tokens = self.max_tokens if self.max_tokens is not None else min(DEFAULT_TOKENS, limits.max_tokens)
        if tokens > limits.max_tokens:
            raise UserError(f"max_tokens is {tokens}: this service allows {limits.max_tokens}.")
        return SamplingParams(
            max_tokens=tokens, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed,
            stop=self.stop, ignore_eos=self.ignore_eos,
        )  # fmt: skip


class CompletionOptions(Options):
    prompt: str | list[int]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: str
    content: str


class ChatOptions(Options):
    messages: list[Message]


class Answer:
    """One generation in OpenAI's words: as one object, or as chunks."""

    def __init__(self, generation: Generation, model: str, chat: bool) -> None:
        self.generation = generation
        self.chat = chat
        self.kind = "chat.completion" if chat else "text_completion"
        name = "chatcmpl" if chat else "cmpl"
        self.head = {"id": f"{name}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, tokens: list[Token]) -> dict[str, Any]:
        text = "".join(token.text for token in tokens)
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return self._body(self.kind, content, tokens) | {"usage": self.usage()}

    def chunk(self, token: Token, first: bool) -> dict[str, Any]:
        delta = ({"role": "assistant"} if first else {}) | {"content": token.text}
        content = {"delta": delta} if self.chat else {"text": token.text}
        body = self._body("chat.completion.chunk" if self.chat else self.kind, content, [token])
        return body | {"usage": self.usage()} if token.finish_reason else body

    def usage(self) -> dict[str, Any]:
        prompt, new = self.generation.prompt_tokens, self.generation.new_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": self.generation.cached_tokens},
        }

    def _body(self, kind: str, content: dict[str, Any], tokens: list[Token]) -> dict[str, Any]:
        choice = {"index": 0, **content, "token_ids": [token.id for token in tokens]}
        return {"object": kind, **self.head, "choices": [choice | {"finish_reason": tokens[-1].finish_reason}]}


class Events(StreamingResponse):
    """An answer as server-sent events. However it ends, and even if it never begins, the generation ends with it."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(self._events(answer), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.generation = answer.generation

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            self.generation.stop()

    @staticmethod
    async def _events(answer: Answer) -> AsyncIterator[str]:
        try:
            first = True
            async for token in answer.generation.tokens():
                yield _event(answer.chunk(token, first))
                first = False
        except Refused as error:  # the status is out already
            yield _event(_error(error.status, str(error)))
        yield "data: [DONE]\n\n"


class BodyLimit:
    """ASGI middleware: a body of more than `most` bytes is not read to its end."""

    def __init__(self, app: Any, most: int) -> None:
        self.app = app
        self.most = most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        total = 0

        async def limited() -> Any:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self.most:
                raise HTTPException(413, f"the request has more than {self.most} bytes: shorten its prompt.")
            return message

        await self.app(scope, limited, send)


class ClientGone(Exception):
    """The client left before its answer began."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` returns; it is cancelled when the client leaves. Raises ClientGone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(work), asyncio.create_task(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientGone
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def create_app(engine: Engine, limits: Limits) -> FastAPI:
    """The service, which closes `engine` at its end. Raises UserError when the limits do not fit the engine."""
    metrics = Metrics()
    generations = Generations(engine, limits, metrics)
    model = engine.artefact.config["model"]["name"]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async def expire() -> None:
            while True:
                await asyncio.sleep(min(limits.idle_seconds / 4, 30))
                await asyncio.to_thread(generations.sessions.expire)

        task = asyncio.create_task(expire())
        yield
        task.cancel()
        await generations.close()

    app = FastAPI(title="kvpack", lifespan=lifespan)
    app.add_middleware(BodyLimit, most=(1 << 16) + BODY_BYTES_PER_TOKEN * limits.prompt_tokens)

    async def answer(request: Request, prompt: Any, options: Options, chat: bool) -> Response:
        wanted = GenerateRequest(prompt, options.params(limits), options.session, options.resume)

        async def whole() -> dict[str, Any]:
            generation = await generations.start(wanted)
            try:
                return Answer(generation, model, chat).whole([token async for token in generation.tokens()])
            finally:
                generation.stop()

        if options.stream:
            return Events(Answer(await unless_gone(request, generations.start(wanted)), model, chat))
        return JSONResponse(await unless_gone(request, whole()))

    @app.post("/v1/completions")
    async def completions(request: Request, options: CompletionOptions) -> Response:
        return await answer(request, options.prompt, options, chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, options: ChatOptions) -> Response:
        return await answer(request, [message.model_dump() for message in options.messages], options, chat=True)

    @app.delete("/v1/sessions/{name:path}")
    async def forget(name: str) -> Response:
        await asyncio.to_thread(generations.sessions.forget, name)
        return Response(status_code=204)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "model": model, "kernels": engine.kernels}

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        headers = {"Retry-After": "1"} if error.status == 503 else None
        return JSONResponse(_error(error.status, str(error)), error.status, headers)

    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # nobody reads it

    def invalid(sentence: str, status: int = 400) -> Response:
        metrics.requests.labels("invalid").inc()
        return JSONResponse(_error(status, sentence), status)

    @app.exception_handler(UserError)
    async def user_error(request: Request, error: UserError) -> Response:
        return invalid(str(error))

    @app.exception_handler(HTTPException)
    async def too_large(request: Request, error: HTTPException) -> Response:
        return invalid(error.detail, error.status_code)

    @app.exception_handler(RequestValidationError)
    async def bad_request(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return invalid(f"{'.'.join(part for part in first['loc'] if isinstance(part, str))}: {first['msg']}.")

    return app


def _error(status: int, sentence: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": sentence, "type": kind, "code": status}}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _options() -> argparse.ArgumentParser:
    default = Limits()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", required=True, help="an engine folder")
    parser.add_argument("--provider", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="CPU threads of one step")
    parser.add_argument("--self-check", action="store_true", help="replay the engine's stored prompts before serving")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--memory-limit", type=byte_count, metavar="SIZE", help="of all caches, for example 4GiB")
    parser.add_argument("--max-running", type=int, default=default.running, help="generations at a time")
    parser.add_argument("--max-waiting", type=int, default=default.waiting, help="requests that wait for their turn")
    parser.add_argument("--max-sessions", type=int, default=default.sessions, help="named sessions")
    parser.add_argument("--idle-seconds", type=float, default=default.idle_seconds, help="after which a session goes")
    parser.add_argument("--max-prompt-tokens", type=int, default=default.prompt_tokens, help="its session included")
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens, help="that one request may ask for")
    parser.add_argument("--grace-seconds", type=int, default=30, help="for running requests when the service ends")
    return parser


def main() -> None:
    args = _options().parse_args()
    logging.basicConfig(level=logging.INFO)
    try:
        limits = Limits(
            running=args.max_running,
            waiting=args.max_waiting,
            sessions=args.max_sessions,
            idle_seconds=args.idle_seconds,
            prompt_tokens=args.max_prompt_tokens,
            max_tokens=args.max_tokens,
        )
        engine = Engine.open(args.engine, provider=args.provider, threads=args.threads, memory_limit=args.memory_limit)
        if args.self_check:
            engine.self_check()
        app = create_app(engine, limits)
    except UserError as error:
        sys.exit(f"error: {error}")
    uvicorn.run(app, host=args.host, port=args.port, timeout_graceful_shutdown=args.grace_seconds)


if __name__ == "__main__":
    main()
