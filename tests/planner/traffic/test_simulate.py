"""Continuous batching: against a scheduler that runs every step, against queueing theory, and what is conserved."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ridgeplan.planner.traffic.requests import Requests, generate_requests, parse_lengths
from ridgeplan.planner.traffic.simulate import Chunk, Served, Server, simulate


@dataclass(frozen=True)
class LinearSteps:
    """Step times that are linear in sequences, held tokens and prompt tokens."""

    step_s: float = 0.01
    sequence_s: float = 1e-4
    token_s: float = 1e-7
    prompt_token_s: float = 1e-5

    def decode_s(self, batch: int, tokens: float) -> float:
        return self.step_s + self.sequence_s * batch + self.token_s * tokens if batch else 0.0

    def mixed_s(self, batch: int, tokens: float, chunks: Sequence[Chunk]) -> float:
        prompts_s = sum(self.prompt_token_s * size * (1 + before / 1000) for size, before in chunks)
        return self.step_s + self.sequence_s * batch + self.token_s * tokens + prompts_s


def serve_step_by_step(requests: Requests, server: Server) -> tuple[list[float], list[float], int]:
    """The same scheduler without skipping a step, and with every sequence's tokens counted for itself."""
    waiting, now_s, preemptions, scheduled_s = list(range(len(requests))), 0.0, 0, 0.0
    first_s, finish_s = [np.nan] * len(requests), [np.nan] * len(requests)
    emitted = [0] * len(requests)
    running: list[dict[str, int]] = []  # in the order of admission: index, done, target, held

    def kv() -> float:
        return sum(each["held"] + server.sequence_tokens for each in running)

    def decoding() -> list[dict[str, int]]:
        return [each for each in running if each["done"] == each["target"]]

    while waiting or running:
        preempted = False
        while decoding() and kv() + len(decoding()) > server.kv_tokens:
            waiting.insert(0, running.pop()["index"])
            preemptions, preempted = preemptions + 1, True
        decodes, chunks = decoding(), []
        if not (server.ahead and running):
            scheduled_s = now_s
        budget = 0 if preempted else server.batched_tokens - len(decodes)
        for each in running:
            if each["done"] < each["target"] and budget > 0:
                chunks.append((each, min(each["target"] - each["done"], budget)))
                budget -= chunks[-1][1]
        while budget > 0 and waiting and len(running) < server.max_num_seqs:
            index = waiting[0]
            target = int(requests.prompt_tokens[index]) + emitted[index]
            arrived = requests.arrival_s[index] <= scheduled_s
            if not arrived or target + server.sequence_tokens > server.kv_tokens - kv() - len(decodes):
                break
            each = {"index": waiting.pop(0), "done": 0, "target": target, "held": target}
            running.append(each)
            chunks.append((each, min(target, budget)))
            budget -= chunks[-1][1]
        if not running:
            now_s = max(now_s, float(requests.arrival_s[waiting[0]]))
            continue
        if not decodes and not chunks:
            continue
        held = sum(each["held"] for each in decodes)
        sizes = [(size, each["done"]) for each, size in chunks]
        steps, scheduled_s = server.steps, now_s
        now_s += steps.mixed_s(len(decodes), held, sizes) if sizes else steps.decode_s(len(decodes), held)
        for each, size in chunks:
            each["done"] += size
        for each in decodes:
            each["done"] += 1
            each["target"] += 1
            each["held"] += 1
        for each in [*decodes, *(each for each, _ in chunks if each["done"] == each["target"])]:
            index = each["index"]
            first_s[index] = first_s[index] if emitted[index] else now_s
            emitted[index] += 1
            if emitted[index] == requests.output_tokens[index]:
                finish_s[index] = now_s
                running.remove(each)
    return first_s, finish_s, preemptions


def poisson(rate: float, count: int, isl: str = "lognormal:400", osl: str = "lognormal:60", seed: int = 0) -> Requests:
    lengths = parse_lengths(isl), parse_lengths(osl)
    return generate_requests(rate, count, *lengths, 4000, 1.0, np.random.default_rng(seed))


SERVER = Server(LinearSteps(), kv_tokens=1e6, sequence_tokens=7.5, batched_tokens=512, max_num_seqs=64)


@pytest.mark.parametrize(
    ("rate", "server"),
    [
        (5.0, SERVER),
        (40.0, SERVER),
        (5.0, replace(SERVER, ahead=True)),
        (40.0, replace(SERVER, ahead=True)),
        (40.0, replace(SERVER, max_num_seqs=3)),
        (40.0, replace(SERVER, batched_tokens=64, max_num_seqs=64)),
        (40.0, replace(SERVER, kv_tokens=6000.0)),
        (40.0, replace(SERVER, kv_tokens=6000.0, ahead=True)),
        (100.0, replace(SERVER, kv_tokens=4600.0, sequence_tokens=0.0)),
    ],
)
def test_times_are_those_of_a_scheduler_that_runs_every_step(rate: float, server: Server) -> None:
    requests = poisson(rate, 300)
    first_s, finish_s, preemptions = serve_step_by_step(requests, server)
    served = simulate(requests, server)
    assert served.first_s == pytest.approx(first_s, rel=1e-9)
    assert served.finish_s == pytest.approx(finish_s, rel=1e-9)
    assert served.preemptions == preemptions
    assert preemptions > 0 or server.kv_tokens == 1e6


