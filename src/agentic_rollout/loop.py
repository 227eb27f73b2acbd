"""The loop of one trajectory: generate, parse, act, observe.

Every trajectory is one coroutine, and none waits for another. The rules:

* Sampled tokens enter the context as they were sampled. Observations are encoded once.
* Before every generation the limits apply in this order: the response budget; `max_turns`; then the final turn, in
  which tools are off.
* An observation leaves room for its closing tags and for an answer, or it is not made at all: the trajectory then ends
  on the sampled turn before it.
* A trajectory ends on a sampled token and is never empty.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentic_rollout.codec import TextCodec, cut_text_tokens, share_room
from agentic_rollout.config import AGENT_KEY, LoopSettings
from agentic_rollout.engines.base import Engine
from agentic_rollout.errors import EngineError, InvariantError, PromptError, SettingsError
from agentic_rollout.formats import ActionFormat
from agentic_rollout.tools.base import Toolbox, ToolContext
from agentic_rollout.types import (
    Answer,
    Call,
    Completion,
    FinishReason,
    Invalid,
    Observation,
    Segment,
    StopReason,
    ToolCall,
    ToolRequest,
    ToolStatus,
    Trajectory,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row to roll out.

    Attributes:
        token_ids: the prompt, without padding.
        trajectory_id: unique among the rows of one call.
        row: the data set's columns, handed to the tools.
        seed: makes this trajectory's sampling repeatable.
    """

    token_ids: tuple[int, ...]
    trajectory_id: str
    row: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None


