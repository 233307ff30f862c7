"""The script that serves simulated traffic: its client sends every request at its time, and its summary adds up."""

import json
import sys
import time
from pathlib import Path

import measure_traffic
import numpy as np
import pytest
from fake_engine import serving

from ridgeplan.planner.traffic.requests import Requests
from ridgeplan.validate.engine_steps import CompletionsServer, Stream


def requests_at(arrivals: list[float], outputs: list[int]) -> Requests:
    return Requests.of(np.array(arrivals), np.full(len(arrivals), 3), np.array(outputs))


def test_requests_are_sent_at_their_times() -> None:
    sent = []

    def send(prompt: list[int], tokens: int) -> Stream:
        sent.append((prompt[0], time.perf_counter()))
        now_s = time.perf_counter()
        return Stream((now_s + 0.1, now_s + 0.1 + 0.01 * (tokens - 1)), tokens, len(prompt))

    requests = requests_at([0.0, 0.3, 0.6], [1, 11, 21])
    served = measure_traffic.serve(requests, [[0], [1], [2]], send)
    assert [prompt for prompt, _ in sent] == [0, 1, 2]
    assert np.diff([moment for _, moment in sent]) == pytest.approx([0.3, 0.3], abs=0.15)
    figures = measure_traffic.summary(requests, served)
    assert figures["tpot_p50_ms"] == pytest.approx(10.0)
    assert figures["ttft_p50_ms"] >= 100.0
    assert figures["output_tokens_per_s"] * figures["tpot_p50_ms"] > 0
    assert figures["output_tokens_per_s"] / figures["requests_per_s"] == pytest.approx(11.0)


def test_a_server_s_streams_are_timed() -> None:
    with serving(lambda context, batch: 0.01) as fake:
        server = CompletionsServer.connect(fake.url, 1000)
        served = measure_traffic.serve(requests_at([0.0, 0.05], [10, 20]), [[5, 6, 7], [8, 9, 10]], server.stream)
    assert [tokens for _, _, tokens in served] == [10, 20]
    assert all(0.02 <= first_s < last_s for first_s, last_s, _ in served)


def test_the_predictions_are_saved_beside_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "traffic.json"
    monkeypatch.setattr(measure_traffic, "DISTRIBUTIONS", {"constant": ("16", "4")})
    for name, value in (
        ("DECODES", (1, 2)),
        ("PROMPTS", (64,)),
        ("CONTEXT", 16),
        ("NEW_TOKENS", 60),
        ("PAUSE_S", 0.02),
    ):
        monkeypatch.setattr(measure_traffic, name, value)
    with serving(lambda context, batch: 0.002) as fake:
        words = [
            "--output",
            str(path),
            "--url",
            fake.url,
            "--rates",
            "20/s",
            "--requests",
            "5",
            "--lengths",
            "constant",
        ]
        monkeypatch.setattr(sys, "argv", ["measure_traffic.py", *words])
        measure_traffic.main()
    document = json.loads(path.read_text(encoding="utf-8"))
    (row,), (knee,) = document["rows"], document["knees"]
    assert row["predicted"]["rate"] == 20.0
    for name, error in row["errors"].items():
        assert error == pytest.approx(row["predicted"][name] / row["measured"][name] - 1)
    assert knee["measured"]["requests_per_s"] > row["measured"]["requests_per_s"]
    for step in document["mixed"]:
        assert 0 < step["decode_ms"] < step["predicted_ms"]
        assert step["measured_ms"] == pytest.approx(2.0)
        assert step["error"] == pytest.approx(step["predicted_ms"] / step["measured_ms"] - 1)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [step.get("decodes") for step in printed] == [1, 2, None, None]
    assert printed[-1]["lengths"] == "constant"


def test_the_dummy_model_has_the_words_of_the_vocabulary(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    measure_traffic.write_dummy_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 128_256
    assert tokenizer.decode([7, 128_255]).split() == ["w7", "w128255"]
