"""Ids to text as it comes: the stream is the full text, characters are whole, stop strings never show."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers_for_tests import END, byte_tokenizer, word_tokenizer
from transformers import PreTrainedTokenizerFast

from flashdraft.decode.text import Detokenizer, StopStrings

CUT = "\ufffd"
EMOJI, CJK = "\U0001f642", "\u65e5\u672c\u8a9e"
TEXT = st.text(st.characters(exclude_characters=CUT, exclude_categories=["Cs"]), max_size=30)
MIXED = st.lists(st.sampled_from([EMOJI, *CJK, "a", " a", "  ", "\u00e9", "\u200d", "\n"]), max_size=12).map("".join)


def crossing_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and tokens that end one character and begin the next, as byte-level tokenizers learn them."""

    def spelled(text: str) -> str:
        return str(ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0])

    vocab = {END: 0}
    for piece in sorted(ByteLevel.alphabet()):
        vocab[piece] = len(vocab)
    cjk, emoji = spelled(CJK), spelled(" " + EMOJI + EMOJI)
    pairs = [(cjk[2], cjk[3]), (cjk[5], cjk[6]), (emoji[0], emoji[1]), (emoji[3], emoji[4]), (emoji[4], emoji[1])]
    pairs.append((cjk[2] + cjk[3], cjk[4]))
    for left, right in pairs:
        vocab.setdefault(left + right, len(vocab))
    inner = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    inner.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Words with their spaces, and a token for each byte of what is no word (Llama 2, Mistral, Gemma): in its decoder
    one bad byte spoils the whole run of bytes around it."""
    vocab = {"<unk>": 0, END: 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    words, merges = ["\u2581", "a", "b", "!", "\u2581a", "\u2581b", "ab", "\u2581\u2581"], []
    for word in words:
        vocab[word] = len(vocab)
        if len(word) == 2:
            merges.append((word[0], word[1]))
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)


TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "crossing": crossing_tokenizer(),
    "words": word_tokenizer(),
    "fallback": fallback_tokenizer(),
}
OF_TEXT = ["bytes", "crossing", "fallback"]  # the words tokenizer knows only six


def stream(tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def ids_of(name: str, text: str) -> list[int]:
    return TOKENIZERS[name](text, add_special_tokens=False)["input_ids"]


def decoded(name: str, ids: list[int]) -> str:
    return TOKENIZERS[name].decode(ids, skip_special_tokens=True)


def check_stream_of_text(name: str, ids: list[int]) -> None:
    """Whole characters only, all of them as soon as they are complete, and in the end the text of all ids."""
    so_far = ""
    for end, piece in enumerate(stream(TOKENIZERS[name], ids)[:-1], start=1):
        so_far += piece
        assert CUT not in piece
        complete = decoded(name, ids[:end])
        if name != "fallback" or CUT not in complete:
            assert so_far == complete.rstrip(CUT)
    assert so_far == decoded(name, ids)


@pytest.mark.parametrize("name", OF_TEXT)
@settings(deadline=None)
@given(text=TEXT | MIXED)
def test_stream_of_text(name: str, text: str) -> None:
    """D58: emoji and CJK split over tokens came out as replacement characters, and with byte tokens (Gemma, Llama 2)
    the second of two emoji, and the word behind them, were lost."""
    check_stream_of_text(name, ids_of(name, text))


@pytest.mark.parametrize("name", ["bytes", "crossing", "words"])
@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_stream_of_any_ids_is_the_full_decode(name: str, data: st.DataObject) -> None:
    """Ids that form no characters show as in a decode of the whole answer; special tokens leave no trace."""
    some = st.integers(0, len(TOKENIZERS[name]) - 1) | st.just(0)
    ids = data.draw(st.lists(some, max_size=60))
    assert "".join(stream(TOKENIZERS[name], ids)) == decoded(name, ids)


@settings(deadline=None)
@given(text=MIXED, places=st.lists(st.integers(0, 40), max_size=12))
@pytest.mark.parametrize("name", OF_TEXT)
def test_special_tokens_among_the_bytes_of_a_character(name: str, text: str, places: list[int]) -> None:
    """A special token within a character, or many of them between words, change nothing of the text."""
    end = TOKENIZERS[name].eos_token_id
    ids = ids_of(name, text)
    for place in places:
        ids.insert(min(place, len(ids)), end)
    check_stream_of_text(name, ids)


@pytest.mark.parametrize("name", list(TOKENIZERS))
@settings(deadline=None)
@given(data=st.data())
def test_text_behind_any_ids_comes_through(name: str, data: st.DataObject) -> None:
    """Whatever bytes came before, a word shows with its own token, and nothing is left to flush."""
    some = st.integers(0, len(TOKENIZERS[name]) - 1)
    ids = data.draw(st.lists(some, max_size=60))
    word = ids_of(name, " a" if name != "bytes" else "a")[-1:]
    pieces = stream(TOKENIZERS[name], ids + word)
    assert pieces[-2].endswith("a") and pieces[-1] == ""


@pytest.mark.parametrize("name", OF_TEXT)
@pytest.mark.parametrize("lost", [1, 2])
def test_a_cut_character_shows_at_the_end_only(name: str, lost: int) -> None:
    """A limit inside a character: the cut shows once all is over, never before."""
    ids = ids_of(name, "a" + EMOJI)[:-lost]
    pieces = stream(TOKENIZERS[name], ids)
    assert "".join(pieces[:-1]) == "a"
    assert set(pieces[-1]) == {CUT} and "".join(pieces) == decoded(name, ids)


class Counting:
    """A tokenizer that notes how many ids it was asked to decode."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.most = 0

    def decode(self, token_ids, *, skip_special_tokens):
        self.most = max(self.most, len(token_ids))
        return TOKENIZERS[self.name].decode(token_ids, skip_special_tokens=skip_special_tokens)


