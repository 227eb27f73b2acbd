from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentic_rollout.errors import SettingsError
from agentic_rollout.retrieval.corpus import Passage
from agentic_rollout.retrieval.encoders import EncoderSettings, HashingEncoder, TransformerEncoder, build_encoder

TEXTS = ["the river of zomel", "a much longer text about the metal of havel and the river of zomel", "garden", ""]
PASSAGES = [Passage(str(number), text) for number, text in enumerate(TEXTS)]

VOCABULARY = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] a much longer text about the metal of havel and river zomel garden query passage : "
    "represent this sentence for searching relevant passages"
).split()


@pytest.fixture(scope="module")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a small BERT with random weights, and a tokenizer that knows a few words."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")

    def write(name: str, *, seed: int = 0) -> Path:
        folder = tmp_path_factory.mktemp("models") / name
        folder.mkdir()
        (folder / "vocab.txt").write_text("\n".join(VOCABULARY), encoding="utf-8")
        transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
        torch.manual_seed(seed)
        config = transformers.BertConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=40,
            initializer_range=0.5,
        )
        transformers.BertModel(config).save_pretrained(folder)
        return folder

    return write


@pytest.fixture(scope="module")
def model(write_model: Callable[..., Path]) -> Path:
    return write_model("plain")


def encoder(folder: Path, **settings: Any) -> TransformerEncoder:
    return TransformerEncoder(EncoderSettings(path=str(folder), device="cpu", **settings))


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


# The weight-free encoder.


def test_hashed_vectors_have_length_one_and_none_for_a_text_without_words() -> None:
    hashing = HashingEncoder(dimension=256)
    vectors = hashing.encode_queries([*TEXTS, "what is the"])
    assert vectors.shape == (5, 256)
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1, 1, 0, 0], abs=1e-6)
    assert hashing.encode_queries([]).shape == (0, 256)


def test_shared_words_bring_hashed_texts_together() -> None:
    vectors = HashingEncoder().encode_queries(
        ["river of Zomel", "Zomel's rivers", "metal of Zomel", "gardens of Havel"]
    )
    near, half, far = (cosine(vectors[0], other) for other in vectors[1:])
    assert near == pytest.approx(1)
    assert near > half > far
    assert half == pytest.approx(0.5)


def test_hashed_words_weigh_by_the_logarithm_of_their_count() -> None:
    once, often, both = HashingEncoder().encode_queries(["zomel", "zomel zomel zomel", "zomel zomel zomel river"])
    assert cosine(once, often) == pytest.approx(1)
    weight = 1 + np.log(3)
    assert cosine(once, both) == pytest.approx(weight / np.hypot(weight, 1), rel=1e-5)


def test_hashed_vector_knows_no_neighbour() -> None:
    hashing = HashingEncoder()
    together = hashing.encode_passages(PASSAGES)
    assert np.array_equal(together, np.concatenate([hashing.encode_queries([text]) for text in TEXTS]))


