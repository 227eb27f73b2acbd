from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_rollout.codec import cut_text_tokens, share_room
from rollouts import CODEC, EOS, MergingCodec


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 40))
def test_cut_keeps_whole_characters_and_drops_at_most_three_tokens(text: str, limit: int) -> None:
    token_ids = CODEC.encode(text)
    cut = cut_text_tokens(CODEC, token_ids, limit)
    assert cut == token_ids[: len(cut)]
    assert min(limit, len(token_ids)) - 3 <= len(cut) <= limit
    assert text.startswith(CODEC.decode(cut))


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_cut_before_the_end_of_the_first_character_leaves_nothing(limit: int) -> None:
    assert cut_text_tokens(CODEC, CODEC.encode("😀"), limit) == []


def test_cut_ends_at_a_character_though_a_token_holds_half_of_it() -> None:
    codec = MergingCodec()
    token_ids = codec.encode("ab😀")
    assert codec.decode(cut_text_tokens(codec, token_ids, 2)) == "ab"


def test_text_of_replacement_characters_is_cut_and_not_lost() -> None:
    cut = cut_text_tokens(CODEC, CODEC.encode("\ufffd" * 5), 7)
    assert 4 <= len(cut) <= 7


@pytest.mark.parametrize("limit", [0, -1, -50])
def test_no_room_means_no_token(limit: int) -> None:
    assert cut_text_tokens(CODEC, CODEC.encode("text"), limit) == []


def test_byte_codec_returns_any_text() -> None:
    text = "naïve 中 😀\x00\n"
    assert CODEC.decode(CODEC.encode(text)) == text
    assert CODEC.decode([*CODEC.encode("end"), EOS]) == "end"


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 200))
def test_room_is_shared_out_whole_and_nobody_gets_less_than_an_equal_share(lengths: list[int], room: int) -> None:
    shares = share_room(lengths, room)
    assert sum(shares) == min(room, sum(lengths))
    assert all(share <= length for share, length in zip(shares, lengths, strict=True))
    least = room // max(1, len(lengths))
    assert all(share >= min(length, least) for share, length in zip(shares, lengths, strict=True))
    cut = [share for share, length in zip(shares, lengths, strict=True) if share < length]
    assert not cut or max(cut) - min(cut) <= 1


def test_rest_of_a_short_text_goes_to_the_long_ones() -> None:
    assert share_room([100, 5, 100], 61) == [28, 5, 28]
