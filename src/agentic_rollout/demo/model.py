"""The demo's language model: a byte-level BPE of 512 tokens and a Qwen2 of half a million weights.

The tokenizer is made for copying: a name is spelled by the same tokens wherever it stands, after
a tag, a space or a quote. The tags are added tokens, yet not special ones: those are dropped when
a reward function decodes a response with `skip_special_tokens=True`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agentic_rollout.demo.world import information, invent_place, question

VOCABULARY_SIZE = 512  # all in all: bytes, merges, tags and special tokens
MAX_POSITIONS = 1024
END_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
TAGS = (
    "<think>",
    "</think>",
    "<search>",
    "</search>",
    "<information>",
    "</information>",
    "<answer>",
    "</answer>",
)

# A lower-case word takes its leading space along; a capitalised one leaves it behind, so that a
# name has one spelling. What lies between words is a piece of its own.
_PIECE = r" ?[a-z]+|[A-Z][a-z]*"

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}Question: {{ message['content'] }}{{ '\\n' }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)


def tokenizer_texts(seed: int, places: int = 400) -> list[str]:
    """Return passages and questions to train the tokenizer on.

    They are written like the world's and about other places: a name that came again and again
    would end up as one token, which no warm start on new names could ever teach.
    """
    rng = random.Random(seed)
    texts = []
    for facts in (invent_place(rng) for _ in range(places)):
        for fact in facts:
            texts.append(f"Question: {question(fact)}\n")
            texts.append(information([fact, *rng.sample(facts, 2)]))
    return texts


def build_tokenizer(texts: Iterable[str], out_dir: Path) -> PreTrainedTokenizerFast:
    """Train the tokenizer on `texts` and save it, its chat template included, in `out_dir`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(TAGS),
        special_tokens=[END_TOKEN, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        chat_template=_CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(out_dir)
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Build the untrained model for the tokenizer, its weights drawn from `seed`."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,  # head_dim 64, the smallest the inference engine's kernels take
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        torch_dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    return model