def test_hashed_vectors_are_the_same_in_another_process() -> None:
    script = (
        "import sys\nfrom agentic_rollout.retrieval.encoders import HashingEncoder\n"
        "sys.stdout.buffer.write(HashingEncoder(64).encode_queries(sys.argv[1:]).tobytes())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "1234"}
    other = subprocess.run([sys.executable, "-c", script, *TEXTS], env=env, capture_output=True, check=True)
    assert other.stdout == HashingEncoder(64).encode_queries(TEXTS).tobytes()


def test_language_makes_unsegmented_text_comparable() -> None:
    texts = ["北京是中国的首都", "中国的首都", "上海人口"]
    near, far = (cosine(*HashingEncoder(language="cjk").encode_queries([texts[0], other])) for other in texts[1:])
    assert near > 0.5 > far
    with pytest.raises(SettingsError, match=r"mine\.language"):
        build_encoder({"language": "klingon"}, key="mine")


def test_fingerprint_of_hashed_vectors_names_what_they_depend_on() -> None:
    encoders = [HashingEncoder(), HashingEncoder(64), HashingEncoder(language="german"), HashingEncoder()]
    assert len({each.fingerprint for each in encoders}) == 3
    assert encoders[0].fingerprint == encoders[3].fingerprint


# Transformers.


def test_mean_pooling_averages_the_tokens_that_are_there(model: Path) -> None:
    import torch
    import transformers

    text = TEXTS[0]
    tokens = transformers.AutoTokenizer.from_pretrained(model)(text, return_tensors="pt")
    with torch.no_grad():
        states = transformers.AutoModel.from_pretrained(model)(**tokens).last_hidden_state[0].numpy()  # (T, 32)
    (mean,) = encoder(model, pooling="mean").encode_queries([text])
    (cls,) = encoder(model, pooling="cls").encode_queries([text])
    assert mean == pytest.approx(states.mean(axis=0) / np.linalg.norm(states.mean(axis=0)), abs=1e-5)
    assert cls == pytest.approx(states[0] / np.linalg.norm(states[0]), abs=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_padding_changes_no_vector_and_order_is_kept(model: Path, pooling: str) -> None:
    together = encoder(model, pooling=pooling, batch_size=3).encode_passages(PASSAGES)
    alone = [encoder(model, pooling=pooling).encode_queries([text])[0] for text in TEXTS]
    assert together == pytest.approx(np.stack(alone), abs=1e-5)
    assert cosine(together[0], together[1]) < 0.999


def test_vectors_are_float32_of_length_one(model: Path) -> None:
    subject = encoder(model, fp16=True)  # there is no half precision on a CPU
    vectors = subject.encode_passages(PASSAGES)
    assert vectors.shape == (4, subject.dimension) == (4, 32)
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    assert subject.encode_queries([]).shape == (0, 32)


def test_prefixes_are_put_before_the_text(model: Path) -> None:
    plain = encoder(model)
    prefixed = encoder(model, query_prefix="query: ", passage_prefix="passage: ")
    assert np.array_equal(prefixed.encode_queries(["river"]), plain.encode_queries(["query: river"]))
    passage = prefixed.encode_passages([Passage("0", "river")])
    assert np.array_equal(passage, plain.encode_queries(["passage: river"]))
    assert cosine(passage[0], plain.encode_queries(["river"])[0]) < 0.999


def test_long_texts_are_cut(model: Path) -> None:
    subject = encoder(model, max_tokens=6, max_query_tokens=5)
    assert np.allclose(*subject.encode_queries(["river river river", "river river river zomel"]), atol=1e-6)
    assert not np.allclose(*subject.encode_passages([Passage("0", "river " * 3), Passage("1", "river " * 4)]))
    # Beyond the model's own positions nothing can be read, whatever the settings say.
    assert np.isfinite(encoder(model).encode_queries(["river " * 1000])).all()


def same(first: TransformerEncoder, second: TransformerEncoder, *, query: str, passage: str) -> bool:
    """Whether `second`, without prefixes, needs these two to do as `first`."""
    text = "river of zomel"
    return np.allclose(first.encode_queries([text]), second.encode_queries([query + text]), atol=1e-6) and np.allclose(
        first.encode_passages([Passage("", text)]), second.encode_passages([Passage("", passage + text)]), atol=1e-6
    )


@pytest.mark.parametrize(
    ("name", "pooling", "query", "passage"),
    [
        ("e5-base-v2", "mean", "query: ", "passage: "),
        ("intfloat_multilingual-E5-small", "mean", "query: ", "passage: "),
        ("bge-small-en-v1.5", "cls", "Represent this sentence for searching relevant passages: ", ""),
        ("bge-m3", "cls", "", ""),
        ("code5-large", "mean", "", ""),
    ],
)
def test_family_gives_prefixes_and_pooling(
    write_model: Callable[..., Path], name: str, pooling: str, query: str, passage: str
) -> None:
    folder = write_model(name)
    plain = encoder(folder, pooling=pooling, query_prefix="", passage_prefix="")
    assert same(encoder(folder), plain, query=query, passage=passage)


def test_models_own_files_come_before_its_family_and_settings_before_both(write_model: Callable[..., Path]) -> None:
    folder = write_model("e5-like")
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompts = {"prompts": {"query": "longer : ", "document": "text : "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    plain = encoder(folder, pooling="cls", query_prefix="", passage_prefix="")
    assert same(encoder(folder), plain, query="longer : ", passage="text : ")
    chosen = encoder(folder, pooling="mean", query_prefix="about ", passage_prefix="")
    assert same(chosen, encoder(folder, pooling="mean", query_prefix="", passage_prefix=""), query="about ", passage="")


def test_pooling_that_is_not_known_is_refused_unless_set(write_model: Callable[..., Path]) -> None:
    folder = write_model("last-token")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    with pytest.raises(SettingsError, match=r"encoder\.pooling.*lasttoken"):
        encoder(folder)
    assert encoder(folder, pooling="mean").dimension == 32


def test_fingerprint_changes_when_vectors_of_passages_would(write_model: Callable[..., Path], model: Path) -> None:
    known = encoder(model).fingerprint
    assert encoder(write_model("elsewhere")).fingerprint == known  # a copy
    assert encoder(model, batch_size=1, query_prefix="query: ").fingerprint == known
    changed = [
        encoder(write_model("trained", seed=1)),
        encoder(model, passage_prefix="passage: "),
        encoder(model, pooling="cls"),
        encoder(model, max_tokens=16),
    ]
    assert len({known, *(each.fingerprint for each in changed)}) == 5


def test_threads_share_an_encoder(model: Path) -> None:
    subject = encoder(model, batch_size=2)
    expected = subject.encode_passages(PASSAGES)
    with ThreadPoolExecutor(8) as pool:
        for vectors in pool.map(lambda _: subject.encode_passages(PASSAGES), range(64)):
            assert np.allclose(vectors, expected, atol=1e-6)


def test_settings_choose_the_encoder(model: Path) -> None:
    assert isinstance(build_encoder(None, key="encoder"), HashingEncoder)
    assert build_encoder({"dimension": 128}).dimension == 128
    built = build_encoder({"path": str(model), "device": "cpu"})
    assert isinstance(built, TransformerEncoder)
    assert built.fingerprint == build_encoder(EncoderSettings(path=str(model))).fingerprint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "intfloat/e5-base-v2"}, r"index\.encoder\.path: got 'intfloat/e5-base-v2'.*not fetched"),
        ({"path": "."}, r"index\.encoder\.path.*config\.json"),
        ({"pooling": "max"}, r"index\.encoder\.pooling"),
        ({"pathh": "x"}, "Did you mean 'path'"),
        ({"dimension": 1}, r"index\.encoder\.dimension"),
    ],
)
def test_wrong_setting_is_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        build_encoder(settings, key="index.encoder")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta:x"])
def test_device_that_is_not_there_is_named(model: Path, device: str) -> None:
    with pytest.raises(SettingsError, match=r"encoder\.device"):
        build_encoder({"path": str(model), "device": device})


def test_damaged_model_is_named(write_model: Callable[..., Path]) -> None:
    folder = write_model("damaged")
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(SettingsError, match=r"encoder\.path.*Loading it failed"):
        encoder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SettingsError, match=r"encoder\.path.*Loading it failed"):
        encoder(folder)