class AgentLoop:
    """Runs trajectories of one format, toolbox and engine.

    Args:
        prompt_length: P, the longest prompt in tokens.
        response_length: R, the budget for everything after the prompt, in tokens.

    Raises:
        SettingsError: the limits contradict each other.
    """

    def __init__(
        self,
        engine: Engine,
        toolbox: Toolbox,
        action_format: ActionFormat,
        codec: TextCodec,
        settings: LoopSettings,
        *,
        prompt_length: int,
        response_length: int,
    ) -> None:
        self._engine = engine
        self._toolbox = toolbox
        self._format = action_format
        self._codec = codec
        self._settings = settings
        self._prompt_length = prompt_length
        self._response_length = response_length
        self._encode_tag = functools.lru_cache(maxsize=64)(codec.encode)  # the same few texts in every turn
        self._final_ids = tuple(codec.encode(settings.final_instruction)) if settings.final_instruction else ()
        self._check_limits()

    def with_engine(self, engine: Engine) -> AgentLoop:
        """The same loop over another engine; its limits are not checked again."""
        loop = copy.copy(self)
        loop._engine = engine
        return loop

    async def run_batch(self, prompts: Sequence[Prompt]) -> list[Trajectory]:
        """Runs all rows together; the trajectories come back in the order of their prompts.

        Raises:
            PromptError: a prompt is empty or too long; raised before anything is generated.
            EngineError: the engine failed; the other rows are cancelled.
        """
        for index, prompt in enumerate(prompts):
            self._check_prompt(prompt, f"row {index}")
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.run(prompt)) for prompt in prompts]
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__
        return [task.result() for task in tasks]

    async def run(self, prompt: Prompt) -> Trajectory:
        """Runs one row to its end.

        Raises:
            PromptError: the prompt is empty or too long.
            EngineError: the engine failed.
        """
        self._check_prompt(prompt, f"trajectory {prompt.trajectory_id}")
        trajectory = Trajectory(prompt.token_ids)
        context = ToolContext(prompt.trajectory_id, prompt.row)
        turns = self._settings.max_turns + int(self._settings.final_turn)
        try:
            for turn in range(turns):
                completion = await self._generate(trajectory, prompt.seed, turn)
                trajectory.segments.append(Segment(completion.token_ids, True, completion.logprobs))
                await self._act(trajectory, completion, context, turns_left=turns - turn - 1)
                if trajectory.stop_reason is not None:
                    break
        finally:
            await self._toolbox.finish(prompt.trajectory_id)
        return trajectory

    async def _generate(self, trajectory: Trajectory, seed: int | None, turn: int) -> Completion:
        remaining = self._response_length - trajectory.response_length
        limit = self._settings.max_turn_tokens
        max_tokens = remaining if limit is None else min(remaining, limit)
        completion = await self._engine.generate(
            trajectory.prompt_ids + trajectory.response_ids,
            max_tokens=max_tokens,
            stop=self._format.stop,
            seed=None if seed is None else turn_seed(seed, turn),
        )
        if not 1 <= len(completion.token_ids) <= max_tokens:
            raise EngineError(
                f"the engine returned {len(completion.token_ids)} tokens; 1 to {max_tokens} were asked for"
            )
        return completion

    async def _act(
        self, trajectory: Trajectory, completion: Completion, context: ToolContext, *, turns_left: int
    ) -> None:
        """Carries out the turn just sampled: ends the trajectory, or appends an observation."""
        action = self._format.parse(self._codec.decode(completion.token_ids))
        if isinstance(action, Answer):
            trajectory.answer = action.text
            trajectory.stop_reason = StopReason.ANSWERED
            return
        if isinstance(action, Invalid):
            trajectory.invalid_turns += 1
        room = self._observation_room(trajectory, final_next=turns_left == 1 and self._settings.final_turn)
        stop_reason = self._stop_reason(action, completion, room, turns_left)
        if stop_reason is not None:
            trajectory.stop_reason = stop_reason
            return
        observation = await self._observe(trajectory, action, context)
        if trajectory.stop_reason is not None:
            return
        token_ids = self._encode_observation(observation, room)
        if turns_left == 1 and self._settings.final_turn:
            token_ids += self._final_ids
        if token_ids:  # a format without tags shows nothing of an empty result
            trajectory.segments.append(Segment(token_ids, False))

    def _stop_reason(
        self, action: Call | Invalid, completion: Completion, room: int, turns_left: int
    ) -> StopReason | None:
        """Why a trajectory that has not answered ends here, or None if it goes on."""
        if completion.finish_reason is FinishReason.LENGTH and room <= 0:
            return StopReason.LENGTH  # the budget ran out in the middle of the turn
        if isinstance(action, Invalid):
            # Without stop strings, the end of the text is how every turn ends.
            at_eos = completion.finish_reason is FinishReason.EOS and bool(self._format.stop)
            if at_eos and self._settings.on_eos == "stop":
                return StopReason.EOS
            if not at_eos and self._settings.on_invalid == "stop":
                return StopReason.INVALID
        if turns_left == 0:
            return StopReason.MAX_TURNS
        return StopReason.LENGTH if room < self._frame_length(action) + 1 else None

    async def _observe(self, trajectory: Trajectory, action: Call | Invalid, context: ToolContext) -> Observation:
        if isinstance(action, Invalid):
            return self._format.render_invalid(action.problem)
        calls = await asyncio.gather(*(self._toolbox.call(request, context) for request in action.requests))
        trajectory.tool_calls.extend(calls)
        if self._settings.on_tool_failure == "stop" and any(call.status.is_tool_failure for call in calls):
            trajectory.stop_reason = StopReason.TOOL_FAILURE
        return self._format.render(calls)

    def _observation_room(self, trajectory: Trajectory, *, final_next: bool) -> int:
        """Tokens that the next observation may take at most."""
        free = self._response_length - trajectory.response_length - self._settings.reserve_answer_tokens
        if final_next:
            free -= len(self._final_ids)
        return min(self._settings.max_observation_tokens, free)

    def _frame_length(self, action: Call | Invalid) -> int:
        """Tokens that the observation's tags will take; before any tool is asked."""
        if isinstance(action, Invalid):
            observation = self._format.render_invalid(action.problem)
        else:
            observation = self._format.render([_without_result(request) for request in action.requests])
        tags, _ = observation.split()
        return sum(len(self._encode_tag(tag)) for tag in tags)

    def _encode_observation(self, observation: Observation, room: int) -> tuple[int, ...]:
        """Tags whole, bodies cut to the room that is left."""
        tags, bodies = observation.split()
        encoded_tags = [self._encode_tag(tag) for tag in tags]
        frame = sum(map(len, encoded_tags))
        if frame > room:
            raise InvariantError(f"the format's tags took {frame} of {room} tokens; they must not depend on results")
        texts = [self._codec.encode(body, split_special_tokens=True) for body in bodies]  # a tool's text is data
        shares = share_room([len(text) for text in texts], room - frame)
        token_ids = list(encoded_tags[0])
        for text, share, tag in zip(texts, shares, encoded_tags[1:], strict=True):
            token_ids += cut_text_tokens(self._codec, text, share)
            token_ids += tag
        return tuple(token_ids)

    def _check_prompt(self, prompt: Prompt, name: str) -> None:
        if not prompt.token_ids:
            raise PromptError(
                f"{name} has an empty prompt (no attended token). Check the row's `prompt` column and the "
                "tokenizer's chat template."
            )
        if len(prompt.token_ids) > self._prompt_length:
            raise PromptError(
                f"{name} has a prompt of {len(prompt.token_ids)} tokens; data.max_prompt_length is "
                f"{self._prompt_length}. Raise it, or drop such rows with data.filter_overlong_prompts=True."
            )

    def _check_limits(self) -> None:
        actions: list[Call | Invalid] = [Call((ToolRequest(name, {}),)) for name in self._toolbox.names]
        frame = max(map(self._frame_length, [*actions, Invalid("")]))
        least = frame + 1
        if self._settings.max_observation_tokens < least:
            raise SettingsError(
                f"{AGENT_KEY}.max_observation_tokens",
                self._settings.max_observation_tokens,
                f"at least {least}, as the observation's own tags take {frame} tokens",
                "Raise it.",
            )
        if self._settings.reserve_answer_tokens >= self._response_length:
            raise SettingsError(
                f"{AGENT_KEY}.reserve_answer_tokens",
                self._settings.reserve_answer_tokens,
                f"less than data.max_response_length ({self._response_length})",
                "Lower it or raise data.max_response_length.",
            )


def _without_result(request: ToolRequest) -> ToolCall:
    return ToolCall(request.name, request.arguments, ToolStatus.OK, "", latency_s=0.0)


def turn_seed(seed: int, *parts: int | str) -> int:
    """A seed for one generation that depends on every part and on nothing else."""
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # fits a signed 64-bit integer
