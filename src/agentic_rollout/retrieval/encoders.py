"""Texts as vectors: a transformer of the user's, or hashed words where there are no weights."""

from __future__ import annotations

import hashlib
import re
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import Field

from agentic_rollout.config import Settings, build_settings
from agentic_rollout.errors import SettingsError
from agentic_rollout.retrieval.analysis import build_analyzer
from agentic_rollout.retrieval.corpus import Passage

Vectors = NDArray[np.float32]
Pooling = Literal["mean", "cls"]

HASHING = "hashing"


class Encoder(Protocol):
    """Turns texts into vectors whose inner product says how alike they are. Thread-safe.

    Attributes:
        dimension: length of a vector.
        fingerprint: names what passages' vectors depend on, so that an index built with another encoder is noticed.
            It holds no path and nothing that only rounds: a model may move, and be used on another device.
    """

    dimension: int
    fingerprint: str

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """One row per text, (n, dimension), of length 1; of length 0 where the text says nothing to the encoder."""
        ...

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        """As `encode_queries`, for the side that is searched; title and text both count."""
        ...


class EncoderSettings(Settings):
    """Which encoder, and how it is used. What is null follows from the model's own files and its name."""

    path: str = Field(default=HASHING, description=f"folder of a Hugging Face model, or {HASHING!r}: no weights needed")
    query_prefix: str | None = Field(default=None, description="put before every query")
    passage_prefix: str | None = Field(default=None, description="put before every passage")
    pooling: Pooling | None = Field(default=None, description="how the tokens' vectors become one")
    max_tokens: int = Field(default=512, ge=2, description="a passage is cut to this many tokens")
    max_query_tokens: int = Field(default=256, ge=2, description="a query is cut to this many tokens")
    fp16: bool = Field(default=True, description="half precision; on a GPU only")
    batch_size: int = Field(default=64, ge=1, description="texts encoded at once")
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    dimension: int = Field(default=2048, ge=64, description=f"length of a vector; of {HASHING!r} only")
    language: str = Field(default="english", description=f"of the analyser; of {HASHING!r} only")


def build_encoder(settings: EncoderSettings | Mapping[str, Any] | None, *, key: str = "encoder") -> Encoder:
    """The encoder that the settings describe.

    Args:
        settings: a mapping is validated first; None and an empty one mean the weight-free encoder.
        key: the mapping's own name, for error messages.

    Raises:
        SettingsError: a setting is wrong, there is no such model, or `transformers` is not installed.
    """
    if not isinstance(settings, EncoderSettings):
        settings = build_settings(EncoderSettings, settings, key=key)
    if settings.path == HASHING:
        return HashingEncoder(settings.dimension, settings.language, key=key)
    return TransformerEncoder(settings, key=key)


# Words that a question shares with any passage. Lucene's stop words are gone already; without idf these would weigh
# as much as a name.
_FUNCTION_WORDS = (
    "what which who whom whose when where why how do does did done doing have has had having am been being were can "
    "could would should may might must shall i me my we us our you your he him his she her hers its them those than "
    "so from about over under after before between during through also more most other some only own same too very "
    "just many much all any both each few up out off again once here"
)


class HashingEncoder:
    """Words hashed into a vector: nothing to download, nothing to train, the same on every machine.

    Each stem falls into one of `dimension` places with a sign of its own (Weinberger et al., 2009), weighted by
    1 + ln(its count). It knows no synonyms and no rare words, so it ranks below BM25: it is for tests, and for machines
    without weights.

    Raises:
        SettingsError: the language has no analyser.
    """

    def __init__(self, dimension: int = 2048, language: str = "english", *, key: str = "encoder") -> None:
        self.dimension = dimension
        self.fingerprint = f"hashing-1-{language}-{dimension}"
        self._analyzer = build_analyzer(language, key=f"{key}.language")
        self._passed_over = frozenset(self._analyzer.analyze(_FUNCTION_WORDS))

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        return self._encode(texts)

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        return self._encode([passage.contents for passage in passages])

    def _encode(self, texts: Sequence[str]) -> Vectors:
        words = [[word for word in self._analyzer.analyze(text) if word not in self._passed_over] for text in texts]
        rows = np.repeat(np.arange(len(words), dtype=np.uint64), [len(row) for row in words])
        hashes = np.fromiter((_hash(word) for row in words for word in row), dtype=np.uint64)
        keys, counts = np.unique(rows << np.uint64(32) | hashes, return_counts=True)  # one key per word of a text
        places = (keys >> np.uint64(32)) * np.uint64(self.dimension) + (keys & _PLACE) % np.uint64(self.dimension)
        weights = (1 + np.log(counts)) * np.where(keys & _SIGN, 1.0, -1.0)
        sums = np.bincount(places.astype(np.int64), weights, minlength=len(words) * self.dimension)
        return _normalized(sums.reshape(len(words), self.dimension).astype(np.float32))


