"""Which failures of a Docker daemon pass by themselves, and how to wait for that. Knows no call.

Only for calls that may be repeated: looking, listing, removing, and starting a container that has run nothing yet.
"""

import aiodocker
import aiohttp
import tenacity
from msgspec import Struct

from sandboxes.errors import DaemonGone

ATTEMPTS = 5
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 3.0


class Passing(Struct, frozen=True):
    """Failures worth another attempt."""

    statuses: frozenset[int]
    """HTTP statuses; 900 is aiodocker's for a daemon that could not be reached."""
    kinds: tuple[type[BaseException], ...] = (aiodocker.DockerError, aiohttp.ClientConnectionError, DaemonGone)

    def covers(self, error: BaseException) -> bool:
        if isinstance(error, aiodocker.DockerError):
            return error.status in self.statuses and "no space left" not in str(error)
        return isinstance(error, self.kinds)


BRIEFLY_AWAY = Passing(frozenset({900, 502, 503, 504}))
"""The daemon restarts, or its socket is full."""
BUSY_TOO = Passing(frozenset({900, 500, 502, 503, 504}))
"""A busy daemon answers 500 where a lock or a time limit of its own was in the way: a removal may be repeated."""


def patiently(passing: Passing) -> tenacity.AsyncRetrying:
    """Attempts with growing, jittered waits (about 3 s in all), so that a hundred callers do not return at once."""
    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(passing.covers),
        wait=tenacity.wait_random_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S),
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        reraise=True,
    )