def mean_wait_s(requests: Requests, served: Served, service_s: float) -> float:
    return float((served.finish_s - requests.arrival_s).mean()) - service_s


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_prompts_with_one_token_each_are_a_queue_with_poisson_arrivals_and_constant_service(load: float) -> None:
    """M/D/1: the mean wait is load x service / (2 (1 - load)) (Pollaczek and Khinchine)."""
    service_s = 0.02
    server = replace(SERVER, steps=LinearSteps(service_s, 0.0, 0.0, 0.0), batched_tokens=100)
    requests = poisson(load / service_s, 200_000, "100", "1")
    served = simulate(requests, server)
    expected = load * service_s / (2 * (1 - load))
    assert mean_wait_s(requests, served, service_s) == pytest.approx(expected, rel=0.05)
    assert (served.prompt_s + served.decode_s) / served.end_s == pytest.approx(load, rel=0.02)


@pytest.mark.parametrize("kv_tokens", [1e6, 6000.0])
def test_tokens_and_memory_are_conserved_and_nobody_starves(kv_tokens: float) -> None:
    requests, server = poisson(60.0, 2000), replace(SERVER, kv_tokens=kv_tokens)
    served = simulate(requests, server)
    assert served.emitted_tokens == requests.output_tokens.sum()
    assert served.kv_left_tokens == 0
    assert served.kv_peak_tokens <= kv_tokens
    assert np.isfinite(served.finish_s).all()
    assert (served.first_s > requests.arrival_s).all()
    assert (served.finish_s >= served.first_s).all()
    assert (np.diff(served.first_s) >= 0).all(), "first come, first served"
    computed = served.prompt_tokens - requests.prompt_tokens.sum()
    assert (computed > 0) == (served.preemptions > 0) == (kv_tokens < 1e6)
    if not served.preemptions:
        assert served.decoded_rounds == (requests.output_tokens - 1).sum()
    assert served.prompt_s + served.decode_s <= served.end_s * (1 + 1e-9)


def test_equal_requests_have_equal_results() -> None:
    first, again = (simulate(poisson(40.0, 500), SERVER) for _ in range(2))
    assert (first.finish_s == again.finish_s).all()
    assert first.kv_token_s == again.kv_token_s


def test_more_load_takes_longer() -> None:
    waits, totals = [], []
    for rate in (2.0, 10.0, 30.0, 60.0, 120.0):
        requests = poisson(rate, 2000)
        served = simulate(requests, SERVER)
        waits.append(np.percentile(served.first_s - requests.arrival_s, (50, 99)))
        totals.append(np.mean(served.finish_s - served.first_s))
    assert (np.diff(waits, axis=0) > 0).all()
    assert (np.diff(totals) > 0).all()


def test_a_cached_prefix_is_not_computed() -> None:
    requests = poisson(20.0, 500).with_prefix_share(0.5, 16)
    plain, cached = simulate(poisson(20.0, 500), SERVER), simulate(requests, SERVER)
    assert plain.prompt_tokens - cached.prompt_tokens == requests.cached_tokens.sum() == cached.cached_tokens
    assert cached.cached_tokens == pytest.approx(0.5 * requests.prompt_tokens.sum(), rel=0.05)
    assert cached.first_s.mean() < plain.first_s.mean()
    assert (requests.cached_tokens % 16 == 0).all()
    assert (poisson(1, 50).with_prefix_share(1.0, 16).cached_tokens < poisson(1, 50).prompt_tokens).all()


def hashed(arrivals: Sequence[float], ids: Sequence[Sequence[int]], block_tokens: int = 100) -> Requests:
    prompts = np.array([block_tokens * len(each) + 50 for each in ids])
    requests = Requests.of(np.array(arrivals), prompts, np.full(len(ids), 20))
    return replace(requests, hash_ids=ids, hash_tokens=block_tokens)


def test_blocks_that_a_trace_names_twice_are_computed_and_held_once() -> None:
    together = hashed((0.0, 0.0, 0.0), [[1, 2, 3], [1, 2, 4], [5, 2, 3]])
    served = simulate(together, replace(SERVER, batched_tokens=4096, sequence_tokens=0.0))
    assert served.cached_tokens == 200, "only the second's first blocks are a prefix of an earlier one"
    assert served.kv_peak_tokens == 500 + 3 * 50 + 3 * 19
    assert served.kv_left_tokens == 0
    apart = simulate(hashed((0.0, 100.0), [[1, 2, 3], [1, 2, 3]]), SERVER)
    assert apart.cached_tokens == 300
    assert apart.prompt_tokens == 350 + 50


def test_idle_blocks_leave_when_the_space_is_needed() -> None:
    requests = hashed((0.0, 100.0, 200.0), [[1, 2, 3], [4, 5, 6], [1, 2, 3]])
    roomy, tight = (simulate(requests, replace(SERVER, kv_tokens=size)) for size in (1000.0, 450.0))
    assert (roomy.cached_tokens, tight.cached_tokens) == (300, 0)


def test_speculation_takes_as_many_rounds_as_are_drawn() -> None:
    requests = poisson(10.0, 400).with_drafts(3, 0.7, np.random.default_rng(1))
    served = simulate(requests, replace(SERVER, decode_queries=4))
    assert served.decoded_rounds == requests.rounds.sum()
    assert served.emitted_tokens == requests.output_tokens.sum()
    assert served.kv_left_tokens == 0
    assert served.finish_s.mean() < simulate(poisson(10.0, 400), SERVER).finish_s.mean()
    tight = simulate(requests, replace(SERVER, decode_queries=4, kv_tokens=5000.0))
    assert tight.preemptions > 0
    assert tight.emitted_tokens == requests.output_tokens.sum()
    assert tight.kv_left_tokens == 0


def test_requests_longer_than_the_cache_do_not_fit() -> None:
    requests = Requests.of(np.zeros(2), np.array([900, 990]), np.array([50, 50]))
    assert list(replace(SERVER, kv_tokens=1000.0).fits(requests)) == [True, False]
