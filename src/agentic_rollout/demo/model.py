"""The demo's language model: a byte-level BPE of at most 512 tokens, and a small Qwen2.

The tokenizer is made for copying: a name, or a number, is spelled by the same tokens wherever it stands, after
a tag, a space or a quote. The tags are added tokens, yet not special ones: those are dropped when
a reward function decodes a response with `skip_special_tokens=True`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agentic_rollout.demo.task import Language

MAX_VOCABULARY = 512  # all in all: bytes, merges, tags and special tokens
MAX_POSITIONS = 1024
END_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"

# Keeps merges from gluing the two halves of single names together, see `world.invent_names`.
_MIN_FREQUENCY = 100

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}Question: {{ message['content'] }}{{ '\\n' }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)


def build_tokenizer(
    language: Language, out_dir: Path, *, end_token: str = END_TOKEN, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Train the tokenizer for the language and save it, its chat template included, in `out_dir`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(language.pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY - len(language.tags),
        min_frequency=_MIN_FREQUENCY,
        special_tokens=[end_token, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(language.texts, trainer)
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in language.tags])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end_token,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        chat_template=chat_template,
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
        initializer_range=0.05,  # a model this narrow starts to learn late at the usual 0.02
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)
