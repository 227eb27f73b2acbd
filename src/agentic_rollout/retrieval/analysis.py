"""From text to search terms."""

from __future__ import annotations

import difflib
import re
import threading
import unicodedata
from collections.abc import Callable
from typing import Protocol

import Stemmer

from agentic_rollout.errors import SettingsError

# Lucene's English stop set.
STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they "
    "this to was will with".split()
)
_WORD = re.compile(r"[^\W_]+(?:[.'’][^\W_]+)*")  # close to UAX#29: inner periods and apostrophes do not split
_POSSESSIVE = re.compile(r"['’]s$")
# Scripts written without spaces. Whole blocks, as `re` counts the vowel signs of some as no word characters.
_UNSEGMENTED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Myanmar, Khmer
    "\u3005-\u3007\u3040-\u30ff"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
)
_RUN = re.compile(rf"[{_UNSEGMENTED}]+|[^\W_{_UNSEGMENTED}]+(?:[.'’][^\W_{_UNSEGMENTED}]+)*")
_CHARACTER = re.compile(f"[{_UNSEGMENTED}]")
_CACHED_WORDS = 1_000_000


class Analyzer(Protocol):
    """Text of a passage or a query -> its terms, in order, repeated as often as they occur. Thread-safe."""

    def analyze(self, text: str) -> list[str]: ...


class _Terms(dict[str, str]):
    """word -> its term, computed once; the empty string for a word that is not indexed."""

    def __init__(self, term: Callable[[str], str]) -> None:
        super().__init__()
        self._term = term
        self._lock = threading.Lock()  # a stemmer serves one thread at a time

    def __missing__(self, word: str) -> str:
        with self._lock:
            if len(self) >= _CACHED_WORDS:
                self.clear()
            term = self[word] = self._term(word)
        return term


class WordAnalyzer:
    """Words in lower case, possessives and stop words dropped, stemmed.

    With Porter stems and Lucene's stop words this is close to Lucene's English analyser.
    """

    def __init__(self, stemmer: str, stop_words: frozenset[str] = frozenset()) -> None:
        self._stem: Callable[[str], str] = Stemmer.Stemmer(stemmer).stemWord
        self._stop_words = stop_words
        self._terms = _Terms(self._term)

    def analyze(self, text: str) -> list[str]:
        terms = self._terms
        return [term for word in _WORD.findall(text.lower()) if (term := terms[word])]

    def _term(self, word: str) -> str:
        word = _POSSESSIVE.sub("", word)
        return "" if word in self._stop_words else self._stem(word)


class CharacterAnalyzer:
    """For scripts without spaces: each character and each pair of neighbours is a term; other words stay whole.

    Full-width and half-width forms are folded together. Single characters make a query of one character find words.
    """

    def analyze(self, text: str) -> list[str]:
        terms = []
        for run in _RUN.findall(unicodedata.normalize("NFKC", text).lower()):
            if _CHARACTER.match(run):
                terms.extend(run)
                terms.extend(run[start : start + 2] for start in range(len(run) - 1))
            else:
                terms.append(run)
        return terms


def build_analyzer(language: str, *, key: str) -> Analyzer:
    """The analyser of a language: `english`, `cjk` for unsegmented scripts, or any that has a Snowball stemmer.

    Raises:
        SettingsError: there is none.
    """
    if language == "english":
        return WordAnalyzer("porter", STOP_WORDS)
    if language == "cjk":
        return CharacterAnalyzer()
    known = sorted({"english", "cjk", *Stemmer.algorithms()} - {"porter"})
    if language not in known:
        nearest = difflib.get_close_matches(language, known, n=1)
        remedy = f"Did you mean {nearest[0]!r}?" if nearest else "`cjk` serves every script without spaces."
        raise SettingsError(key, language, ", ".join(known), remedy)
    return WordAnalyzer(language)
