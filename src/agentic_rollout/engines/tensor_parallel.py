"""One leader, many followers: tensor-parallel ranks of an in-process engine.

Every rank holds a shard of the model and must add the same requests and step in the same order. Rank 0 of the group
leads: it alone runs loops, tools, clocks and anything random, and before each step it broadcasts the requests to add.
At the end it broadcasts the result, or its failure, so that all ranks return the same or raise the same.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from agentic_rollout.errors import EngineError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Done:
    result: Any = None
    error: Exception | None = None


class TensorParallelLink:
    """Broadcasts from the first rank of a process group with a CPU backend (gloo)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._source = dist.get_global_rank(group, 0)

    @property
    def leads(self) -> bool:
        return dist.get_rank() == self._source

    def send(self, command: Any) -> None:
        dist.broadcast_object_list([command], src=self._source, group=self._group, device=_CPU)

    def finish(self, result: Any = None, error: Exception | None = None) -> None:
        """Ends the followers' loop with the leader's result or failure."""
        self.send(_Done(result, None if error is None else _portable(error)))

    def follow(self, step: Callable[[Sequence[Any]], object]) -> Any:
        """Steps as the leader does until it has finished; returns its result or raises its failure.

        A step that fails here has as a rule failed on the leader too, whose word on it is on its way.
        """
        failure: Exception | None = None
        while True:
            command = self._receive()
            if isinstance(command, _Done):
                return _outcome(command, failure)
            if failure is None:
                try:
                    step(command)
                except Exception as error:
                    logger.exception("tensor-parallel rank %d failed to step; waiting for the leader", dist.get_rank())
                    failure = error

    def _receive(self) -> Any:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=self._source, group=self._group, device=_CPU)
        return box[0]


def _outcome(done: _Done, failure: Exception | None) -> Any:
    if done.error is not None:
        raise done.error
    if failure is not None:
        raise failure
    return done.result


def _portable(error: Exception) -> Exception:
    """The error itself if it survives the way to another process, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception's own constructor decides, so anything can come
        return EngineError(f"{type(error).__name__}: {error}")
    return error


_CPU = torch.device("cpu")
