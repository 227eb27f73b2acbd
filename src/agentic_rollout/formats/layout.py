"""Code and its output, whose line breaks and indentation mean something."""

from __future__ import annotations

import re

_FENCED = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL | re.IGNORECASE)
_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")


def trim_lines(text: str) -> str:
    """`text` without blank lines before it and white space after it; its first line keeps its indentation."""
    return _BLANK_LINES.sub("", text).rstrip()


def strip_code(text: str) -> str:
    """The code between two tags, which models often fence once more, or begin behind a space on the tag's own line."""
    fenced = _FENCED.fullmatch(text.strip())
    if fenced is not None:
        return trim_lines(fenced[1])
    if text.partition("\n")[0].strip():
        text = text.lstrip()
    return trim_lines(text)
