"""Cache sessions that outlive a request, by name: an idle time, a cap, and the least recently used goes first."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from runtime import Engine, Session


class Refused(Exception):
    """A request that ends without its answer. status: HTTP's. outcome: its label in the metrics."""

    def __init__(self, status: int, outcome: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.outcome = outcome


class Sessions:
    """Hands sessions out and takes them back; safe to use from several threads.

    A session is handed out to one request at a time. Sessions without a name live as long as their request.
    """

    def __init__(self, engine: Engine, most: int, idle_seconds: float) -> None:
        """most: named sessions open at a time. idle_seconds: a session not used for so long is closed."""
        self.engine = engine
        self.most = most
        self.idle_seconds = idle_seconds
        self._idle: OrderedDict[str, tuple[Session, float]] = OrderedDict()  # least recently used first, with when
        self._used: set[str] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many are idle."""
        return len(self._idle)

    def take(self, name: str | None, resume: bool = False) -> Session:
        """The named session, or a new one. resume: refuse to make a new one. Raises Refused."""
        if name is None:
            return self.engine.session()
        with self._lock:
            if name in self._used:
                raise Refused(409, "invalid", f"session {name!r} is answering another request: wait for its end.")
            session, _ = self._idle.pop(name, (None, 0.0))
            if session is None and resume:
                raise Refused(404, "invalid", f"there is no session {name!r}, or not any more: send the whole context.")
            self._used.add(name)
            crowded = session is None and len(self._idle) + len(self._used) > self.most
        if crowded and not self.evict():
            with self._lock:
                self._used.remove(name)
            raise Refused(503, "busy", f"all {self.most} sessions are answering requests: try again later.")
        return session or self.engine.session()

    def give_back(self, name: str | None, session: Session, keep: bool) -> None:
        """End a request's use of `session`; what is not kept, or holds nothing, is closed."""
        keep = keep and name is not None and not session.broken and bool(session.lengths.any())
        if not keep:
            session.close()
        with self._lock:
            self._used.discard(name)
            if keep:
                self._idle[name] = session, time.monotonic()

    def evict(self) -> bool:
        """Close the idle session that was used least recently; False: there is none."""
        with self._lock:
            if not self._idle:
                return False
            _, (session, _) = self._idle.popitem(last=False)
        session.close()
        return True

    def expire(self) -> None:
        """Close the sessions that were idle for too long."""
        with self._lock:
            until = time.monotonic() - self.idle_seconds
            names = [name for name, (_, used) in self._idle.items() if used <= until]
            old = [self._idle.pop(name)[0] for name in names]
        for session in old:
            session.close()

    def forget(self, name: str) -> None:
        """Close one. Raises Refused."""
        self.give_back(name, self.take(name, resume=True), keep=False)
