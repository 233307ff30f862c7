"""The script that serves simulated traffic on vLLM, with an engine whose steps take the simulation's times."""

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import fake_vllm
import measure_traffic
import measure_vllm
import numpy as np
import pytest
from measure_traffic import Client, StepLog

from ridgeplan.planner.traffic.requests import Requests
from ridgeplan.planner.traffic.simulate import Chunk

RESULTS = Path(__file__).parents[2] / "validate" / "results"


class EvenSteps:
    """10 ms, 1 ms for each decoding sequence and 0.1 ms for each token of a prompt."""

    def decode_s(self, batch: int, tokens: float) -> float:
        return 0.01 + 1e-3 * batch

    def mixed_s(self, batch: int, tokens: float, chunks: Sequence[Chunk]) -> float:
        return self.decode_s(batch, tokens) + 1e-4 * sum(size for size, _ in chunks)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> fake_vllm.Clock:
    clock = fake_vllm.Clock()
    monkeypatch.setattr(measure_traffic, "time", clock)
    return clock


def start(
    monkeypatch: pytest.MonkeyPatch, clock: fake_vllm.Clock, steps: measure_traffic.StepTimes, *host: float
) -> None:
    for name, module in fake_vllm.fake_vllm(clock, steps, *host).items():
        monkeypatch.setitem(sys.modules, name, module)


def test_steps_are_logged_with_what_they_processed(monkeypatch: pytest.MonkeyPatch, clock: fake_vllm.Clock) -> None:
    start(monkeypatch, clock, EvenSteps())
    engine = fake_vllm.Engine(fake_vllm.Scheduler(clock, EvenSteps(), budget=100, max_num_seqs=8))
    log, client = StepLog(engine.scheduler), Client(engine, itertools.count())
    client.finish([client.add([0] * 130, 3), client.add([0] * 40, 1)])
    clock.sleep(5.0)
    client.finish([client.add([0] * 10, 1)])
    steps = [(step.decodes, step.tokens, step.chunks) for step in log.steps]
    assert steps == [
        (0, 0, ((100, 0),)), (0, 0, ((30, 100), (40, 0))), (1, 130, ()), (1, 131, ()), (0, 0, ((10, 0),)),
    ]  # fmt: skip
    assert [step.seconds for step in log.steps] == pytest.approx([0.02, 0.017, 0.011, 0.011, 0.011])


def test_requests_are_sent_at_their_times_and_wait_for_the_step_that_is_scheduled(
    monkeypatch: pytest.MonkeyPatch, clock: fake_vllm.Clock
) -> None:
    start(monkeypatch, clock, EvenSteps())
    engine = fake_vllm.Engine(fake_vllm.Scheduler(clock, EvenSteps(), budget=1000, max_num_seqs=8))
    requests = Requests.of(np.array([0.0, 0.032, 9.0]), np.array([100, 10, 10]), np.array([4, 1, 1]))
    prompts = [[0] * size for size in requests.prompt_tokens]
    client = Client(engine, itertools.count())
    served = client.serve(requests, prompts, until_s=1000.0)
    assert served is not None
    # The steps of the first end at 20, 31, 42 and 53 ms. At 32 ms, the step that ends at 53 ms is scheduled.
    assert np.array(served) == pytest.approx(
        np.array([(0.02, 0.053, 4), (0.032, 0.032, 1), (0.011, 0.011, 1)]), abs=1e-5
    )
    figures = measure_traffic.summary(requests, served)
    assert figures["tpot_p50_ms"] == pytest.approx(11.0, abs=1e-3)
    assert figures["ttft_p50_ms"] == pytest.approx(20.0, abs=1e-3)
    assert figures["output_tokens_per_s"] == pytest.approx(6 / 9.011, rel=1e-3)
    assert client.serve(requests, prompts, until_s=clock.now_s + 0.04) is None
    assert not engine.has_unfinished_requests()


