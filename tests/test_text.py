"""Ids to text as it comes: the stream is the full text, characters are whole, stop strings never show."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import byte_tokenizer, word_tokenizer

from flashdraft.decode.text import Detokenizer, StopStrings

BYTES, WORDS = byte_tokenizer(), word_tokenizer()
CUT = "\ufffd"


def stream(tokenizer, ids) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@settings(deadline=None)
@given(text=st.text(max_size=30))
def test_stream_of_any_text_is_the_text(text: str) -> None:
    """Emoji and CJK split over tokens (D58): every piece holds whole characters only."""
    ids = BYTES(text)["input_ids"]
    pieces = stream(BYTES, ids)
    assert "".join(pieces) == BYTES.decode(ids, skip_special_tokens=True)
    if CUT not in text:
        assert all(CUT not in piece for piece in pieces)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, len(BYTES) - 1), max_size=40))
def test_stream_of_any_bytes_is_the_full_decode(ids: list[int]) -> None:
    """Ids that form no characters show as they do in a decode of the whole answer."""
    assert "".join(stream(BYTES, ids)) == BYTES.decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, len(WORDS) - 1), max_size=20))
def test_spaces_that_belong_to_words(ids: list[int]) -> None:
    """Metaspace decoders drop the first space of a text only: pieces keep theirs."""
    assert "".join(stream(WORDS, ids)) == WORDS.decode(ids, skip_special_tokens=True)


def test_a_cut_character_shows_at_the_end_only() -> None:
    ids = BYTES("ok \U0001f642")["input_ids"][:-1]
    pieces = stream(BYTES, ids)
    assert "".join(pieces[:-1]) == "ok " and CUT in pieces[-1]


def test_bad_bytes_do_not_hold_back_what_follows() -> None:
    """A run of bytes that never form a character, then text: all of it comes, and no push reads the whole run again."""
    bad = BYTES("\U0001f642")["input_ids"][1]
    seen: list[int] = []

    class Counting:
        def decode(self, token_ids, *, skip_special_tokens):
            seen.append(len(token_ids))
            return BYTES.decode(token_ids, skip_special_tokens=skip_special_tokens)

    pieces = stream(Counting(), [bad] * 200 + BYTES("fine")["input_ids"])
    assert "".join(pieces).endswith("fine")
    assert "".join(pieces[:-1]).endswith("fine")
    assert max(seen) < 40


@settings(deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_against_a_search_of_the_whole(pieces: list[str], stops: list[str]) -> None:
    """The text ends before the stop string that is complete first, wherever the pieces were cut."""
    watch, out, stopped = StopStrings(stops), "", False
    read = ""
    for piece in pieces:
        read += piece
        final, stopped = watch.push(piece)
        out += final
        found = [read.find(s) for s in stops if s in read]
        assert stopped == bool(found)
        if stopped:
            assert out == read[: min(found)]
            return
        held = read[len(out) :]
        assert read.startswith(out)
        assert held == "" or any(s.startswith(held) for s in stops)
    assert out + watch.flush() == read


def test_nothing_is_held_back_without_need() -> None:
    watch = StopStrings(("END",))
    assert watch.push("abc") == ("abc", False)
    assert watch.push("xE") == ("x", False)
    assert watch.push("N") == ("", False)
    assert watch.push("o") == ("ENo", False)


@pytest.mark.parametrize("stops", [("ab", "b"), ("b", "ab")])
def test_the_earliest_of_several_wins(stops: tuple[str, ...]) -> None:
    assert StopStrings(stops).push("xab") == ("x", True)
