"""Rows, engines and cases: what is read, refused, and how an engine changes a prediction."""

from dataclasses import fields, replace

import pytest

from ridgeplan.planner.engines.measurements import shipped_measurements
from ridgeplan.roofline.catalog.hardware import load_hardware
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.catalog.profile import profile_for, shipped_profiles
from ridgeplan.roofline.evaluate import pass_ops
from ridgeplan.roofline.latency import GIB, RateTerms
from ridgeplan.roofline.round import tokens_per_round
from ridgeplan.validate.papers.case import Case, fits, peak_bytes, sharded
from ridgeplan.validate.papers.comparison import compare
from ridgeplan.validate.papers.rows import (
    PAPERS,
    PublishedError,
    PublishedRow,
    UnknownEngine,
    load_engine,
    load_tables,
    read_paper,
)

LLAMA = "meta-llama/Llama-3.1-8B"
ROW = PublishedRow(case="a", method="b", model=LLAMA, gpu="h20", context=8192, new_tokens=128, cells={"step_ms": 1.0})
TABLE = """
[[table]]
name = "T"
title = "t"
shared = {model = "m", gpu = "h200"}
rows = [{case = "a", method = "b", context = 10, cells = {step_ms = 1.5}}]
"""


@pytest.mark.parametrize("paper", PAPERS)
def test_predictions_do_not_depend_on_published_figures(paper):
    """No constant is fitted to a row: with every printed number replaced, predictions are the same."""

    def replaced(row: PublishedRow) -> PublishedRow:
        return replace(row, cells={name: 1.0 for name, value in row.cells.items() if value != "OOM"})

    for table in load_tables(paper):
        others = replace(table, rows=tuple(replaced(row) for row in table.rows if "OOM" not in row.cells.values()))
        kept = replace(table, rows=tuple(row for row in table.rows if "OOM" not in row.cells.values()))
        predicted = [[cell.predicted for cell in compare(row_set).cells] for row_set in (others, kept)]
        assert predicted[0] == predicted[1]


def test_a_row_has_no_number_but_its_workload_its_plan_and_its_acceptance():
    numbers = {item.name for item in fields(PublishedRow) if item.type in ("int", "float")}
    workload = {"gpus", "context", "new_tokens", "batch", "baseline_batch", "baseline_context", "weight_bits"}
    assert numbers == workload | {"gamma", "ratio", "budget", "queries", "accepted_share"}


def test_shared_fields_are_in_every_row():
    (table,) = read_paper("dapq", TABLE)
    assert (table.paper, table.rows[0].model, table.rows[0].context) == ("dapq", "m", 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("context = 10", "context = -1"), "context is -1"),
        (("step_ms = 1.5", 'step_ms = "much"'), "'much'; allowed: a number, 'OOM' or '-'"),
        (("step_ms = 1.5", "step_ms = true"), "cells.step_ms is True"),
        (("case =", "cast ="), "cast is not a field"),
        (("[[table]]", "[table]"), "without a list of rows"),
        (("rows =", "row ="), "without a list of rows"),
        (("title", "title = ["), "dapq: "),
    ],
)
def test_damaged_papers_are_refused_in_one_line(change, message):
    with pytest.raises(PublishedError, match=r".") as refused:
        read_paper("dapq", TABLE.replace(*change))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_unknown_names_are_refused_with_what_is_allowed():
    with pytest.raises(PublishedError, match="unknown paper 'x'; allowed: quantspec"):
        load_tables("x")
    with pytest.raises(UnknownEngine, match="unknown engine 'x'; allowed: runtime"):
        load_engine("x")
    with pytest.raises(PublishedError, match="unknown metric 'ms'; allowed: step_ms"):
        compare(replace(load_tables("dapq")[0], rows=(replace(ROW, cells={"ms": 1.0}),)))


def test_the_published_share_of_accepted_tokens_becomes_conditional_acceptance():
    row = replace(ROW, preset="quantspec", gamma=4, accepted_share=0.9)
    strategy = Case.of(row).strategy
    assert (tokens_per_round(strategy.acceptance, 4) - 1) / 4 == pytest.approx(0.9)
    assert strategy.acceptance > 0.9  # later drafts count as drafted even where an earlier one was refused


def test_moving_kv_five_times_takes_five_times_as_long():
    """hf-flash: a concatenation and a gather move all KV twice each before attention reads it."""
    hardware, shape = load_hardware("h20"), load_shape(LLAMA)
    plain, moving = (
        load_engine(name).profile(hardware, shape).rates("attention").bandwidth_utilization
        for name in ("runtime", "hf-flash")
    )
    assert plain / moving == pytest.approx(5)
    # Eager: 3, and a write and a read for each of the 4 query heads of a KV head.
    assert load_engine("hf-eager").passes_of(shape) == 3 + 2 * 4


def test_kv_moves_as_often_for_many_rows():
    """Bytes take five times as long with any number of query rows, and everything else as long as before."""
    hardware, shape = load_hardware("h200"), load_shape(LLAMA)
    plain, moving = (
        RateTerms.of(load_engine(name).profile(hardware, shape).rates("attention")).at_rows(40)
        for name in ("runtime", "hf-flash")
    )
    assert plain.bandwidth_utilization / moving.bandwidth_utilization == pytest.approx(5)
    assert plain.launch_s == moving.launch_s


@pytest.mark.parametrize("name", ["gpt-fast", "vllm", "hf-flash"])
def test_engines_with_launches_of_their_own_have_no_gaps_of_this_packages_rounds(name):
    profile = load_engine(name).profile(load_hardware("h200"), load_shape(LLAMA))
    assert (profile.draft_gap_s, profile.target_gap_s, profile.round_s) == (0, 0, 0)
    assert profile.rates("gap").launch_s == 0


