"""`chat` with a tiny model: turns that keep the cache, /reset, Ctrl-C in an answer, and the end of input."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf_files import write_gguf

from ridgeplan.dashboards.cli import chat
from ridgeplan.dashboards.cli.output import printable
from ridgeplan.planner import Workload, preset
from ridgeplan.runtime import SamplingParams

Talk = Callable[..., list[dict[str, str]]]


@pytest.fixture
def talk(chat_engine: Any, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Types lines into a chat, exceptions raise where a line is read; returns the messages of the chat at its end."""

    def run(*lines: str | type[BaseException], system: str | None = None) -> list[dict[str, str]]:
        coming = iter([*lines, EOFError])

        def read(_: str) -> str:
            line = next(coming)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        conversation = chat.Conversation(chat_engine, SamplingParams(), system, vary_seed=False)
        conversation.talk()
        return conversation._messages

    return run


def test_turns_follow_each_other_and_keep_the_cache(talk: Talk, chat_engine: Any, capsys: Any) -> None:
    messages = talk("W" * 60, "And why is that?")
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    shown = capsys.readouterr()
    answers = [message["content"] for message in messages[1::2]]
    assert shown.out == printable("".join(f"{answer}\n" for answer in answers))
    assert "64 tokens, " in shown.err
    assert answers[1] == "".join(chat_engine.chat(messages[:3]))


def test_reset_starts_anew_and_too_long_a_chat_says_so(talk: Talk, capsys: Any) -> None:
    assert [message["content"] for message in talk("Why?", "/reset", "/help", "a" * 300, system="Be brief.")] == [
        "Be brief."
    ]
    err = capsys.readouterr().err
    assert "allowed by the plan: up to 256; /reset starts a new chat" in err
    assert "/reset starts a new chat, /help says this, Ctrl-C stops an answer" in err


def test_ctrl_c_stops_an_answer_but_not_the_chat(talk: Talk, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []

    def stop_at_second(text: str, **options: Any) -> None:
        pieces.append(text)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "echo", stop_at_second)
    user, answer = talk("Why?", KeyboardInterrupt)
    assert (user["content"], answer["content"]) == ("Why?", "".join(pieces[:2]))
    assert pieces[2:] == ["\n(stopped)", ""]


def test_a_model_without_a_chat_template_is_refused_before_it_is_loaded(
    refuses: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeplan.runtime.load", lambda *_, **__: pytest.fail("the model was loaded"))
    path = tmp_path / "plan.json"
    path.write_text(preset("quantspec-kv", Workload("any", "here", 64, 8)).to_json())
    assert "the model has no chat template" in refuses("chat", path, "--model", tiny_folder, "--any-model")


def test_a_gguf_file_without_one_is_refused_before_it_is_converted(
    refuses: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bare.gguf"
    write_gguf(path, transformers.AutoModelForCausalLM.from_pretrained(tiny_folder))
    monkeypatch.setattr("ridgeplan.runtime.model.source.converted", lambda *_: pytest.fail("the file was converted"))
    for command in (("chat",), ("run", "--chat", "--prompt", "hi")):
        assert "the model has no chat template" in refuses(*command, path)


def test_bad_questions_are_refused(refuses: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(preset("quantspec", Workload("any", "here", 64, 8)).to_json())
    assert "--ctx cannot be given with a PLAN; allowed: with a MODEL" in refuses("chat", path, "--ctx", 64)
    assert "a model was given twice" in refuses("serve", "Llama-3.1-8B", "--model", "x", "--port", 0)
    assert "cannot listen on 192.0.2.1 port 0: " in refuses("serve", path, "--host", "192.0.2.1", "--port", 0)
    assert "-1.0 is not in the range x>=0" in refuses("chat", path, "--temperature", -1)
