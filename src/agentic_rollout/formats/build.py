"""From the setting `format` to a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentic_rollout.config import build_settings
from agentic_rollout.errors import SettingsError
from agentic_rollout.formats.base import ActionFormat
from agentic_rollout.formats.fenced import FencedCodeFormat
from agentic_rollout.formats.hermes import HermesFormat, HermesSettings
from agentic_rollout.formats.tags import CodeFormat, SearchCodeFormat, SearchR1Format, TagFormat, TagSettings
from agentic_rollout.imports import load_object


def build_format(setting: str | Mapping[str, Any], *, key: str) -> ActionFormat:
    """The format that a setting names.

    Args:
        setting: a built-in format, or the dotted path of a class; or a mapping, with that as its `type` and the
            format's own settings, which a class of the user's gets as keywords.
        key: the setting's own name, for error messages.

    Raises:
        SettingsError: there is no such format, it does not accept its settings, or it lacks a member.
    """
    own = {} if isinstance(setting, str) else {name: value for name, value in setting.items() if name != "type"}
    name = setting if isinstance(setting, str) else setting.get("type")
    if not isinstance(name, str):
        raise SettingsError(f"{key}.type", name, ", ".join(FORMATS), "Say which format it is.")
    if name in _CONFIGURABLE:
        return _CONFIGURABLE[name](own, key)
    cls = FORMATS.get(name) or load_object(name, key=key, known=FORMATS)
    try:
        instance: ActionFormat = cls(**own)
    except TypeError as error:
        expected = f"settings that {name} accepts" if own else "a class that is called without arguments"
        raise SettingsError(key, setting, expected, f"It said: {error}.") from error
    for member in ("stop", "parse", "render", "render_invalid"):
        if not hasattr(instance, member):
            raise SettingsError(
                key, name, f"a format with a member {member!r}", "See ActionFormat in agentic_rollout.formats."
            )
    return instance


def _build_hermes(settings: Mapping[str, Any], key: str) -> ActionFormat:
    return HermesFormat(build_settings(HermesSettings, settings, key=key))


def _build_tags(settings: Mapping[str, Any], key: str) -> ActionFormat:
    return TagFormat(build_settings(TagSettings, settings, key=key).tags)


_CONFIGURABLE: dict[str, Callable[[Mapping[str, Any], str], ActionFormat]] = {
    "hermes": _build_hermes,
    "tags": _build_tags,
}
FORMATS: dict[str, type] = {
    "code_r1": CodeFormat,
    "fenced_code": FencedCodeFormat,
    "hermes": HermesFormat,
    "search_code": SearchCodeFormat,
    "search_r1": SearchR1Format,
    "tags": TagFormat,
}