def test_libraries_kernels_reach_the_librarys_share_of_the_peak():
    """Not that of this package's kernels for few rows; and they have none of their steps."""
    hardware, shape = load_hardware("h200"), load_shape(LLAMA)
    runtime_profile, vllm = (load_engine(name).profile(hardware, shape) for name in ("runtime", "vllm"))
    for kind, library in (("linear", "prefill_linear"), ("attention", "prefill_attention")):
        assert vllm.rates(kind).compute_utilization == runtime_profile.rates(library).compute_utilization
        assert vllm.rates(kind).steps == ()


def test_an_engines_launch_time_is_all_that_a_launch_takes_beyond_bytes():
    """11.4 us in gpt-fast, for one row or 40, whatever the product's width and depth."""
    profile = load_engine("gpt-fast").profile(load_hardware("a6000"), load_shape(LLAMA))
    for kind in ("linear", "linear_int4", "head", "attention"):
        rates = RateTerms.of(profile.rates(kind)).at_rows(40)
        assert (rates.launch_s, rates.width_s, rates.depth_s) == (1.14e-5, 0, 0)


def test_vllm_takes_what_was_measured_of_it():
    """All seven steps of Llama-3.1-8B on an H200, from batch 1 at 1k to batch 4 at 128k."""
    sizes = ((1024, 1), (4096, 1), (32768, 1), (131072, 1), (32768, 8), (131072, 4), (4096, 16))
    formats = "meta-llama/Llama-3.1-8B", "auto", "auto"
    measured = [row for row in shipped_measurements().rows if (row.model, row.weights, row.kv) == formats]
    rows = [row for row in measured if (row.context, row.batch) in sizes]
    assert len(rows) >= 7
    for row in rows:
        case = Case.of(replace(ROW, gpu="h200", engine="vllm", context=row.context, batch=row.batch, new_tokens=1))
        assert 1e3 * case.tpot_s == pytest.approx(row.tpot_ms, rel=0.06), row


def test_gpt_fast_takes_what_its_readme_says():
    """Llama-2-7B in 16 bits after a prompt of 5 tokens: 104.9 tokens/s on an A100."""
    row = replace(ROW, model="meta-llama/Llama-2-7b-hf", gpu="a100-80gb", engine="gpt-fast", context=5, new_tokens=200)
    assert 1 / Case.of(row).tpot_s == pytest.approx(104.9, rel=0.06)


def test_hugging_face_is_bound_by_its_host_at_batch_1():
    """49.4 ms measured for 32 layers, on any GPU fast enough."""
    assert Case.of(replace(ROW, engine="hf-flash")).tpot_s == pytest.approx(49.4e-3, rel=0.05)


def test_eager_scores_of_a_long_prompt_do_not_fit():
    """32 heads x 16384^2 scores of 8 bytes are 64 GiB beside 15 GiB of weights."""
    eager = replace(ROW, gpu="a800-80gb", engine="hf-eager", context=16384)
    assert not fits(Case.of(eager))
    assert fits(Case.of(replace(eager, engine="hf-flash")))
    scores = peak_bytes(Case.of(eager)) - peak_bytes(Case.of(replace(eager, engine="hf-flash")))
    assert scores == 64 * GIB


def test_a_draft_cache_of_a_quarter_of_the_tokens_adds_a_quarter():
    """128 KiB a token: 8320 tokens are 1.016 GiB."""
    row = replace(ROW, preset="magicdec-streaming", gamma=1)
    with_copy, without = (peak_bytes(Case.of(replace(row, engine=name))) for name in ("magicdec", "gpt-fast"))
    assert with_copy - without == pytest.approx(0.25 * 8320 * 128 * 1024)


def test_selected_values_come_over_the_host_link():
    """2048 tokens x 8 sequences x 64 KiB of values are 1 GiB; PCIe 4 carries it at the profile's share of its rate."""
    row = replace(ROW, gpu="a800-80gb", preset="shadowkv", engine="shadowkv", batch=8, offload=True)
    share = profile_for(load_hardware("a800-80gb"), shipped_profiles()).host_link_utilization
    assert Case.of(row).fetch_s == pytest.approx(GIB / (32e9 * share), rel=0.01)
    assert Case.of(replace(row, context=2000)).fetch_s == 0  # all of the prompt is within the budget


def test_two_gpus_halve_layers_but_not_embeddings():
    shape = load_shape("meta-llama/Llama-2-7b-hf")
    half = sharded(shape, 2)
    assert half.embedding_params == shape.embedding_params
    assert half.mixer_params == shape.mixer_params / 2
    row = replace(ROW, model=shape.name, gpu="a6000")
    first, two = Case.of(row), Case.of(replace(row, gpus=2))
    replicated = 2 * shape.embedding_params * 2
    assert peak_bytes(two) > peak_bytes(first) + 0.9 * replicated
    assert first.tpot_s / 2 < two.tpot_s < 0.65 * first.tpot_s


def test_full_rates_bound_every_engine():
    for engine in ("runtime", "vllm", "gpt-fast", "hf-eager"):
        case = Case.of(replace(ROW, engine=engine))
        assert case.at_full_rates().tpot_s < case.tpot_s


@pytest.mark.parametrize("engine", ["runtime", "hf-eager"])
def test_full_rates_are_bytes_over_bandwidth(engine):
    """No launches, gaps or steps, and KV moves once: a step at batch 1 on an H200 takes as long as its bytes."""
    ideal = Case.of(replace(ROW, gpu="h200", engine=engine)).at_full_rates()
    passes = pass_ops(ideal.shape, ideal.machine, ideal.strategy)["target"]
    assert 1e12 * ideal.estimate.round.verify_s == pytest.approx(1e12 * sum(op.total.bytes for op in passes) / 4.8e12)
