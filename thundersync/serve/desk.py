"""Where rollouts and outside agents meet: rollouts that wait for a program, sessions that are open, and their keys.

Place in the flow: between `agents`, which carry out rollouts, and `server`, which knows HTTP. Lives as long as the
run. Knows nothing of tokens or rewards.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import OrderedDict, deque

from thundersync.core.types import RolloutId
from thundersync.errors import StepStalled
from thundersync.serve.absence import Absence
from thundersync.serve.errors import Refused, SessionOver
from thundersync.serve.session import Session

ENDED_KEPT = 1024
"""Keys of sessions that are over."""


class RunOver(Refused):
    """No further rollout will come."""

    def __init__(self) -> None:
        super().__init__("the run is over", status=410, code="run_over")


class Offer:
    """A rollout that waits for a program to take it."""

    def __init__(self, rollout_id: RolloutId) -> None:
        loop = asyncio.get_running_loop()
        self.rollout_id = rollout_id
        self.taken: asyncio.Future[None] = loop.create_future()
        self.session: asyncio.Future[Session] = loop.create_future()


class Desk:
    """`key` opens every session and takes rollouts; each session has a key of its own, for it alone.

    `absence` is looked at while rollouts wait and nobody is there, for as long as `watch` runs.
    """

    def __init__(self, *, key: str, absence: Absence) -> None:
        self._key = key
        self._absence = absence
        self._sessions: dict[str, Session] = {}
        self._offers: deque[Offer] = deque()
        self._claimed: dict[RolloutId, Offer] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Keys of the last sessions that are over: their programs are told so, not that they are strangers."""
        self._news = asyncio.Condition()
        self._over = False

    @property
    def open(self) -> list[Session]:
        return list(self._sessions.values())

    @property
    def waiting(self) -> int:
        """Rollouts that no program has taken yet."""
        return len(self._offers)

    @property
    def missing(self) -> str:
        """What is missing, in words, where rollouts wait and nobody is there; else empty."""
        return self._absence.words(self.waiting) if self._deserted else ""

    def admits(self, key: str) -> bool:
        """Whether this is the run's key."""
        return _same(key, self._key)

    def find(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def session(self, session_id: str, key: str) -> Session:
        """An open session, or one that waits for its verdict. Raises: Refused for a wrong key, SessionOver."""
        session = self._sessions.get(session_id)
        if session is not None and _same(key, session.key):
            return session
        ended = self._ended.get(session_id)
        if not self.admits(key) and (ended is None or not _same(key, ended)):
            raise Refused("this key opens nothing here", status=401, code="invalid_api_key")
        if session is None:
            raise SessionOver(f"there is no session {session_id!r}: it is over, or never was")
        return session

    async def offer(self, rollout_id: RolloutId) -> None:
        """Wait until a program takes the rollout; its session is then to be opened.

        Raises: StepStalled where none comes.
        """
        offer = Offer(rollout_id)
        if not self._offers:
            self._absence.end()
        async with self._news:
            self._offers.append(offer)
            self._news.notify()
        try:
            await offer.taken
        except BaseException:
            if offer in self._offers:
                self._offers.remove(offer)
            elif not offer.session.done():
                offer.session.cancel()
            raise
        self._claimed[rollout_id] = offer

    async def take(self, wait_s: float) -> Session | None:
        """The session of the next rollout; None if none comes within `wait_s`. Raises: RunOver."""
        try:
            async with asyncio.timeout(wait_s), self._news:
                await self._news.wait_for(lambda: self._any_offer() or self._over)
                if not self._any_offer():
                    raise RunOver
                offer = self._offers.popleft()
        except TimeoutError:
            return None
        self._absence.end()
        offer.taken.set_result(None)
        try:
            return await offer.session
        except asyncio.CancelledError:
            if offer.session.cancelled():  # the rollout was withdrawn in this very moment
                return None
            raise

    def opened(self, session: Session, rollout_id: RolloutId) -> None:
        """A rollout's session is open from now on."""
        self._sessions[session.session_id] = session
        offer = self._claimed.pop(rollout_id, None)
        if offer is not None and not offer.session.done():
            offer.session.set_result(session)

    async def drop(self, session_id: str, rollout_id: RolloutId) -> None:
        """The rollout has ended: so has its session, whatever became of it."""
        offer = self._claimed.pop(rollout_id, None)
        if offer is not None and not offer.session.done():
            offer.session.cancel()
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._ended[session_id] = session.key
            if len(self._ended) > ENDED_KEPT:
                self._ended.popitem(last=False)
            self._absence.end()
            await session.close()

    async def watch(self) -> None:
        """Until cancelled. Where nobody comes, a rollout that waits is told so, and with it the run."""
        while True:
            await asyncio.sleep(self._absence.look_s)
            if not self._any_offer() or not self._deserted:
                continue
            try:
                self._absence.look(self.waiting)
            except StepStalled as stalled:
                self._offers.popleft().taken.set_exception(stalled)

    @property
    def _deserted(self) -> bool:
        """Rollouts wait, and no program has one."""
        return bool(self._offers) and not self._sessions and not self._claimed

    def _any_offer(self) -> bool:
        """Whether a rollout waits; those that were withdrawn a moment ago are put away."""
        while self._offers and self._offers[0].taken.done():
            self._offers.popleft()
        return bool(self._offers)

    async def end(self) -> None:
        """No further rollouts: programs that wait for one are told."""
        async with self._news:
            self._over = True
            self._news.notify_all()


def new_key() -> str:
    return secrets.token_urlsafe(32)


def _same(one: str, other: str) -> bool:
    """Compared in a time that tells nothing; a header may hold any bytes."""
    return hmac.compare_digest(one.encode(errors="surrogateescape"), other.encode(errors="surrogateescape"))
