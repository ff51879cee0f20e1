"""A chat template gives the ids that transformers gives; one that misbehaves is one line, soon."""

from __future__ import annotations

import pytest

from moescope.errors import BadInput
from moescope.execution import chat_templates
from moescope.execution.chat_templates import ChatTemplate
from routing.tiny_text import save_tokenizer

CHAT = [{"role": "user", "content": "word1 word2"}, {"role": "assistant", "content": "word3"}]
GOOD = (
    "{{ bos_token }} {% for message in messages %}{% if message['role'] == 'user' %}word7 "
    "{{ message['content'] | trim }}{% else %} word8 {{ message['content'] }} {{ eos_token }}"
    "{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, chat_template=True)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def template(tokenizer) -> ChatTemplate:
    """One child process for the whole file: it goes on after every template that fails."""
    tokenizer.chat_template = GOOD
    return ChatTemplate("model", tokenizer)


@pytest.fixture(autouse=True)
def good(tokenizer, template):
    tokenizer.chat_template = template.settings["chat_template"] = GOOD


def test_ids_are_those_of_transformers(tokenizer, template):
    for chat in (CHAT, CHAT[:1], [{"role": "user", "content": 'ü "\n🙂'}]):
        expected = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
        assert template.tokenize(chat) == expected
    assert template.tokenize(CHAT)[:2] == [tokenizer.bos_token_id, 4 + 7]


BAD = {
    "{% for %}": "TemplateSyntaxError",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
    "{{ raise_exception('only users\n may speak') }}": "only users",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ messages[7].content }}": "UndefinedError",
    "{{ 'a' * 10**10 }}": "1 GiB",
    "{{ 'a' * 10**8 }}": "100,000,000 characters",
    "{% set x = namespace(s='aa') %}{% for i in range(60) %}{% set x.s = x.s ~ x.s %}{% endfor %}": "1 GiB",
    "{% for i in range(10**9) %}{% endfor %}": "OverflowError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
}


def test_a_template_that_fails_or_takes_too_much_memory_is_one_line_and_the_next_one_works(template):
    for source, words in BAD.items():
        template.settings["chat_template"] = source
        with pytest.raises(BadInput, match=words) as caught:
            template.tokenize(CHAT)
        assert str(caught.value).startswith("model: its chat template cannot be rendered")
        assert "\n" not in str(caught.value)
    template.settings["chat_template"] = "{{ '\\ud83d' }} word1"
    assert template.tokenize(CHAT)[-1] == 4 + 1


def test_a_template_that_does_not_end_is_stopped(tokenizer, monkeypatch):
    monkeypatch.setattr(chat_templates, "SECONDS", 0.5)
    nested = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
    tokenizer.chat_template = nested
    template = ChatTemplate("model", tokenizer)
    with pytest.raises(BadInput, match=r"took over 0\.5 seconds"):  # left alone it would take years
        template.tokenize(CHAT)
    assert template.child.poll() is not None


def test_chats_of_any_shape_give_ids_or_one_line(template):
    for chat in ([], ["word"], [{"content": None}], [[{"x": 1}]], [7.5], [{"role": {}}], [None]):
        try:
            assert all(type(token) is int for token in template.tokenize(chat))
        except BadInput as error:
            assert "\n" not in str(error)


def test_several_templates_without_a_default_are_one_line(tokenizer):
    tokenizer.chat_template = {"one": GOOD, "two": GOOD}
    with pytest.raises(BadInput, match="its chat template cannot be rendered"):
        ChatTemplate("model", tokenizer)
