"""A circuit breaker: a service that keeps failing is left alone, and asked again by one probe at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal


class Permit:
    """Leave to ask once; to be settled, whatever happens."""


class CircuitBreaker:
    """Closed while the service answers; open after repeated failures; half-open when it is time for a probe.

    A probe that succeeds closes the breaker; one that fails opens it again; one that is abandoned leaves its place to
    the next. Any call that succeeds, a late one from before the opening too, shows that the service lives, and closes
    the breaker. To be used from one thread.

    Args:
        failures: so many in a row open the breaker.
        reset_s: from the opening, or a failed probe, to the next probe, in seconds.
        clock: seconds, monotonic.
    """

    def __init__(self, failures: int, reset_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = failures
        self._reset_s = reset_s
        self._clock = clock
        self._failures = 0
        self._opened_at: float | None = None  # when the service broke down; None while closed
        self._probe_at = 0.0  # when the next probe may go
        self._probe: Permit | None = None  # the one in flight

    @property
    def state(self) -> Literal["closed", "open", "half_open"]:
        if self._opened_at is None:
            return "closed"
        return "half_open" if self._clock() >= self._probe_at else "open"

    @property
    def is_down(self) -> bool:
        return self._opened_at is not None

    @property
    def down_s(self) -> float:
        """For how long the breaker has not been closed, failed probes included; 0 while it is closed."""
        return 0.0 if self._opened_at is None else self._clock() - self._opened_at

    @property
    def retry_in_s(self) -> float | None:
        """Seconds until `admit` may give leave; None while a probe's outcome has to be waited for."""
        if self._probe is not None:
            return None
        return 0.0 if self._opened_at is None else max(0.0, self._probe_at - self._clock())

    def admit(self) -> Permit | None:
        """Leave to ask now, or None."""
        if self.state == "closed":
            return Permit()
        if self.state == "open" or self._probe is not None:
            return None
        self._probe = Permit()
        return self._probe

    def settle(self, permit: Permit, alive: bool | None) -> None:
        """Ends what `admit` began.

        Args:
            alive: whether the service answered; None if that was not seen, as the call was cancelled.
        """
        probing = permit is self._probe
        if probing:
            self._probe = None
        if alive:
            self._failures = 0
            self._opened_at = self._probe = None
        elif alive is False and self._opened_at is None:
            self._failures += 1
            if self._failures >= self._limit:
                self._opened_at = self._clock()
                self._probe_at = self._opened_at + self._reset_s
        elif alive is False and probing:
            self._probe_at = self._clock() + self._reset_s