def test_an_engine_with_the_predicted_times_is_served_as_predicted(
    monkeypatch: pytest.MonkeyPatch, clock: fake_vllm.Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = measure_traffic.predicted_server("h200")
    start(monkeypatch, clock, server.steps, server.host_s, server.launch_s)
    path = tmp_path / "traffic.json"
    monkeypatch.setattr(sys, "argv", ["measure_traffic.py", "--output", str(path), "--only", "mixed", "uniform"])
    measure_traffic.main()
    document = json.loads(path.read_text(encoding="utf-8"))
    for row in document["rows"]:
        assert max(map(abs, row["errors"].values())) < 1e-3, row
    (knee,) = document["knees"]
    assert max(map(abs, knee["errors"].values())) < 0.01
    assert knee["measured"]["requests_per_s"] > max(row["measured"]["requests_per_s"] for row in document["rows"])
    assert all(step["error"] == pytest.approx(0.0, abs=1e-4) for step in document["mixed"])
    combinations = {(step["decodes"], tuple(map(tuple, step["chunks"]))) for step in document["mixed"]}
    assert combinations >= {(64, ((8000, 0),)), (16, ((1024, 0),) * 4), (1, ((512, 0),)), (0, ((7808, 8192),))}
    assert sum(size for _, _, chunks, _ in document["steps"] for size, _ in chunks) > 1000 * 300
    assert {row["decodes"] for row in document["decode_steps"]} > {1, 8, 32}
    assert document["engine"]["async_scheduling"] and document["vllm"] == "0.24.0"
    assert "s left" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_marked(
    monkeypatch: pytest.MonkeyPatch, clock: fake_vllm.Clock, tmp_path: Path
) -> None:
    server = measure_traffic.predicted_server("h200")
    start(monkeypatch, clock, server.steps, server.host_s, server.launch_s)
    path = tmp_path / "traffic.json"
    words = ["measure_traffic.py", "--output", str(path), "--only", "uniform", "--seconds", "118"]
    monkeypatch.setattr(sys, "argv", words)
    measure_traffic.main()
    document = json.loads(path.read_text(encoding="utf-8"))
    assert [bool(row.get("unfinished")) for row in document["rows"]] == [False, True, True]
    assert all(("measured" in row) != ("unfinished" in row) for row in (*document["rows"], *document["knees"]))


def test_a_dummy_tokenizer_has_the_words_of_the_vocabulary(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text(json.dumps(measure_vllm.LLAMA_8B), encoding="utf-8")
    measure_vllm.write_tokenizer(tmp_path, 128_256)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 128_256
    assert tokenizer.decode([7, 128_255]).split() == ["w7", "w128255"]


@pytest.mark.parametrize("name", ["traffic_h200", "traffic_check_h200"])
def test_traffic_that_an_h200_served_is_predicted(name: str) -> None:
    """Within the targets of docs/traffic.md, which a quarter of the medians miss."""
    document = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    measured = {(row["lengths"], row["rate"]): row.get("measured") for row in document["rows"] + document["knees"]}
    arrivals = measure_traffic.Arrivals(**document.get("arrivals", {}))
    medians = []
    for row in measure_traffic.predicted_rows("h200", list(measure_traffic.LOADS), arrivals):
        served = measured[row["lengths"], row["rate"]]
        if served is None:
            continue
        errors = {key: abs(row["predicted"][key] / value - 1) for key, value in served.items()}
        if row["rate"] == measure_traffic.ALL_AT_ONCE:
            assert errors["output_tokens_per_s"] < 0.1
            continue
        assert errors["output_tokens_per_s"] < 0.05 and max(errors["ttft_p99_ms"], errors["tpot_p99_ms"]) < 0.2
        medians += [errors["ttft_p50_ms"], errors["tpot_p50_ms"]]
    assert len(medians) == 12 and sum(error > 0.08 for error in medians) <= 3 and max(medians) < 0.2
