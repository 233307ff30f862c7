"""Chat templates: the frame that they put around messages, and what is refused with one line and within limits."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import transformers

from ridgeplan.runtime import chat_template
from ridgeplan.runtime.chat_template import ChatTemplateError, TemplateProcess
from ridgeplan.runtime.model.checkpoint import load_tokenizer
from ridgeplan.runtime.model.source import model_source
from ridgeplan.validate.quality.chat_template import chat_frame

CHATML = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}"
    "<|im_start|>system\nBe brief<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends templates that never end after one second instead of five."""
    monkeypatch.setattr(chat_template, "CPU_S", 1)


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    with closing(TemplateProcess()) as shared:
        yield shared


@pytest.fixture
def one_process(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renders in a process that other tests use, too: each one imports transformers, which takes most of a second."""
    monkeypatch.setattr("ridgeplan.validate.quality.chat_template.rendered", process.rendered)


def tokenizer_with(template: Any) -> Any:
    """A tokenizer of transformers without any vocabulary of its own."""
    vocabulary = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=vocabulary, bos_token="<s>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.usefixtures("one_process")
def test_a_frame_is_what_the_tokenizer_itself_renders() -> None:
    for template in (CHATML, "{{ bos_token }}[INST] {{ messages[0]['content'] }} [/INST]"):
        tokenizer = tokenizer_with(template)
        frame = chat_frame(tokenizer)
        for text in ("Which colour?", 'two\nlines, "quoted" <b> {{ x }} \\n 名'):
            chat = [{"role": "user", "content": text}]
            assert frame is not None
            assert frame.around(text) == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert chat_frame(SimpleNamespace()) is None
    assert chat_frame(tokenizer_with(None)) is None


@pytest.mark.model
def test_the_embedded_models_frame_is_its_own() -> None:
    tokenizer = load_tokenizer(model_source("smollm2-135m"))
    frame, chat = chat_frame(tokenizer), [{"role": "user", "content": "Which colour?"}]
    assert frame is not None
    assert frame.around("Which colour?") == tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s of CPU time"),
        ('{{ "a" * 3000000000 }}', "more than 1 GiB of memory"),
        ("{{ 'a' * 100000 }}{{ messages[0].content }}", "it makes 1000"),
        ("{{ raise_exception('only\nsystems') }}", "TemplateError: only systems"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages[0].content.__class__.__mro__ }}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("(" * 5 + "{{" + "(" * 50000 + "}}", "cannot be used"),
        ("no message", "does not hold a user's message once and as it is"),
        ("{{ messages[0].content }}{{ messages[0].content }}", "once and as it is"),
        ("{{ messages[0].content | upper }}", "once and as it is"),
        ("{{ messages | tojson }}", "once and as it is"),
        ({"tool_use": "x", "rag": "y"}, "multiple chat templates with no default"),
    ],
)
def test_what_cannot_be_used_is_refused_with_one_line_in_bounded_time(template: Any, reason: str) -> None:
    started = time.perf_counter()
    with pytest.raises(ChatTemplateError) as caught:
        chat_frame(tokenizer_with(template))
    message = str(caught.value)
    assert message.startswith("the model's chat template cannot be used: ") and reason in message
    assert message.endswith("; allowed: --tasks none") and "\n" not in message and len(message) < 400
    assert time.perf_counter() - started < chat_template.WALL_S + 10


def test_a_template_that_fills_the_memory_step_by_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_S", 60)  # writing a gibibyte takes some machines more than a second
    doubled = "{% set x = namespace(s='a' * 1000) %}{% for i in range(40) %}{% set x.s = x.s ~ x.s %}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="memory"):
        chat_frame(tokenizer_with(doubled))


LONG = "{% if messages[0].content | length > 200 %}X{% endif %}{{ messages[0].content }}"  # longer than both probes


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s of CPU time"),
        ("{{ 'a' * 100000 }}", "it makes 100000"),
        ("Today is Monday.", "does not hold a user's message once and as it is"),
    ],
)
def test_a_template_that_looks_at_the_message_is_bounded_as_well(then: str, reason: str) -> None:
    frame = chat_frame(tokenizer_with(LONG.replace("X", then)))
    assert frame is not None
    frame.check(["x" * 200, "y"])
    started = time.perf_counter()
    with pytest.raises(ChatTemplateError) as caught:
        frame.check(["y", "x" * 201])
    message = str(caught.value)
    assert reason in message and message.endswith("; allowed: --tasks none") and "\n" not in message
    assert time.perf_counter() - started < chat_template.WALL_S + 10


@pytest.mark.usefixtures("one_process")
def test_a_template_that_prints_the_time_can_be_used_at_another_time() -> None:
    frame = chat_frame(tokenizer_with("{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}"))
    assert frame is not None
    yesterday = replace(frame, before="2026-01-01 ")
    yesterday.check(["a question"])


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "WALL_S", 0.01)
    with pytest.raises(ChatTemplateError, match=r"it takes more than 0\.01 s"):
        chat_frame(tokenizer_with(CHATML))
