"""Steps of an engine measured through HTTP, on a server of this test that decodes at known times, and in a process."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_engine import serving

from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.validate import engine_steps
from ridgeplan.validate.engine_steps import (
    BatchTooLarge,
    CompletionsServer,
    EngineFailed,
    InProcessVllm,
    Stream,
    measure_steps,
    random_prompts,
)

LLAMA = load_shape("meta-llama/Llama-3.1-8B")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens, so that a case takes half a second."""
    for name, value in {"NEW_TOKENS": 24, "SKIPPED_STEPS": 3, "MIN_STEPS": 8, "MAX_NEW_TOKENS": 96}.items():
        monkeypatch.setattr(engine_steps, name, value)


def known_step_s(context: int, batch: int) -> float:
    return 0.015 + 1e-6 * batch * context


@pytest.mark.parametrize("chunk_tokens", [1, 2])
def test_a_servers_steps_are_measured_at_every_context_and_batch(chunk_tokens: int) -> None:
    with serving(known_step_s, chunk_tokens=chunk_tokens) as server:
        engine = CompletionsServer.connect(server.url, LLAMA.vocab)
        rows = list(measure_steps(engine, LLAMA, (512, 2048), (1, 4), "fp8", "auto"))
    assert (engine.model, engine.version) == ("served", "0.24.0")
    assert [(row.context, row.batch, row.weights) for row in rows] == [
        (2048, 1, "fp8"), (2048, 4, "fp8"), (512, 1, "fp8"), (512, 4, "fp8"),
    ]  # fmt: skip
    for row in rows:
        assert row.tpot_ms == pytest.approx(1e3 * known_step_s(row.context, row.batch), rel=0.02)
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in server.bodies)


def test_a_server_that_takes_texts_alone_gets_words_and_says_how_many_tokens_they_are() -> None:
    with serving(known_step_s, takes_tokens=False) as server:
        engine = CompletionsServer.connect(f"{server.url}/v1", LLAMA.vocab, "served")
        tpot_ms, context = engine.step(256, 2)
    assert context == 256
    assert tpot_ms == pytest.approx(1e3 * known_step_s(256, 2), rel=0.02)


def test_requests_that_wait_for_each_other_are_not_a_batch() -> None:
    with serving(known_step_s, slots=1) as server:
        engine = CompletionsServer.connect(server.url, LLAMA.vocab)
        with pytest.raises(BatchTooLarge, match="2 requests of 64 tokens never decode together; allowed: fewer"):
            engine.step(64, 2)
        skipped: list[str] = []
        rows = list(measure_steps(engine, LLAMA, (64,), (1, 2), "auto", "auto", on_skip=skipped.append))
    assert [row.batch for row in rows] == [1]
    assert len(skipped) == 1 and skipped[0].startswith("2 requests")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://somewhere", "is no address; allowed: http"),
        ("http://127.0.0.1:9", "cannot be reached"),
        ("//", "no addr"),
    ],
)
def test_what_is_no_server_is_one_line(url: str, message: str) -> None:
    with pytest.raises(EngineFailed, match=message):
        CompletionsServer.connect(url, LLAMA.vocab)


def test_a_model_that_the_server_does_not_have_is_named() -> None:
    with serving(known_step_s) as server, pytest.raises(EngineFailed, match=r"serves \['served'\], not 'other'"):
        CompletionsServer.connect(server.url, LLAMA.vocab, "other")


def test_a_stream_counts_tokens_not_chunks() -> None:
    """21 chunks of 2 tokens, 30 ms apart."""
    stream = Stream(tuple(0.03 * index for index in range(21)), tokens=42, prompt_tokens=5)
    assert stream.step_s(0.0, 1.0) == pytest.approx(0.015)
    assert stream.step_s(0.0, 0.05) is None


def test_prompts_share_no_beginning_and_stay_the_same() -> None:
    short, long = random_prompts(1000, 8, 4), random_prompts(1000, 8, 4)
    assert short == long
    assert len({prompt[0] for prompt in short}) > 1
    assert all(250 <= token < 900 for prompt in short for token in prompt)


class FakeEngine:
    """A step takes 10 ms, less once a sequence has ended, `ending` steps before the others, and 50 with a prompt.

    prompts: steps that read prompts, before the last sequence has a token.
    """

    now_s, left, ending, prompts, total = 0.0, 0, 0, 0, 0

    def step(self) -> list[Any]:
        decoding_s = 0.01 if self.left > self.ending else 0.004
        FakeEngine.now_s += 0.05 if self.total - self.left < self.prompts else decoding_s
        self.left -= 1
        return [SimpleNamespace(finished=True)] if self.left in (self.ending, 0) else []


class FakeLLM:
    """vllm.LLM whose engine takes 10 ms a step."""

    def __init__(self, **arguments: Any) -> None:
        if arguments["model"] == "broken":
            raise RuntimeError("CUDA out of memory")
        self.arguments, self.llm_engine, self.waves = arguments, FakeEngine(), 1

    def generate(self, requests: list[Any], params: Any, *, use_tqdm: bool) -> None:
        assert not use_tqdm and requests
        tokens = self.waves * params.max_tokens  # sequences that do not fit wait for others
        self.llm_engine.left = self.llm_engine.total = tokens + self.llm_engine.prompts
        while self.llm_engine.left:
            self.llm_engine.step()


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    vars(module).update(LLM=FakeLLM, SamplingParams=SimpleNamespace, __version__="0.24.0")
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setattr(engine_steps, "time", SimpleNamespace(perf_counter=lambda: FakeEngine.now_s))


@pytest.mark.usefixtures("fake_vllm")
def test_vllm_in_this_process_is_timed_step_by_step() -> None:
    engine = InProcessVllm.start("some/model", LLAMA.vocab, 4096, quantization="fp8")
    assert engine.llm.arguments["quantization"] == "fp8" and "kv_cache_dtype" not in engine.llm.arguments
    assert engine.step(128, 2) == (pytest.approx(10.0), 128)
    assert "step" not in vars(engine.llm.llm_engine)
    engine.llm.llm_engine.ending = 12  # of 24 steps, as with drafts
    assert engine.step(128, 2) == (pytest.approx(10.0), 128)
    engine.llm.llm_engine.ending = 0
    engine.llm.llm_engine.prompts = 10  # which the prefix cache does not hold
    assert engine.step(128, 2) == (pytest.approx(10.0), 128)
    engine.llm.llm_engine.prompts = 0
    engine.llm.waves = 2
    with pytest.raises(BatchTooLarge, match="2 requests of 128 tokens took 48 steps for 24 tokens each"):
        engine.step(128, 2)
    with pytest.raises(EngineFailed, match=r"vLLM does not start: .*out of memory"):
        InProcessVllm.start("broken", LLAMA.vocab, 4096)


def test_a_missing_vllm_says_what_else_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(EngineFailed, match="allowed: --url of a running server"):
        InProcessVllm.start("some/model", LLAMA.vocab, 4096)
