"""A tiny model that calls tools as chat templates of the Qwen family have it: for loops other than ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentic_rollout.demo.search_task import SearchTask, search_language
from agentic_rollout.demo.task import Language

END = "<|im_end|>"
START = "<|im_start|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}" + START + "user\n<tool_response>\n{{ message['content'] }}\n</tool_response>"
    "{% else %}" + START + "{{ message['role'] }}\n{{ message['content'] }}{% endif %}" + END + "\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)


class ToolCallTask(SearchTask):
    """The demo's search task, in Hermes' words: every turn ends at `END`."""

    name = "chatml"
    tool_tag = "tool_call"
    observation_tag = "tool_response"

    @classmethod
    def render_call(cls, call: str) -> str:
        return f"<tool_call>{json.dumps({'name': 'search', 'arguments': {'query': call}})}</tool_call>{END}"

    @classmethod
    def render_answer(cls, answer: str) -> str:
        return f"<answer>{answer}</answer>{END}"

    @classmethod
    def render_observation(cls, body: str) -> tuple[str, str, str]:
        opening = f"\n{START}user\n<tool_response>\n"
        return opening, body, f"\n</tool_response>{END}\n{START}assistant\n"

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        return ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<answer>", "</answer>", START)

    def language(self) -> Language:
        language = search_language(self._seed)
        calls = [self.render_call("Nokel river")] * 200  # names of keys, brackets and quotes as few tokens
        return Language([*language.texts, *calls], self.tags(), language.pieces)


def write_model(
    folder: Path, *, steps: int = 400, seed: int = 0, task_class: type[ToolCallTask] = ToolCallTask
) -> ToolCallTask:
    """Trains the model to call the tool and then to answer, and returns the task, with the questions to ask.

    Args:
        folder: for `model/`, `tokenizer/` and the corpus.
        steps: of practice; about 20 a second on two cores.
        seed: of everything.
        task_class: what it is trained on.
    """
    from agentic_rollout.demo.model import build_model, build_tokenizer
    from agentic_rollout.demo.warmstart import Exercise, Phase, Practice, Trainer, save

    task = task_class(seed, entities=16)
    task.write_files(folder)
    tokenizer: Any = build_tokenizer(task.language(), folder / "tokenizer", end_token=END, chat_template=TEMPLATE)
    model = build_model(tokenizer, seed)
    Trainer(model, Practice(tokenizer, task, seed), task.recipe, progress=False).train(
        [Phase(1.0, {Exercise.SOLVE: 0.7, Exercise.CALL: 0.3})], steps
    )
    save(model, tokenizer, folder / "model")
    return task
