"""Hostile chat templates frame messages as transformers does, or are refused with one line within their limits."""

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mutations import FUZZ, assert_one_line

from ridgeplan.runtime import chat_template
from ridgeplan.runtime.chat_template import MAX_CHARACTERS, ChatTemplateError, TemplateProcess
from ridgeplan.validate.quality.chat_template import chat_frame

FRAGMENTS = (
    "{{ messages[0]['content'] }}", "{{ messages[0].content | trim }}", "{{ messages | tojson }}", "<|im_start|>user\n",
    "{% for m in messages %}", "{{ m.content }}", "{% endfor %}", "{% if add_generation_prompt %}", "{% endif %}", "{{",
    "{%", "}}", "%}", "{% for i in range(99999) %}", "{{ 'a' * 3000000000 }}", "{{ 'a' * 99999 }}", "{% set x = 1 %}",
    "{{ raise_exception('a\nb') }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ bos_token }}",
    "{{ ''.__class__ }}", "{{ strftime_now('%Y') }}", "{% include '/etc/passwd' %}", "{% break %}", "\x1b[31m",
    "\ud800",
    "{% generation %}", "{% endgeneration %}", "{{ (1, 2) | join('\n') }}", "{{ 10 ** 10 ** 10 }}", "\x00", "名",
)  # fmt: skip
TEMPLATES = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), min_size=1, max_size=6).map("".join)
PARTS = FUZZ.max_examples // 100  # those that are ended start another process


@pytest.fixture(autouse=True, scope="module")
def little_time_in_one_process() -> Iterator[None]:
    """Ends templates that never end after one second instead of five, and starts a process anew after these only."""
    with pytest.MonkeyPatch.context() as patch, closing(TemplateProcess()) as process:
        patch.setattr(chat_template, "CPU_S", 1)
        patch.setattr("ridgeplan.validate.quality.chat_template.rendered", process.rendered)
        yield


@settings(FUZZ, max_examples=5 * PARTS, deadline=None)
@example("<user>{{ messages[0].content }}<assistant>")
@example("{{ 10 ** 10 ** 10 }}")
@given(TEMPLATES)
def test_chat_templates(template: str) -> None:
    tokenizer = SimpleNamespace(
        chat_template=template, get_chat_template=lambda: template, special_tokens_map={"bos_token": "<s>"}
    )
    try:
        frame = chat_frame(tokenizer)
    except ChatTemplateError as error:
        assert_one_line(error)
        return
    assert (frame is None) == (template == "")
    assert frame is None or len(frame.before + frame.after) <= MAX_CHARACTERS
