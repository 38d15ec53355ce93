"""Embed a kvpack engine in a service: an HTTP endpoint that streams, one cache per conversation, standard library only.

python examples/stream_service.py engine/ --port 8000
curl -N localhost:8000/chat/alice -d 'Why is the sky blue?'
curl -N localhost:8000/chat/alice -d 'And at sunset?'
curl -X DELETE localhost:8000/chat/alice
"""

from __future__ import annotations

import argparse
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from plugins.errors import UserError
from runtime import Engine, SamplingParams, Session


class Chats:
    """The open conversations. Each has its own session and lock; the engine is shared by all."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._open: dict[str, tuple[Session, threading.Lock]] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> tuple[Session, threading.Lock]:
        with self._lock:
            if name not in self._open:
                self._open[name] = (self.engine.session(), threading.Lock())
            return self._open[name]

    def close(self, name: str) -> None:
        with self._lock:
            session, _ = self._open.pop(name, (None, None))
        if session is not None:
            session.close()


def make_server(engine: Engine, port: int, max_tokens: int = 256) -> ThreadingHTTPServer:
    chats = Chats(engine)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            session, lock = chats.get(self.path)
            question = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            with lock:
                try:
                    # Bad input (too long, no template) raises here, before the first byte of the answer.
                    messages = [{"role": "user", "content": question}]
                    tokens = session.generate(messages, SamplingParams(max_tokens=max_tokens))
                except UserError as error:
                    self.send_error(400, str(error))
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.end_headers()
                try:
                    for token in tokens:
                        self.wfile.write(token.text.encode())
                        self.wfile.flush()
                except ConnectionError:
                    tokens.close()  # the client left: stop; the conversation stays usable
                except UserError as error:
                    self.log_error("%s", error)

        def do_DELETE(self) -> None:
            chats.close(self.path)
            self.send_response(204)
            self.end_headers()

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    with Engine.open(args.engine, memory_limit=4 << 30) as engine, make_server(engine, args.port) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
