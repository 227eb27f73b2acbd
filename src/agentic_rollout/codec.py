"""Text to tokens and back, the only two directions the loop needs.

Sampled tokens are decoded to be read, never to be encoded again; observations are encoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class TextCodec(Protocol):
    """A tokenizer as the loop sees it."""

    def encode(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        """Tokens of `text`, without beginning- or end-of-sequence tokens.

        With `split_special_tokens`, a special token's name in the text is spelt out like any other word: what a tool
        returns must not be able to write control tokens.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The exact text of `token_ids`, special tokens included."""
        ...


class HFCodec:
    """A `transformers` tokenizer. Observations never gain a BOS, and decoding changes no space."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        token_ids = self._tokenizer.encode(
            text,
            add_special_tokens=False,
            split_special_tokens=split_special_tokens,
            verbose=False,  # no warning about a length that is cut afterwards
        )
        return list(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )


class ByteCodec:
    """UTF-8 bytes as tokens 0..255, and an end-of-sequence token: for tests and examples without a model."""

    eos_token_id = 256
    vocab_size = 257

    def encode(self, text: str, *, split_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < self.eos_token_id).decode(errors="replace")


def cut_text_tokens(codec: TextCodec, token_ids: Sequence[int], limit: int) -> list[int]:
    """The first `limit` tokens at most, shortened so as not to end inside a character.

    A byte-level token can hold part of a character; up to three tokens then go, as UTF-8 has at most four bytes.
    """
    if len(token_ids) <= limit:
        return list(token_ids)
    cut = list(token_ids[: max(limit, 0)])
    for dropped in range(min(3, len(cut)) + 1):
        kept = cut[: len(cut) - dropped]
        if not codec.decode(kept).endswith("\ufffd"):
            return kept
    return cut


def share_room(lengths: Sequence[int], room: int) -> list[int]:
    """How many tokens each of several texts may keep: equal shares, where a short text leaves its rest to the others.

    Args:
        lengths: of the texts, in tokens.
        room: for all of them together; at least 0.
    """
    shares = [0] * len(lengths)
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    for position, index in enumerate(by_length):
        # The last ones get what division leaves over.
        shares[index] = min(lengths[index], room // (len(lengths) - position))
        room -= shares[index]
    return shares
