"""Everything this package raises on purpose.

Policy: a model's mistake is data (an action that is invalid), a tool's failure is data (a typed status); only a wrong
setting, unusable input, a failing engine or a broken invariant raises.

    AgenticRolloutError
    ├── SettingsError        a setting has a wrong key or value
    ├── CorpusError          a corpus is missing or has a bad line
    ├── SearchIndexError     an index is missing, half-built, or does not fit its corpus
    ├── PromptError          a prompt row cannot be rolled out
    ├── EngineError          the engine failed or returned something impossible
    ├── ToolError            raised by a tool to fail with a status of its choice; never leaves the toolbox
    ├── WarmStartError       demo: the model is not fit for training
    ├── TrainerError         demo: verl's trainer failed
    ├── UnsupportedVerlError verl is missing, or of a line that is not supported
    └── InvariantError       a trajectory or a batch contradicts itself: a bug, please report it
"""

from __future__ import annotations


class AgenticRolloutError(Exception):
    """Base of every error of this package."""


class SettingsError(AgenticRolloutError):
    """A setting is unknown or has a value that cannot be used.

    Args:
        key: full name of the setting, as the user writes it.
        value: what was given.
        expected: what would have been right.
        remedy: what to do about it.
    """

    def __init__(self, key: str, value: object, expected: str, remedy: str) -> None:
        super().__init__(f"{key}: got {value!r}, expected {expected}. {remedy}")
        self.key = key
        self.value = value
        self.expected = expected
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[SettingsError], tuple[str, object, str, str]]:
        # Ray sends exceptions between processes; the default would replay only the message.
        return type(self), (self.key, self.value, self.expected, self.remedy)


class CorpusError(AgenticRolloutError):
    """A corpus file is missing, or one of its lines is not a passage."""


class SearchIndexError(AgenticRolloutError):
    """An index folder is missing or damaged, was built from another corpus, or cannot be built."""


class PromptError(AgenticRolloutError):
    """A prompt is empty or longer than the prompt budget."""


class EngineError(AgenticRolloutError):
    """The engine failed, or returned something that no engine may return."""


class ToolError(AgenticRolloutError):
    """Raised inside a tool to end the call with a status of the tool's choice.

    Args:
        message: shown to the model.
        status: a `ToolStatus` value; `"error"` unless told otherwise.
    """

    def __init__(self, message: str, status: str = "error") -> None:
        super().__init__(message)
        self.status = status


class InvariantError(AgenticRolloutError):
    """Ids, masks and log-probabilities contradict each other."""