_SIGN, _PLACE = np.uint64(1 << 31), np.uint64((1 << 31) - 1)


@lru_cache(maxsize=1 << 17)
def _hash(word: str) -> int:
    return zlib.crc32(word.encode(errors="replace"))


def _normalized(vectors: Vectors) -> Vectors:
    """Rows of length 1; a row of zeros stays one."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    normalized: Vectors = vectors / np.where(lengths == 0, 1, lengths)
    return normalized


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a family of models was trained to be used."""

    query_prefix: str = ""
    passage_prefix: str = ""
    pooling: Pooling = "mean"


# The first pattern found in a model's name. Sources: the models' cards.
_FAMILIES = (
    (r"\be5\b.*\binstruct\b", _Recipe("Instruct: Given a question, retrieve passages that answer it\nQuery: ")),
    (r"\be5\b", _Recipe("query: ", "passage: ")),
    (r"\bbge m3\b", _Recipe(pooling="cls")),
    (r"\bbge\b.*\bzh\b", _Recipe("为这个句子生成表示以用于检索相关文章\uff1a", pooling="cls")),
    (r"\bbge\b", _Recipe("Represent this sentence for searching relevant passages: ", pooling="cls")),
)


class TransformerEncoder:
    """A text encoder in the layout of Hugging Face, on this machine's disk: nothing is ever downloaded.

    Prefixes and pooling are, in this order: the settings', those of the model's own sentence-transformers files, those
    that its family (E5, BGE) was trained with, none and the mean.

    Raises:
        SettingsError: there is no such model, it cannot be loaded, or its pooling is not known here.
    """

    def __init__(self, settings: EncoderSettings, *, key: str = "encoder") -> None:
        folder = model_folder(settings.path, key=f"{key}.path")
        recipe = _recipe(folder, settings, key)
        self._model, self._tokenizer, self._device = load_model(
            "AutoModel", folder, key=key, device=settings.device, fp16=settings.fp16
        )
        self._recipe = recipe
        self._batch_size = settings.batch_size
        self._max_query_tokens, self._max_tokens = (
            min(limit, longest_input(self._model)) for limit in (settings.max_query_tokens, settings.max_tokens)
        )
        self._tokenizing = threading.Lock()  # a fast tokenizer cannot truncate in two threads at once
        self.dimension = int(self._model.config.hidden_size)
        self.fingerprint = _fingerprint(folder, recipe.passage_prefix, recipe.pooling, self._max_tokens)

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        return self._encode([self._recipe.query_prefix + text for text in texts], self._max_query_tokens)

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        texts = [self._recipe.passage_prefix + passage.contents for passage in passages]
        return self._encode(texts, self._max_tokens)

    def _encode(self, texts: Sequence[str], max_tokens: int) -> Vectors:
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        for rows in batches_by_length(texts, self._batch_size):
            vectors[rows] = self._encode_batch([texts[row] for row in rows], max_tokens)
        return vectors

    def _encode_batch(self, texts: list[str], max_tokens: int) -> Vectors:
        import torch

        with self._tokenizing:
            tokens = self._tokenizer(
                texts, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt"
            ).to(self._device)
        with torch.inference_mode():
            states = self._model(**tokens).last_hidden_state.float()  # (B, T, dimension)
            if self._recipe.pooling == "cls":
                pooled = states[:, 0]
            else:
                mask = tokens["attention_mask"].unsqueeze(-1).float()  # (B, T, 1)
                pooled = (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            vectors: Vectors = torch.nn.functional.normalize(pooled, dim=1).cpu().numpy()
        return vectors


def model_folder(path: str, *, key: str) -> Path:
    """The folder of a model.

    Raises:
        SettingsError: it is not there, or holds no `config.json`.
    """
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        remedy = "Download the model first, and give its path: models are not fetched from here."
        raise SettingsError(key, path, "the folder of a Hugging Face model, with a config.json", remedy)
    return folder


def load_model(kind: str, folder: Path, *, key: str, device: str, fp16: bool) -> tuple[Any, Any, Any]:
    """A model ready for inference, its tokenizer, and the torch device it is on.

    Args:
        kind: the class of `transformers` that loads it, such as `AutoModel`.
        key: name of the settings, for error messages; `path` and `device` are keys below it.
        device: `auto` takes a GPU if there is one.
        fp16: has the weights in half precision, if they are on a GPU.

    Raises:
        SettingsError: `transformers` is not installed, the device is not there, or the files cannot be loaded.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        remedy = f'Install it: pip install "agentic-rollout[search]" ({error}).'
        raise SettingsError(f"{key}.path", str(folder), "an environment that can run it", remedy) from None
    target = _device(device, key=f"{key}.device")
    dtype = torch.float16 if fp16 and target.type == "cuda" else torch.float32
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = getattr(transformers, kind).from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of any class: each file has a reader of its own
        reason = str(error).partition("\n")[0]
        remedy = f"Loading it failed: {reason}"
        raise SettingsError(f"{key}.path", str(folder), "a model and a tokenizer that load", remedy) from error
    return model.to(target, dtype).eval(), tokenizer, target


def _device(name: str, *, key: str) -> Any:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingsError(key, name, "auto, cpu, cuda or cuda:N", "Correct this setting.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        remedy = f"torch sees {torch.cuda.device_count()} GPUs; `auto` takes one only where there is one."
        raise SettingsError(key, name, "a GPU that is there", remedy)
    return device


def batches_by_length(texts: Sequence[str], batch_size: int) -> Iterator[list[int]]:
    """Positions of texts, in batches of about one length, for little padding.

    The longest come first, so that a batch too large for the memory fails at once.
    """
    order = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def longest_input(model: Any) -> int:
    """Tokens that the model has positions for. RoBERTa's begin behind the padding's id."""
    config = model.config
    positions = getattr(config, "max_position_embeddings", None) or 1 << 20
    offset = config.pad_token_id + 1 if config.model_type in ("roberta", "xlm-roberta", "camembert") else 0
    return int(positions) - offset


def _recipe(folder: Path, settings: EncoderSettings, key: str) -> _Recipe:
    family = _family(folder)
    prompts = _read_json(folder / "config_sentence_transformers.json").get("prompts") or {}
    passage_prompt = prompts.get("passage") or prompts.get("document")
    return _Recipe(
        _first(settings.query_prefix, prompts.get("query") or None, family.query_prefix),
        _first(settings.passage_prefix, passage_prompt or None, family.passage_prefix),
        _first(settings.pooling, None if settings.pooling else _own_pooling(folder, key), family.pooling),
    )


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _family(folder: Path) -> _Recipe:
    """What the folder's name says, or else the name that the model was saved from."""
    for name in (folder.resolve().name, str(_read_json(folder / "config.json").get("_name_or_path", ""))):
        words = re.sub(r"[^a-z0-9]+", " ", name.lower())
        for pattern, recipe in _FAMILIES:
            if re.search(pattern, words):
                return recipe
    return _Recipe()


def _own_pooling(folder: Path, key: str) -> Pooling | None:
    modes = [
        name.removeprefix("pooling_mode_")
        for name, chosen in _read_json(folder / "1_Pooling" / "config.json").items()
        if name.startswith("pooling_mode_") and chosen is True
    ]
    known: dict[str, Pooling] = {"cls_token": "cls", "mean_tokens": "mean"}
    if not modes:
        return None
    if len(modes) > 1 or modes[0] not in known:
        remedy = f"The model's files ask for {' and '.join(modes)}; choose another model, or set this."
        raise SettingsError(f"{key}.pooling", None, " or ".join(get_args(Pooling)), remedy)
    return known[modes[0]]


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        values = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return values if isinstance(values, dict) else {}


_SAMPLES, _SAMPLE_BYTES = 64, 4096


def _fingerprint(folder: Path, *settings: object) -> str:
    """Of the settings, the configuration, the tokenizer, and samples of the weights, which are too large to be read."""
    digest = hashlib.sha256(repr(settings).encode())
    for path in _model_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for offset in _sample_offsets(size):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return f"transformer-{digest.hexdigest()[:16]}"


def _model_files(folder: Path) -> list[Path]:
    patterns = ("config.json", "tokenizer.json", "vocab*", "*.safetensors", "pytorch_model*.bin")
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def _sample_offsets(size: int) -> Iterable[int]:
    if size <= _SAMPLES * _SAMPLE_BYTES:
        return range(0, size, _SAMPLE_BYTES)
    return (index * (size - _SAMPLE_BYTES) // (_SAMPLES - 1) for index in range(_SAMPLES))
