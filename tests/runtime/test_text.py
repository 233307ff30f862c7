"""Texts and conversations that an engine continues."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from ridgeplan import runtime
from ridgeplan.planner import Workload, preset
from ridgeplan.runtime.chat_template import ChatTemplateError, chat_text
from ridgeplan.runtime.engine import Engine
from ridgeplan.runtime.errors import ModelError, WorkloadError
from ridgeplan.runtime.text import stop_tokens

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


@pytest.fixture
def engine(tiny_folder: Path) -> Engine:
    return runtime.load(preset("quantspec", Workload("m", "here", 64, 8)), str(tiny_folder), device="cpu")


def test_a_text_streams_as_the_text_of_its_tokens(engine: Engine) -> None:
    ids = engine.tokenizer.encode("The capital")
    tokens = list(engine.stream(ids))
    assert len(tokens) == engine.plan.workload.new_tokens
    assert "".join(engine.stream("The capital")) == engine.tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_stop_word_ends_the_generation_and_leaves_the_engine_free(engine: Engine) -> None:
    text = "".join(engine.stream("The capital"))
    word = text[2:4]
    assert "".join(engine.stream("The capital", stop=[word])) == text.partition(word)[0]
    assert engine.statistics.generated < 8
    assert "".join(engine.stream("The capital")) == text


@pytest.mark.parametrize("more", [101, [101, 7]])
def test_a_text_ends_at_every_token_that_the_models_generation_config_names(tmp_path: Path, more: object) -> None:
    tokenizer = SimpleNamespace(eos_token_id=5)
    assert stop_tokens(tokenizer, tmp_path) == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": more}), encoding="utf-8")
    assert stop_tokens(tokenizer, tmp_path) == ((5, 101) if more == 101 else (5, 7, 101))
    (tmp_path / "generation_config.json").write_text("[", encoding="utf-8")
    with pytest.raises(ModelError, match=r"cannot read .*generation_config\.json"):
        stop_tokens(tokenizer, tmp_path)


def test_a_conversation_is_answered_in_the_models_template(engine: Engine) -> None:
    engine.tokenizer.chat_template = TEMPLATE
    assert chat_text(engine.tokenizer, CHAT) == "<s>Be brief.<u>Why?<a>"
    ids = engine.tokenizer.encode("<s>Be brief.<u>Why?<a>", add_special_tokens=False)
    answer = engine.tokenizer.decode(list(engine.stream(ids, 6)), skip_special_tokens=True)
    assert "".join(engine.chat(CHAT, 6)) == answer


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "there is nothing to answer"),
        ([*CHAT, {"role": "assistant", "content": "So."}], "there is nothing to answer"),
        (
            [{"role": "tool", "content": "a"}],
            r"message 0 is {'content': 'a', 'role': 'tool'}; allowed: a text, of the role system, user, assistant",
        ),
        ([{"content": "a"}], "message 0 is {'content': 'a'}; allowed: a role and a content"),
        ([{"role": "user", "content": 7}], "message 0 is {'content': 7, 'role': 'user'}; allowed: a text"),
    ],
)
def test_wrong_conversations_are_refused(engine: Engine, messages: list[dict[str, str]], words: str) -> None:
    engine.tokenizer.chat_template = TEMPLATE
    with pytest.raises(ChatTemplateError, match=words):
        engine.chat(messages)


def test_a_model_without_a_template_says_so(engine: Engine) -> None:
    engine.tokenizer.chat_template = None
    with pytest.raises(ChatTemplateError, match="the model has no chat template; allowed: prompts that are plain text"):
        engine.chat(CHAT)


@pytest.mark.parametrize("stop", ["ab", [""], [7]])
def test_wrong_stop_words_are_refused(engine: Engine, stop: list[str]) -> None:
    with pytest.raises(WorkloadError, match="stop is not allowed"):
        next(engine.stream("The capital", stop=stop))


def test_stop_words_need_a_text(engine: Engine) -> None:
    with pytest.raises(WorkloadError, match="stop words were given with token ids"):
        engine.stream([1, 2], stop=["a"])  # type: ignore[call-overload]
