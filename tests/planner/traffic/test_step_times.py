"""Tables of step times and the KV cache of a replica, against the predictions that they are made from."""

from dataclasses import replace

import numpy as np
import pytest

from ridgeplan.planner import NothingFits, PlanError, predict, preset
from ridgeplan.planner.prediction import predict_question
from ridgeplan.planner.question import Question, ask
from ridgeplan.planner.traffic.simulate import Server
from ridgeplan.planner.traffic.step_times import Replica
from ridgeplan.roofline.engine import MIXED_ATTENTION
from ridgeplan.roofline.plan.presets import autoregressive

LLAMA, MOE, MLA, WINDOWED = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B", "DeepSeek-V2-Lite", "openai/gpt-oss-20b"


def question_of(
    model: str, context: int = 8192, batch: int = 1, new_tokens: int = 1, backend: str = "vllm"
) -> Question:
    return ask(model, "h200", context, batch=batch, new_tokens=new_tokens, backend=backend)


def server_of(question: Question, max_tokens: int = 32_768, name: str = "autoregressive") -> Server:
    return Replica(preset(name, question.workload), question, max_tokens).server()


@pytest.mark.parametrize("model", [LLAMA, MOE, MLA, WINDOWED])
@pytest.mark.parametrize(("batch", "context"), [(1, 2048), (8, 8192), (64, 2048), (200, 1024)])
def test_a_step_without_prompts_is_the_engine_s(model: str, batch: int, context: int) -> None:
    question = question_of(model, context, batch, 2)
    (predicted,) = predict_question([autoregressive(question.workload)], question)
    seconds = server_of(question).steps.decode_s(batch, batch * (context + 1))
    assert 1e3 * seconds == pytest.approx(predicted.best.tpot_ms, rel=0.03)


@pytest.mark.parametrize(("model", "context"), [(LLAMA, 128), (LLAMA, 8192), (MOE, 512), (WINDOWED, 8192)])
def test_a_prompt_in_one_step_is_the_engine_s(model: str, context: int) -> None:
    question = question_of(model, context)
    (predicted,) = predict_question([autoregressive(question.workload)], question)
    server = server_of(question)
    seconds = server.host_s + max(server.steps.mixed_s(0, 0, [(context, 0)]), server.launch_s)
    assert 1e3 * seconds == pytest.approx(predicted.best.ttft_request_ms, rel=1e-3)


def test_prompts_with_8_bit_weights_are_as_fast_as_predicted() -> None:
    question = question_of(LLAMA)
    plan = preset("int8-weights", question.workload)
    (predicted,) = predict_question([plan], question)
    servers = [server_of(question, name=name) for name in ("int8-weights", "autoregressive")]
    coded, full = (server.steps for server in servers)
    assert 1e3 * (servers[0].host_s + coded.mixed_s(0, 0, [(8192, 0)])) == pytest.approx(
        predicted.best.ttft_request_ms, rel=1e-3
    )
    assert coded.mixed_s(64, 64 * 4096, [(4096, 0)]) < 0.75 * full.mixed_s(64, 64 * 4096, [(4096, 0)])


def test_chunks_take_about_as_long_as_the_whole_prompt() -> None:
    steps = server_of(question_of(LLAMA)).steps
    whole = steps.mixed_s(0, 0, [(8192, 0)])
    chunks = sum(steps.mixed_s(0, 0, [(2048, 2048 * index)]) for index in range(4))
    assert whole < chunks < 1.15 * whole


@pytest.mark.parametrize(("name", "ratio"), [("autoregressive", MIXED_ATTENTION), ("int8", 1.0)])
def test_attention_beside_prompts_takes_longer_over_a_16_bit_cache_alone(name: str, ratio: float) -> None:
    steps = server_of(question_of(LLAMA), name=name).steps
    tokens, chunks = (32 * 2048, 32 * 4096), [(512, 0)]
    alone, beside = (np.diff([step_s(each) for each in tokens])[0] for step_s in (
        lambda held: steps.decode_s(32, held), lambda held: steps.mixed_s(32, held, chunks)))  # fmt: skip
    assert beside == pytest.approx(ratio * alone)


def test_a_mixed_step_takes_less_than_its_parts_and_more_than_either() -> None:
    steps = server_of(question_of(LLAMA)).steps
    for batch, size in ((8, 128), (32, 512), (128, 2048)):
        decode_s, prompt_s = steps.decode_s(batch, 1024 * batch), steps.mixed_s(0, 0, [(size, 1024)])
        mixed_s = steps.mixed_s(batch, 1024 * batch, [(size, 1024)])
        assert max(decode_s, prompt_s) < mixed_s < decode_s + prompt_s


def test_tables_rise_with_the_batch_and_with_tokens() -> None:
    steps = server_of(question_of(LLAMA)).steps
    by_context = [steps.decode_s(32, 32 * context) for context in (100, 1000, 5000, 20_000, 32_768)]
    by_prompt = [steps.mixed_s(8, 8192, [(size, 500)]) for size in (1, 64, 512, 2000, 8000)]
    assert (np.diff(by_context) > 0).all()
    assert (np.diff(by_prompt) > 0).all()


def test_the_runtime_s_rounds_and_prompts_are_its_predictions() -> None:
    question = question_of(LLAMA, 16_384, 8, 2, backend="ridgeplan")
    plan = preset("quantspec", question.workload)
    predicted = predict(plan, question.shape, question.profile)
    steps = server_of(question, name="quantspec").steps
    assert 1e3 * steps.decode_s(8, 8 * 16_385) == pytest.approx(predicted.round_ms, rel=0.03)
    assert 1e3 * steps.mixed_s(0, 0, [(16_384, 0)]) == pytest.approx(predicted.best.ttft_request_ms, rel=0.03)


@pytest.mark.parametrize("model", [LLAMA, MLA, WINDOWED])
@pytest.mark.parametrize("backend", ["vllm", "ridgeplan"])
def test_sequences_that_fill_the_cache_fill_the_memory(model: str, backend: str) -> None:
    context = 16_000
    question = question_of(model, context, new_tokens=1, backend=backend)
    server = Replica(autoregressive(question.workload), question, context).server()
    batch = int(server.kv_tokens / (context + server.sequence_tokens))
    resized = question_of(model, context, batch, backend=backend)
    peak_bytes = predict_question([autoregressive(resized.workload)], resized)[0].best.peak_memory_bytes
    assert peak_bytes == pytest.approx(question.memory_limit_bytes, rel=0.02)


def test_a_model_without_space_for_a_cache_and_a_plan_that_evicts_are_refused() -> None:
    tight = ask(LLAMA, "h200", 4096, backend="vllm", memory_limit="10GB")
    with pytest.raises(NothingFits, match=r"does not fit h200: .* of 10 GB without any KV cache"):
        server_of(tight)
    question = question_of(LLAMA, backend="ridgeplan")
    with pytest.raises(PlanError, match="snapkv evicts; allowed: plans that keep all tokens"):
        server_of(question, name="snapkv")


def test_the_scheduler_has_the_engine_s_limits() -> None:
    question = question_of(LLAMA)
    replica = Replica(autoregressive(question.workload), question, 8192)
    assert (replica.server().batched_tokens, replica.server().max_num_seqs) == (8192, 1024)
    small = replica.server(batched_tokens=512, max_num_seqs=600)
    assert (small.batched_tokens, small.max_num_seqs) == (512, 512)
    assert replace(small, steps=replica.server().steps) != replica.server()
