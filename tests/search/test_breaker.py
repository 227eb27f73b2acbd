from __future__ import annotations

import random

from agentic_rollout.search.breaker import CircuitBreaker, Permit


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def ask(breaker: CircuitBreaker, alive: bool | None) -> None:
    permit = breaker.admit()
    assert permit is not None
    breaker.settle(permit, alive)


def broken(clock: Clock) -> CircuitBreaker:
    breaker = CircuitBreaker(3, 5.0, clock)
    for _ in range(3):
        ask(breaker, False)
    return breaker


def probe(breaker: CircuitBreaker) -> Permit:
    permit = breaker.admit()
    assert permit is not None
    return permit


def test_failures_in_a_row_open_it() -> None:
    breaker = CircuitBreaker(3, 5.0, Clock())
    for alive in (False, False, True, False, False):
        ask(breaker, alive)
    assert breaker.state == "closed"
    ask(breaker, False)
    assert (breaker.state, breaker.admit(), breaker.retry_in_s) == ("open", None, 5.0)


def test_one_probe_goes_when_it_is_time_and_closes_it_on_success() -> None:
    clock = Clock()
    breaker = broken(clock)
    clock.now_s = 4.9
    assert breaker.admit() is None
    clock.now_s = 5.0
    permit = probe(breaker)
    assert (breaker.state, breaker.admit(), breaker.retry_in_s) == ("half_open", None, None)
    breaker.settle(permit, True)
    assert (breaker.state, breaker.down_s) == ("closed", 0.0)
    for alive in (False, False):  # the count began anew
        ask(breaker, alive)
    assert breaker.state == "closed"


def test_probe_that_fails_opens_it_again_and_the_outage_goes_on() -> None:
    clock = Clock()
    breaker = broken(clock)
    clock.now_s = 6.0
    breaker.settle(probe(breaker), False)
    assert (breaker.state, breaker.retry_in_s, breaker.down_s) == ("open", 5.0, 6.0)
    clock.now_s = 11.0
    assert probe(breaker)


def test_probe_that_is_abandoned_leaves_its_place_to_the_next() -> None:
    clock = Clock()
    breaker = broken(clock)
    clock.now_s = 5.0
    breaker.settle(probe(breaker), None)
    assert (breaker.state, breaker.retry_in_s) == ("half_open", 0.0)
    breaker.settle(probe(breaker), True)
    assert breaker.state == "closed"


def test_late_outcomes_of_calls_from_before_the_opening() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1, 5.0, clock)
    slow, slower, failing = probe(breaker), probe(breaker), probe(breaker)
    breaker.settle(failing, False)
    clock.now_s = 3.0
    breaker.settle(slow, False)
    assert breaker.retry_in_s == 2.0  # a failure postpones no probe
    breaker.settle(slower, True)
    assert breaker.state == "closed"  # a success shows that the service lives


def test_late_failure_does_not_end_a_probe() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1, 5.0, clock)
    late, failing = probe(breaker), probe(breaker)
    breaker.settle(failing, False)
    clock.now_s = 5.0
    permit = probe(breaker)
    breaker.settle(late, False)
    assert (breaker.state, breaker.admit()) == ("half_open", None)
    breaker.settle(permit, True)
    assert breaker.state == "closed"


def test_it_is_never_stuck_whatever_happens() -> None:
    """Random calls, cancelled, late and failing: with everything settled, a probe is possible within `reset_s`."""
    rng = random.Random(0)
    for _ in range(300):
        clock = Clock()
        breaker = CircuitBreaker(rng.randint(1, 3), 5.0, clock)
        pending: list[Permit] = []
        for _ in range(rng.randint(1, 40)):
            clock.now_s += rng.choice([0.0, 1.0, 6.0])
            permit = breaker.admit()
            if permit is not None:
                pending.append(permit)
            if pending and rng.random() < 0.6:
                breaker.settle(pending.pop(rng.randrange(len(pending))), rng.choice([True, False, False, None]))
        for permit in pending:
            breaker.settle(permit, rng.choice([True, False, None]))
        clock.now_s += 5.0
        breaker.settle(probe(breaker), True)
        assert breaker.state == "closed"
