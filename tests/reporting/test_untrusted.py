"""Words from texts and names: shown as they are, without any power."""

import pytest

from moescope.reporting.untrusted import plot_words, token_words, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("word", "word"),
        (" naïve 中文 😀", " naïve 中文 😀"),
        ("a\u202eb\u2066c", "a[U+202E]b[U+2066]c"),
        ("\u200b\ufeff", "[U+200B][U+FEFF]"),
        ("\x1b[2J\x00", "[U+001B][2J[U+0000]"),
        ("\u2028\u2029", "[U+2028][U+2029]"),
        ("\ud800", "[U+D800]"),
        ("a\nb\tc", "a⏎\nb⇥c"),
    ],
)
def test_what_cannot_be_seen_is_spelled_out_and_the_rest_is_kept(text, shown):
    assert visible(text) == shown


def test_a_token_without_text_is_its_number():
    assert token_words(None, 17) == token_words("", 17) == token_words(float("nan"), 17) == "#17"
    assert token_words("<b>", 17) == "<b>"


def test_names_in_figures_hold_nothing_plotly_would_read():
    shown = plot_words('<a href="x">&lt;b&gt;%{x}</a>\n')
    assert not set("<>&") & set(shown)
    assert "%{" not in shown
    assert "\n" not in shown
