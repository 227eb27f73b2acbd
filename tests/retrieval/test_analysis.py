from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from agentic_rollout.errors import SettingsError
from agentic_rollout.retrieval.analysis import build_analyzer


def analyze(text: str, language: str = "english") -> list[str]:
    return build_analyzer(language, key="language").analyze(text)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("The Rivers of Paris", ["river", "pari"]),
        ("Zomel's rivers’ banks", ["zomel", "river", "bank"]),
        ("U.S.A. in 1990-1991", ["u.s.a", "1990", "1991"]),
        ("naïve CAFÉ 中", ["naïv", "café", "中"]),
        ("snake_case", ["snake", "case"]),
        ("rivers rivers", ["river", "river"]),
        ("", []),
    ],
)
def test_text_is_analysed_as_english(text: str, terms: list[str]) -> None:
    assert analyze(text) == terms


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("水果", ["水", "果", "水果"]),
        ("Python很好", ["python", "很", "好", "很好"]),
        ("ﾗｰﾒﾝ", ["ラ", "ー", "メ", "ン", "ラー", "ーメ", "メン"]),  # half-width forms are folded
        ("น้ำ", ["น", "้", "ํ", "า", "น้", "้ํ", "ํา"]),  # vowel signs belong to the run
        ("２０２４年 ＡＢＣ", ["2024", "年", "abc"]),  # noqa: RUF001
    ],
)
def test_unsegmented_scripts_are_characters_and_their_pairs(text: str, terms: list[str]) -> None:
    assert analyze(text, "cjk") == terms


def test_other_languages_have_their_own_stems() -> None:
    assert analyze("Häuser", "german") == ["haus"]
    assert analyze("chevaux", "french") == ["cheval"]


@pytest.mark.parametrize("language", ["englsh", "klingon", "porter", ""])
def test_language_that_is_not_there_is_named(language: str) -> None:
    with pytest.raises(SettingsError, match=f"index.language: got '{language}'"):
        build_analyzer(language, key="index.language")


def test_threads_share_an_analyzer() -> None:
    analyzer = build_analyzer("english", key="language")
    texts = [f"running runners ran {number}s {number % 7}ing walking" for number in range(2000)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(analyzer.analyze, texts))
    assert together == [build_analyzer("english", key="language").analyze(text) for text in texts]