LONG_RUNS = {
    "bytes that form no character": ("bytes", ids_of("bytes", EMOJI)[1:2] * 300),
    "begun characters": ("bytes", ids_of("bytes", EMOJI)[:3] * 100),
    "characters begun with two bytes": ("bytes", ids_of("bytes", CJK)[:2] * 100),
    "byte tokens": ("fallback", ids_of("fallback", EMOJI)[-1:] * 300),
    "special tokens": ("bytes", [0] * 300),
    "special tokens behind text": ("words", [1, *[0] * 300]),
    "tokens that cross characters": ("crossing", ids_of("crossing", CJK[:2])[:-1] * 150),
    "text": ("fallback", ids_of("fallback", (EMOJI + CJK) * 40)),
}


@pytest.mark.parametrize("run", LONG_RUNS)
def test_a_token_costs_no_more_in_a_long_answer(run: str) -> None:
    """A run of bytes or special tokens that show nothing was decoded again from its start with every token."""
    name, ids = LONG_RUNS[run]
    counting = Counting(name)
    pieces = stream(counting, ids + ids_of(name, "a"))
    assert counting.most < 40
    assert "".join(pieces) == decoded(name, ids + ids_of(name, "a"))
    assert pieces[-2].endswith("a")
    texts = [piece for piece in pieces if piece]
    if name != "words" and run != "special tokens":
        assert len(texts) > 10  # it came bit by bit


SHORT = st.text(alphabet="ab", max_size=4)


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(SHORT, max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3),
)
def test_stop_strings_against_a_search_of_the_whole(pieces: list[str], stops: list[str]) -> None:
    """The text ends before the stop string that is complete first, wherever the pieces were cut; held back is the
    longest end that begins a stop string, no more and no less."""
    watch, out, read = StopStrings(stops), "", ""
    for piece in pieces:
        read += piece
        final, stopped = watch.push(piece)
        out += final
        found = [read.find(s) for s in stops if s in read]
        assert stopped == bool(found)
        if stopped:
            assert out == read[: min(found)]
            return
        begun = [n for n in range(len(read) + 1) if any(s.startswith(read[n:]) for s in stops)]
        assert out == read[: min(begun, default=len(read))]
    assert out + watch.flush() == read


def test_nothing_is_held_back_without_need() -> None:
    watch = StopStrings(("END",))
    assert watch.push("abc") == ("abc", False)
    assert watch.push("xE") == ("x", False)
    assert watch.push("N") == ("", False)
    assert watch.push("o") == ("ENo", False)


@pytest.mark.parametrize("stops", [("ab", "b"), ("b", "ab"), ("zz", "abc", "ab")])
def test_the_earliest_of_several_wins(stops: tuple[str, ...]) -> None:
    assert StopStrings(stops).push("xabc") == ("x", True)
