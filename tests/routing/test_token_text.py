"""Token ids as words.

Blanks kept, letters that several tokens share not torn, nothing without a tokenizer.
"""

from __future__ import annotations

import pytest

from moescope.routing.token_sample import TokenText

TEXT = "Das Café von früher, 東京 und ein 🙂 am Ende"


def byte_level():
    """Every byte a token: the letters beyond ASCII are several."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentence_pieces():
    """Words with SentencePiece's blank in front, which a decoder takes from the first of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "▁once", "▁upon", "▁a", "▁time", "ly"]
    tokenizer = Tokenizer(
        models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_a_word_s_blank_is_kept_and_a_piece_within_a_word_has_none():
    words = TokenText(sentence_pieces())
    assert [words.of(token) for token in (2, 4, 5)] == [" upon", " time", "ly"]


def test_before_token_and_after_read_together_as_the_text_does():
    assert TokenText(sentence_pieces()).around([1, 2], 3, [4, 5]) == ("once upon", " a", " timely")
    assert TokenText(sentence_pieces()).around([], 1, []) == ("", "once", "")


@pytest.mark.parametrize("at", range(0, 48, 3))
def test_letters_of_several_tokens_make_no_error_and_plain_ones_stay_the_text(at):
    tokenizer = byte_level()
    ids = tokenizer(TEXT)["input_ids"]
    before, token, after = TokenText(tokenizer).around(ids[:at], ids[at], ids[at + 1 :])
    if at < 7:  # ASCII only up to here
        assert before + token + after == TEXT
    assert token


def test_without_a_tokenizer_there_are_no_words():
    assert TokenText().of(5) is None
    assert TokenText().around([1], 2, [3]) == (None, None, None)
