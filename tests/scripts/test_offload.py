"""The benchmark of offloading runs on a CPU at small sizes; its plans are executable."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from offload_bench import OffloadBench, RealText, limited_plans, selecting_plans, streaming_seconds
from results_file import ResultsFile

from ridgeplan.planner.prediction import predict
from ridgeplan.planner.resolution import resolve
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.latency import Device, Machine
from ridgeplan.roofline.plan.plan import KVFormat
from ridgeplan.roofline.plan.support import missing_execution
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.validate.calibration.link import LinkTimes, measured_link, random_loads
from ridgeplan.validate.random_model import fill, llama_like_shape

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[2] / "validate" / "results"
SHAPE = llama_like_shape(layers=6, hidden=64, intermediate=96, q_heads=4, kv_heads=2, head_dim=32)


def test_the_plans_run():
    plans = limited_plans("Llama-3.1-8B") | selecting_plans("Llama-3.1-8B")
    assert not any(missing_execution(plan) for plan in plans.values())
    assert all(plan.placement.memory_bytes == 40e9 for plan in plans.values())


def test_the_shipped_profile_predicts_what_was_measured():
    """Within 8%: rounds with streams of whole layers, and steps that load what they choose, elastic or not."""
    shape, shipped = resolve("Llama-3.1-8B", "h200")
    measured = json.loads((RESULTS / "offload_h200.json").read_text())
    streamed, selecting = limited_plans(shape.name), selecting_plans(shape.name)
    for row in measured["rounds"]:
        prediction = predict(streamed[row["row"]], shape, shipped)
        assert prediction.offloaded_layers == row["host_layers"]
        assert prediction.round_ms == pytest.approx(row["round_ms"], rel=0.08), row["row"]
    for row in measured["elastic"]:
        for overlap in (0.9, 0.8, 0.0):
            at_overlap = row.get(f"overlap {overlap:g}")
            if at_overlap is not None:
                prediction = predict(selecting[row["row"]], shape, shipped, overlap=overlap)
                assert prediction.best.tpot_ms == pytest.approx(at_overlap["tpot_ms"], rel=0.08), (row["row"], overlap)


def test_rows_are_saved_one_by_one_and_not_measured_again(tmp_path):
    path, calls = tmp_path / "results.json", []

    def row(name):
        calls.append(name)
        if name == "broken":
            raise ValueError
        return {"value": len(calls)}

    rows = {name: partial(row, name) for name in ("first", "second", "broken", "last")}
    with pytest.raises(ValueError):
        ResultsFile.at(path).measure("some", rows)
    del rows["broken"]
    ResultsFile.at(path).measure("some", rows, ["last"])
    ResultsFile.at(path).measure("some", rows)
    assert calls == ["first", "second", "broken", "last"]
    saved = json.loads(path.read_text())["some"]
    assert [(plan["row"], plan["value"]) for plan in saved] == [("first", 1), ("second", 2), ("last", 4)]


def test_the_link_is_measured_by_every_kind_of_transfer():
    links = measured_link(CPU, size=1 << 20, spread=1 << 21)
    moved = {kind: times.moved for kind, times in links.items()}
    sixteen = 16 * 8 * 512  # tokens of 8 heads, the least that is gathered
    full = {"host_copy": 1 << 20, "host_store": 1 << 20}
    assert moved == {**full, "host_gather": sixteen, "host_gather_pages": sixteen}
    assert all(times.bytes_per_s > 0 and times.empty_s > 0 for times in links.values())
    # Of 64 tokens, four pages of memory, every head reads 16.
    assert {kind: times.pages for kind, times in links.items() if times.pages} == {"host_gather": 4}


def test_rates_are_shares_of_the_link_beyond_the_launch():
    """A megabyte in 21 us, of which 1 us moves nothing: 50 GB/s of a link of 55."""
    rates = LinkTimes(10**6, (21e-6,) * 5, 1e-6).rates(55e9)
    assert rates.bandwidth_utilization == pytest.approx(50 / 55)
    assert (rates.launch_s, rates.spread) == (1e-6, 0.0)


def test_a_page_that_is_gathered_from_counts_as_a_piece():
    """Half of the pieces of 512 bytes are alone in their page: each takes as long as two."""
    times = LinkTimes(10**6, (21e-6,) * 5, 1e-6)
    paged = replace(times, pages=10**6 // 512 // 2).rates(55e9)
    assert paged.bandwidth_utilization == pytest.approx(times.rates(55e9).bandwidth_utilization / 2, rel=1e-3)


def test_loads_count_a_quarter_of_the_tokens():
    """256 tokens: 64 single ones of 8 heads, keys and values of 256 bytes; or 4 pages of 16."""
    for page, units in ((1, 64), (16, 4)):
        loads = random_loads(256, 64, page, CPU)
        assert loads.count.tolist() == [[units] * 8]
        assert loads.units.shape == (1, 8, units)
        assert all((units.diff() > 0).all() for units in loads.units[0])


@pytest.mark.parametrize("kv", [KVFormat.INT8, KVFormat.FULL])
def test_a_stream_moves_what_rows_hold(kv):
    """Two layers of two rows of 160 tokens: 4 groups of 32 in each of 2 heads; recent ones are on the device.

    In fp32 a key and a value of 32 channels; or their codes, 4 bytes of a group's scales, and the value's own.
    """
    config = KVCacheConfig(2, 320, kv, 32, host_layers=2, offload=True)
    cache = Cache(SHAPE, config, CPU, torch.float32)
    fill(cache, 160)
    seconds, moved = streaming_seconds(cache)
    token_bytes = 2 * 32 * 4 if kv is KVFormat.FULL else 2 * 32 + 4 + 4
    assert seconds > 0
    assert moved == 2 * 2 * 2 * 4 * 32 * token_bytes


@pytest.mark.slow
def test_a_crossing_is_counted_in_steps(h200_profile):
    hardware = replace(h200_profile.hardware, element_bytes=4, num_sms=1)
    profile = replace(h200_profile, hardware=hardware, asynchronous=False)
    bench = OffloadBench(SHAPE, profile, CPU, None, None)
    assert Machine.of(profile).asynchronous == 0
    row = bench.crossing(context=512, new_tokens=768)
    assert row["moved"] == len(row["crossings"]) > 0
    assert row["median_step_ms"] > 0


def test_a_small_model_generates_the_same_with_half_of_its_layers_on_the_host(tiny_folder, tmp_path):
    import transformers

    folder = str(shutil.copytree(tiny_folder, tmp_path / "model"))
    config = transformers.LlamaConfig.from_pretrained(folder, num_hidden_layers=6)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    shape = load_shape(folder)
    device = Device(memory_bytes=10**12, element_bytes=4, num_sms=torch.get_num_threads(), asynchronous=0)
    text = "The quick brown fox jumps over the lazy dog. " * 200
    real = RealText(folder, shape, text, device, context=700, batch=2, new_tokens=20)
    for name, make in real.rows().items():
        row = make()
        assert row["equal"], name
        assert row["agreeing_tokens"] == [20, 20]
        minimum = 1 if "one by one" in name else shape.layers // 2  # later ones leave as rows grow
        assert row["limited"]["layers_on_host"] >= minimum > row["unlimited"]["layers_on_host"] == 0, name
