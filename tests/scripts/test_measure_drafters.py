"""The script that times drafters, at tiny sizes: what it saves, that it continues, and that greedy texts are equal."""

import json
from pathlib import Path
from typing import Any

import measure_drafters
import pytest

from ridgeplan.roofline.plan.plan import Plan
from ridgeplan.runtime import WorkloadError
from ridgeplan.runtime.speculation.train_head import HeadTraining, train_head

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 96,
    "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
TEXT = "def area(width, height):\n    return width * height\n\n"


@pytest.fixture
def head(tiny_folder: Path, tmp_path: Path) -> Path:
    training = HeadTraining(steps=3, tokens=48, warmup=1, draft_vocab=200, unroll=2, own_tokens=0)
    ids = list(TEXT.encode()) * 4
    train_head(str(tiny_folder), lambda source: ids, training, lambda *_: None, "cpu").checkpoint.save(
        tmp_path / "head"
    )
    return tmp_path / "head"


def test_every_plan_of_a_cell_is_measured_once_with_few_prefills(
    tiny_folder: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "code.txt").write_text(TEXT * 40)
    prefilled, texts = [], []
    engine, measure = measure_drafters.Engine, measure_drafters.measure
    prefill = engine._prefill

    def counted(self: Any, request: Any, into: Any) -> Any:
        prefilled.append(len(into))
        return prefill(self, request, into)

    def kept(*arguments: Any, **options: Any) -> Any:
        texts.append(measure(*arguments, **options))
        return texts[-1]

    new_engine = measure_drafters.Bench._new_engine

    def beside_three(self: Any, plan: Plan, prompts: list[list[int]]) -> Any:
        if len(self.engines) == 4:
            raise WorkloadError("out of memory")
        return new_engine(self, plan, prompts)

    monkeypatch.setattr(measure_drafters.Bench, "_new_engine", beside_three)
    monkeypatch.setattr(engine, "_prefill", counted)
    monkeypatch.setattr(measure_drafters, "measure", kept)
    output = tmp_path / "drafters.json"
    command = [str(output), "--shape", str(tmp_path), "--model", str(tiny_folder), "--drafter-head", str(head)]
    command += ["--code", str(tmp_path / "code.txt"), "--workloads", "96x2", "--random", "64x1"]
    command += ["--new-tokens", "12", "--temperature", "0"]
    measure_drafters.main(command)
    rows = json.loads(output.read_text())
    names = {row["row"] for row in rows["code 96x2"]}
    assert names >= {"none", "suffix", "suffix cascade", "head", "suffix, adaptive cascade", "head cascade"}
    assert rows["recommended, code 96x2"] in names and [row["row"] for row in rows["random 64x1"]] == [
        "plain",
        "adaptive",
    ]
    assert prefilled == [4, len(names) - 4, 2] and not any("error" in row for row in rows["code 96x2"])
    for row in rows["code 96x2"]:
        drafter = row["given"]["speculation"]["drafter"]
        hits = row["measured"]["proposal_rounds"], row["measured"]["sequence_rounds"]
        if drafter["kind"] == "head":
            assert hits[0] == hits[1]  # it proposes before every round
        else:  # the text repeats itself, so that its suffixes do
            assert (0 < hits[0] <= hits[1]) if drafter["kind"] == "suffix" else hits[0] == 0
        assert "tpot" in {each["name"] for each in row["comparison"]} and row["measured"]["tpot_ms"] > 0
    exact = [each.tokens for each, row in zip(texts, rows["code 96x2"], strict=False)
             if row["given"]["kv"]["format"] == "int8"]  # fmt: skip
    assert len(exact) >= 2 and len(set(exact)) == 1  # of the same cache, by suffix and by a head
    before = output.stat().st_mtime_ns
    measure_drafters.main(command)  # continues, and finds nothing to do
    assert len(prefilled) == 3 and json.loads(output.read_text())["code 96x2"] == rows["code 96x2"]
    assert output.stat().st_mtime_ns > before
