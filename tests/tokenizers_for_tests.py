"""Small tokenizers made offline: bytes (characters split over tokens) and words with their spaces."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

END = "<end>"
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(merges: tuple[str, ...] = (" the", "ing", "an", "12")) -> PreTrainedTokenizerFast:
    """One token for every byte, a few longer ones, and an end token (id 0): an emoji takes four tokens."""
    alphabet = sorted(ByteLevel.alphabet())
    words = [ByteLevel(add_prefix_space=False).pre_tokenize_str(m)[0][0] for m in merges]
    vocab = {END: 0}
    pairs: list[tuple[str, str]] = []
    for piece in alphabet:
        vocab[piece] = len(vocab)
    for word in words:
        left = word[0]
        for letter in word[1:]:
            pairs.append((left, letter))
            left += letter
            vocab.setdefault(left, len(vocab))
    inner = Tokenizer(models.BPE(vocab=vocab, merges=list(dict.fromkeys(pairs))))
    inner.pre_tokenizer = ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)
    made.chat_template = CHAT
    return made


def word_tokenizer(words: tuple[str, ...] = ("a", "b", "cat", "dog", "sat", ".")) -> PreTrainedTokenizerFast:
    """Words that carry the space before them, as sentencepiece models have them."""
    vocab = {END: 0, **{f"\u2581{w}": i + 1 for i, w in enumerate(words)}}
    vocab |= {w: len(vocab) + i for i, w in enumerate(words)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token=END))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)
