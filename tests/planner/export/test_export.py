"""Exported commands: every one is taken by the engine's parser, and says what of the plan it carries."""

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_plans import degrees, plans

from ridgeplan.planner import PlanError, recommend, resolve
from ridgeplan.planner.engines.formats import DTYPES
from ridgeplan.planner.export import ENGINES, ServeCommandOptions, engine_named, export, schema_for, versions
from ridgeplan.planner.export.carry import rounds_of, served
from ridgeplan.planner.export.drafts import DraftModel, ranges
from ridgeplan.planner.export.export import Command
from ridgeplan.planner.export.options import Served
from ridgeplan.roofline.catalog.models import list_models, load_shape
from ridgeplan.roofline.catalog.parallel import Parallel
from ridgeplan.roofline.engine import EAGLE3_PASS_MS, activation_bytes
from ridgeplan.roofline.plan.plan import Drafter, DrafterKind, Eviction, Placement, Plan, Speculation, Weights, Workload
from ridgeplan.roofline.plan.presets import autoregressive
from ridgeplan.roofline.round import tokens_per_round

MODELS = [shape.name for shape in list_models()]
WORKLOADS = st.builds(
    Workload,
    st.sampled_from(MODELS),
    st.sampled_from(["h200", "a100", "l40s", "b200", "rtx4090"]),
    st.integers(1, 4096),
    new_tokens=st.integers(1, 512),
    batch=st.integers(1, 32),
    yarn_factor=st.sampled_from([1.0, 2.5]),
)


@st.composite
def requests(draw: Any) -> ServeCommandOptions:
    """A random plan for a catalog model on as many GPUs as hold it, any engine and version."""
    plan: Plan = draw(plans(WORKLOADS, degrees(1, 2, 8)))
    shape, profile = resolve(plan.workload.model, plan.workload.hardware)
    name = draw(st.sampled_from([*ENGINES]))
    schema = schema_for(name, draw(st.sampled_from(versions(name))))
    host_cache = {"host_cache_gib": draw(st.sampled_from([0, 64])), "host_cache_backend": "native"}
    named = ["meta-llama/Llama-3.2-1B", "someone/unknown"] if plan.speculation.active else []
    draft = draw(st.sampled_from([None, *named]))
    known = load_shape(draft) if draft in MODELS else None
    assume(known is None or known.vocab == shape.vocab)
    return ServeCommandOptions(
        plan, shape, profile, engine_named(name), schema, shape.name, draft_model=draft, draft_shape=known, **host_cache
    )


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(requests())
def test_no_parser_rejects_an_exported_plan(request: ServeCommandOptions) -> None:
    """60 plans: as words and as the YAML that vLLM turns into words (str of every value, none of a flag's)."""
    try:
        command = export(request).command
    except PlanError as error:
        assume("GiB" not in str(error))  # too large for the machine
        assume("do not divide" not in str(error))
        raise
    options, engine, workload = request.schema.parse(command.options), request.engine, request.plan.workload
    maximum = workload.yarn_factor * request.shape.max_context
    assert options[dest(engine.max_model_len)] == min(workload.context + workload.new_tokens, maximum)
    sharing = workload.parallel.data if options.get("enable_dp_attention") else 1
    assert options[dest(engine.max_num_seqs)] == sharing * workload.rank_batch
    pairs = yaml.safe_load(command.yaml()).items()
    words = ((f"--{name}",) if value is True else (f"--{name}", str(value)) for name, value in pairs)
    assert request.schema.parse([word for both in words for word in both]) == options


def dest(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def about(text: str, plan: Plan) -> Plan:
    return replace(plan, workload=replace(plan.workload, text=text))


def axis(exported: Any, name: str) -> Any:
    return next(feature for feature in exported.carried if feature.axis == name)


def test_plain_decoding_is_carried_exactly(request_for: Callable[..., ServeCommandOptions]) -> None:
    exported = export(request_for("autoregressive"))
    assert all(feature.exact for feature in exported.carried)
    assert dict(exported.command.arguments) == {
        "--max-model-len": 32768 + 1024,
        "--max-num-seqs": 1,
        "--gpu-memory-utilization": 0.9,
        "--tensor-parallel-size": 1,
    }
    assert exported.times is not None and exported.times.tpot_ms == pytest.approx(6.19, rel=0.04)  # measured


def test_a_length_beyond_the_models_limit_is_cut_to_it_and_said(
    request_for: Callable[..., ServeCommandOptions],
) -> None:
    """Llama-3.1's limit is 131072: 131072 tokens of context leave no room for 1024 more, unless YaRN stretches it."""
    within, cut = export(request_for(context=130_048)), export(request_for(context=131_072))
    assert [dict(exported.command.arguments)["--max-model-len"] for exported in (within, cut)] == [131_072, 131_072]
    assert "length" not in {exported.axis for exported in within.carried}
    message = axis(cut, "length")
    assert not message.exact
    assert "128k tokens of context and 1k new" in message.plan and "128k together" in message.engine
    stretched = export(request_for(context=131_072, yarn=True))
    assert dict(stretched.command.arguments)["--max-model-len"] == 132_096


def test_drafts_become_the_same_model_in_8_bits(request_for: Callable[..., ServeCommandOptions]) -> None:
    exported = export(request_for(context=120_000))
    config = dict(exported.command.arguments)["--speculative-config"]
    assert (config["method"], config["model"]) == ("draft_model", "meta-llama/Llama-3.1-8B")
    assert config["quantization"] == "fp8_per_channel"
    assert not axis(exported, "drafts").exact
    assert exported.times is not None and exported.times.tpot_ms < exported.times.plain_ms


@pytest.mark.parametrize(("version", "supported"), [("0.24.0", False), ("0.27.1", True)])
def test_drafts_have_a_kv_dtype_of_their_own_where_the_engine_takes_one(
    request_for: Callable[..., ServeCommandOptions], version: str, supported: bool
) -> None:
    """vLLM 0.24's SpeculativeConfig has no such field, and rejects unknown ones."""
    exported = export(request_for("quantspec", version=version, context=120_000))
    arguments = dict(exported.command.arguments)
    assert arguments["--kv-cache-dtype"] == "fp8"  # of the target
    assert ("kv_cache_dtype" in arguments["--speculative-config"]) == supported
    schema_for("vllm", version).parse(exported.command.options)


def test_gamma_by_batch_never_grows_and_is_the_fastest_of_such(request_for: Callable[..., ServeCommandOptions]) -> None:
    """Against every schedule with one change, by the sum of times over the fastest at each batch."""
    request = request_for("suffix", context=4096, batch=64)
    running, _ = served(replace(request, plan=about("docs", request.plan)))
    drafts = running.drafts
    assert drafts is not None
    rounds = rounds_of(running, drafts)
    assert rounds is not None
    gammas = rounds.best_gammas(64)
    assert gammas == sorted(gammas, reverse=True) and gammas[0] > gammas[-1] <= request.plan.speculation.gamma
    times = np.array([rounds.tpot_s(np.arange(1.0, 65), gamma) for gamma in range(9)])
    assert gammas[-1] == np.argmin(times[:5, -1])
    excess = times / times.min(axis=0)
    least = min(
        excess[first, :change].sum() + excess[gammas[-1], change:].sum()
        for first in range(gammas[-1], 9) for change in range(64)
    )  # fmt: skip
    assert sum(excess[gamma, at] for at, gamma in enumerate(gammas)) <= least + 1e-9
    assert drafts.schedule == tuple(ranges(gammas)) and drafts.gamma == gammas[0]
    exported = export(running.options)
    config = dict(exported.command.arguments)["--speculative-config"]
    assert exported.times is not None
    assert exported.times.tpot_ms == pytest.approx(1e3 * rounds.tpot_s(64, gammas[-1]))
    assert config["num_speculative_tokens_per_batch_size"] == [list(entry) for entry in drafts.schedule]
    even, _ = served(request_for(batch=16))  # whose gammas would gain less than 3%
    assert even.drafts is not None and not even.drafts.scheduled


def test_a_plan_that_drafts_by_suffix_becomes_the_engines_lookup(
    request_for: Callable[..., ServeCommandOptions],
) -> None:
    """Priced by the verification of its tokens, of which the text's kind says how many there are."""
    request = request_for("suffix", context=4096)
    docs = about("docs", request.plan)
    exported = export(replace(request, plan=docs))
    config = dict(exported.command.arguments)["--speculative-config"]
    assert config["method"] == "ngram"
    assert (config["num_speculative_tokens"], config["prompt_lookup_min"]) == (4, 2)
    schema_for("vllm").parse(exported.command.options)
    assert exported.times is not None and exported.times.tpot_ms < exported.times.plain_ms
    assert "not priced: the lookup" in axis(exported, "drafts").engine
    prose = about("prose", request.plan)
    of_prose = export(replace(request, plan=prose)).times
    assert of_prose is not None
    assert exported.times.tpot_ms < 0.8 * of_prose.tpot_ms < of_prose.plain_ms


def test_lookups_and_own_layers_are_written_by_name(request_for: Callable[..., ServeCommandOptions]) -> None:
    def config(request: ServeCommandOptions) -> dict[str, Any]:
        exported = export(request)
        request.schema.parse(exported.command.options)
        return dict(exported.command.arguments)["--speculative-config"]

    request = request_for("suffix", context=4096, draft_method="suffix")
    docs = about("docs", request.plan)
    assert config(replace(request, plan=docs)) == {"method": "suffix", "num_speculative_tokens": 4}
    assert "arctic-inference" in axis(export(replace(request, plan=docs)), "drafts").engine
    head = replace(request.plan, speculation=Speculation(3, drafter=Drafter(DrafterKind.HEAD, 3)))
    with_layers = replace(request, plan=head, draft_method="mtp", shape=replace(request.shape, mtp_layers=1))
    assert config(with_layers) == {
        "method": "mtp", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic",
    }  # fmt: skip
    assert export(with_layers).times is None
    for other, words in (
        ({"draft_method": "mtp"}, "has no layers for mtp"),
        ({"draft_method": "ngram"}, "the plan's drafter is head; allowed with ngram: suffix"),
        ({"draft_method": "ngram", "draft_model": "x/head"}, "the plan's drafter is head; allowed with ngram: suffix"),
        ({"draft_method": "ngram", "plan": docs, "draft_model": "x/head"}, "allowed with ngram: none"),
        ({"draft_method": "draft_model"}, "no head or block drafter is named"),
        ({"draft_method": "eagle3", "plan": docs}, "no head or block drafter is named"),
        ({"draft_method": "mtp", "plan": autoregressive(docs.workload)}, "the plan has no drafts"),
    ):
        with pytest.raises(PlanError, match=words):
            export(replace(with_layers if "plan" in other else replace(request, plan=head), **other))


def test_vllm_stops_a_head_where_it_loses(request_for: Callable[..., ServeCommandOptions], tmp_path: Path) -> None:
    """By published acceptance at about 11k tokens; by a head's own rows, which say that it always pays, nowhere."""

    def exported(request: ServeCommandOptions) -> tuple[dict[str, Any], str]:
        answer = export(request)
        return dict(answer.command.arguments)["--speculative-config"], axis(answer, "drafts").engine

    plan = {"speculation": Speculation(3, drafter=Drafter(DrafterKind.HEAD, 3))}
    request = request_for("int8-weights-int8", context=8192, plan=plan, draft_method="eagle3", draft_model="x/head")
    longer = replace(request.plan, workload=replace(request.plan.workload, new_tokens=8192))
    config, text = exported(replace(request, plan=longer))
    assert 8192 < config["max_model_len"] < 14336 and f"max_model_len stops it beyond {config['max_model_len']}" in text
    assert "max_model_len" not in exported(request)[0]  # whose sequences end before
    rows = [{"kind": "head", "name": "EAGLE-3", "model": "m", "depth": 3, "source": "measured", "where": "w",
             "context": context, "acceptance": 0.8} for context in (4096, 65536)]  # fmt: skip
    (tmp_path / "config.json").write_text("{}")
    profile = tmp_path / "speculation_profile.json"
    workload = replace(request.plan.workload, context=32768, new_tokens=8192, drafter_head=str(tmp_path))
    with_head = replace(request, plan=replace(request.plan, workload=workload), draft_model=None)
    profile.write_text(json.dumps({"measurement_conditions": {"rows": rows}}))
    config, text = exported(with_head)
    assert "max_model_len" not in config and "loses" not in text and "EAGLE-3 of m at 65536 tokens: w" in text
    rows[1]["acceptance"] = 0.1
    profile.write_text(json.dumps({"measurement_conditions": {"rows": rows}}))
    shorter = replace(
        with_head, plan=replace(with_head.plan, workload=replace(workload, context=4096, new_tokens=57344))
    )
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    config, text = exported(shorter)
    times = export(shorter).times
    assert times is not None and times.tpot_ms == times.plain_ms  # as all its sequences are longer
    assert config["max_model_len"] == 2048 and "stops it beyond 2048 tokens; its configuration allows 2048" in text
    of_sglang = replace(shorter, engine=ENGINES["sglang"], schema=schema_for("sglang"))
    assert "SGLang has no switch for that" in axis(export(of_sglang), "drafts").engine


@pytest.mark.parametrize(("context", "drafts"), [(1024, True), (1792, False), (4096, False)])
def test_a_head_is_planned_for_vllm_up_to_its_configuration(context: int, drafts: bool, tmp_path: Path) -> None:
    """Beyond, vLLM drafts nothing, as exports say; this package's runtime does, with a note."""
    row = {"kind": "head", "name": "EAGLE-3", "model": "m", "depth": 3, "source": "measured", "where": "w",
           "context": context, "acceptance": 0.8}  # fmt: skip
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    (tmp_path / "speculation_profile.json").write_text(json.dumps({"measurement_conditions": {"rows": [row]}}))
    of_engine, of_runtime = (
        recommend("Llama-3.1-8B", "h200", context, new_tokens=512, drafter_head=str(tmp_path), backend=backend)
        for backend in ("vllm", "ridgeplan")
    )
    assert of_runtime.plan.speculation.drafter.kind is DrafterKind.HEAD
    assert (of_engine.plan.speculation.drafter.kind is DrafterKind.HEAD) == drafts
    ends = "beyond the 2048 of the draft head's configuration"
    assert any(f"{ends}, where vLLM drafts nothing" in note for note in of_engine.notes) != drafts
    assert any(f"{ends}, where its acceptance may decay" in note for note in of_runtime.notes) != drafts


@pytest.mark.parametrize(
    ("context", "batch", "drafts", "pass_ms"),
    [(context, batch, drafts, ms) for (drafts, context, batch), ms in EAGLE3_PASS_MS.items() if drafts],
)
def test_passes_with_a_head_take_what_vllm_took(
    context: int, batch: int, drafts: int, pass_ms: float, request_for: Callable[..., ServeCommandOptions]
) -> None:
    """vLLM 0.24 on an H200, fp8 weights and KV, an EAGLE-3 head of one layer."""
    request = request_for("quantspec-int8", context=context, batch=batch, draft_method="eagle3", draft_model="x/head")
    workload = replace(request.plan.workload, acceptance_length=3.0, drafter=DrafterKind.HEAD, new_tokens=1)
    plan = replace(request.plan, workload=workload, speculation=replace(request.plan.speculation, gamma=drafts))
    running, axes = served(replace(request, plan=plan))
    assert running.drafts is not None
    rounds = rounds_of(running, running.drafts)
    assert rounds is not None
    tokens = tokens_per_round(running.drafts.acceptance(drafts), drafts)
    assert 1e3 * rounds.tpot_s(batch, drafts) * tokens == pytest.approx(pass_ms, rel=0.03)
    text = next(each.engine for each in axes if each.axis == "drafts")
    assert ("loses from about" in text) == (context == 4096)  # as the figure is of this context
    assert "pull request 684" in text


def test_a_plans_own_head_is_the_engines_draft_model(
    request_for: Callable[..., ServeCommandOptions], tmp_path: Path
) -> None:
    request = request_for("int8-weights-int8")
    head = tmp_path / "head"
    workload = replace(request.plan.workload, drafter_head=str(head))
    head.mkdir()
    (head / "config.json").write_text("{}")
    speculation = Speculation(3, drafter=Drafter(DrafterKind.HEAD, 3))
    exported = export(replace(request, plan=replace(request.plan, workload=workload, speculation=speculation)))
    config = json.loads(exported.command.words[exported.command.words.index("--speculative-config") + 1])
    assert (config["model"], config["method"]) == (str(head), "eagle3")


@pytest.mark.parametrize(("engine", "method"), [("vllm", "dflash"), ("vllm", "dspark"), ("sglang", "dflash")])
def test_a_block_drafter_is_carried_by_its_name(
    request_for: Callable[..., ServeCommandOptions], engine: str, method: str
) -> None:
    plan = {"speculation": Speculation(4, drafter=Drafter(DrafterKind.BLOCK, 4))}
    request = request_for("int8-weights-int8", engine, plan=plan, draft_method=method, draft_model="x/block")
    exported = export(request)
    arguments = request.schema.parse(exported.command.options)
    config = {"method": method, "num_speculative_tokens": 4, "model": "x/block", "draft_tensor_parallel_size": 1}
    if engine == "vllm":
        assert config.items() <= arguments["speculative_config"].items()
    else:
        assert (arguments["speculative_algorithm"], arguments["speculative_draft_model_path"]) == ("DFLASH", "x/block")
    assert exported.times is None and "x/block" in axis(exported, "drafts").engine
    for other, words in (
        ({"draft_method": "draft_model"}, "allowed: --draft-method dflash or dspark"),
        ({"draft_model": None}, "no head or block drafter is named"),
    ):
        with pytest.raises(PlanError, match=words):
            export(replace(request, **other))
    with pytest.raises(PlanError, match=r"vLLM 0\.24\.0 has no dspark"):
        export(replace(request, engine=ENGINES["vllm"], schema=schema_for("vllm", "0.24.0"), draft_method="dspark"))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_a_schedule_covers_every_batch_once_from_1(gammas: list[int]) -> None:
    """As vLLM asks: from batch 1, sorted, without overlap."""
    spans = list(ranges(gammas))
    assert [gamma for first, last, gamma in spans for _ in range(first, last + 1)] == gammas
    assert spans[0][0] == 1
    assert all(span[1] + 1 == other[0] and span[2] != other[2] for span, other in pairwise(spans))


def test_drafts_that_would_slow_the_engine_are_left_out(request_for: Callable[..., ServeCommandOptions]) -> None:
    """INT8 KV per token and head takes 14 ms a step, for drafts as for the target."""
    exported = export(request_for(kv_cache_dtype="int8_per_token_head", context=120_000))
    assert "--speculative-config" not in dict(exported.command.arguments)
    assert axis(exported, "drafts").engine == "none: vLLM would be slower with them"


def test_drafts_that_do_not_fit_are_left_out(request_for: Callable[..., ServeCommandOptions]) -> None:
    """16.1 GB of weights and 4.4 GB of KV are most of a 24 GB card."""
    exported = export(request_for("quantspec-exact", gpu="rtx4090"))
    assert "--speculative-config" not in dict(exported.command.arguments)
    assert "lack" in axis(exported, "drafts").engine
    lookup = request_for("suffix", gpu="rtx4090")  # which needs no second model
    docs = about("docs", lookup.plan)
    assert dict(export(replace(lookup, plan=docs)).command.arguments)["--speculative-config"]["method"] == "ngram"
    head = {"speculation": Speculation(3, drafter=Drafter(DrafterKind.HEAD, 3))}
    of_head = request_for("autoregressive", gpu="rtx4090", plan=head, draft_method="eagle3", draft_model="x/head")
    assert dict(export(of_head).command.arguments)["--speculative-config"]["method"] == "eagle3"


def test_what_no_engine_has_is_said(request_for: Callable[..., ServeCommandOptions]) -> None:
    evicting = {"eviction": Eviction("snapkv", 2048)}
    exported = export(request_for("autoregressive", plan=evicting))
    assert axis(exported, "eviction").engine == "none: every token stays and is read"
    sparse = export(request_for("specontext", gpu="h200"))
    assert (axis(sparse, "attention").engine, axis(sparse, "attention").exact) == ("full attention", False)


def test_what_does_not_fit_goes_to_the_host_for_a_plan_that_offloads(
    request_for: Callable[..., ServeCommandOptions],
) -> None:
    """Weights of 8.03e9 x 2 bytes, 101,024 tokens of 128 KiB, and the engine's reserve, of 90% of 24,564 MiB."""
    offloading = {"placement": Placement(True, 1024)}
    request = request_for("autoregressive", gpu="rtx4090", context=100_000, plan=offloading)
    reserve = request.speed.rates.reserve
    reserved = reserve.other_bytes + activation_bytes(request.shape, reserve)
    assert 1e9 < reserved < 2.5e9
    lacking = (8_030_261_248 * 2 + 101_024 * 131_072 + reserved - 0.9 * 24564 * 2**20) / 2**30
    assert dict(export(request).command.arguments)["--cpu-offload-gb"] == math.ceil(lacking)
    times = export(request).times
    assert times is not None and times.tpot_ms > 1e3 * math.ceil(lacking) * 2**30 / 32e9  # over PCIe 4.0


def test_a_plan_that_does_not_offload_is_refused_where_it_does_not_fit(
    request_for: Callable[..., ServeCommandOptions],
) -> None:
    with pytest.raises(PlanError, match=r"vLLM needs 2\d\.\d GiB .* of 21.6 GiB; allowed"):
        export(request_for("autoregressive", gpu="rtx4090", context=100_000))


def test_4_bit_weights_say_that_a_checkpoint_is_needed(request_for: Callable[..., ServeCommandOptions]) -> None:
    exported = export(request_for("autoregressive", plan={"weights": Weights(4, 4)}))
    assert dict(exported.command.arguments)["--quantization"] == "fp8_per_channel"
    assert "--model" in axis(exported, "weights").engine


def test_a_quantized_checkpoint_is_not_quantized_again(request_for: Callable[..., ServeCommandOptions]) -> None:
    """gpt-oss's experts come in MXFP4: engines refuse another quantization beside it."""
    request = request_for("autoregressive", model="openai/gpt-oss-20b", plan={"weights": Weights(8, 8)})
    exported = export(request)
    assert "--quantization" not in dict(exported.command.arguments)
    assert (axis(exported, "weights").engine, axis(exported, "weights").exact) == ("the mxfp4 checkpoint", False)


def test_yarn_is_told_as_transformers_names_it(request_for: Callable[..., ServeCommandOptions]) -> None:
    exported = export(request_for("autoregressive", model="Qwen/Qwen3-8B", context=80_000, yarn=True))
    rope = dict(exported.command.arguments)["--hf-overrides"]["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 2.5, 32768)
    card = export(request_for("autoregressive", model="Qwen/Qwen3-8B", context=130_048, yarn=True))
    rope = dict(card.command.arguments)["--hf-overrides"]["rope_parameters"]
    assert (rope["factor"], rope["original_max_position_embeddings"]) == (4.0, 32768)  # as Qwen3's model card says


def test_sglang_has_one_more_draft_token_than_steps(request_for: Callable[..., ServeCommandOptions]) -> None:
    """A chain: topk 1, and its root counts as a draft token."""
    request = dict(export(request_for(engine="sglang", context=120_000)).command.arguments)
    assert request["--speculative-algorithm"] == "STANDALONE"
    assert request["--speculative-num-draft-tokens"] == request["--speculative-num-steps"] + 1
    assert request["--speculative-eagle-topk"] == 1


def test_sources_of_times(request_for: Callable[..., ServeCommandOptions]) -> None:
    sources = {
        (engine, gpu, kv): export(request_for("autoregressive", engine=engine, gpu=gpu, kv_cache_dtype=kv)).times.source
        for engine, gpu, kv in [
            ("vllm", "h200", None),
            ("vllm", "a100", None),
            ("sglang", "h200", None),
            ("vllm", "h200", "turboquant_k8v4"),
        ]
    }
    assert [*sources.values()] == ["calibrated", "transferred", "transferred", "prior"]


@pytest.mark.parametrize(
    ("engine", "seqs", "words"),
    [
        ("vllm", 3, "--tensor-parallel-size 4 --pipeline-parallel-size 2 --data-parallel-size 2 "
                    "--enable-expert-parallel"),
        ("sglang", 6, "--tensor-parallel-size 8 --pipeline-parallel-size 2 --data-parallel-size 2 "
                      "--enable-dp-attention --expert-parallel-size 8"),
    ],
)  # fmt: skip
def test_degrees_become_the_engines_arguments(
    request_for: Callable[..., ServeCommandOptions], engine: str, seqs: int, words: str
) -> None:
    """SGLang's data-parallel attention divides the ranks of its tensor parallelism, and the limit of sequences."""
    request = request_for("autoregressive", engine, model="Qwen3-30B-A3B", batch=5)
    workload = replace(request.plan.workload, parallel=Parallel(4, 2, 2, expert=True))
    exported = export(replace(request, plan=replace(request.plan, workload=workload)))
    assert words in " ".join(exported.command.options) and request.schema.parse(exported.command.options)
    assert dict(exported.command.arguments)[request.engine.max_num_seqs] == seqs  # of the rank with most
    assert exported.times is not None and exported.times.source == "extrapolated"


def test_degrees_that_the_engine_refuses_and_unknown_drafts_are_not_exported_or_predicted(
    request_for: Callable[..., ServeCommandOptions],
) -> None:
    request = request_for("autoregressive")
    workload = replace(request.plan.workload, parallel=Parallel(3))
    with pytest.raises(PlanError, match="32 query heads do not divide by tp 3"):
        export(replace(request, plan=replace(request.plan, workload=workload)))
    unknown = export(request_for(draft_model="someone/unknown"))
    assert unknown.times is None and "draft" in unknown.unpredicted


@pytest.mark.parametrize(
    ("decided", "message"),
    [
        ({"kv_cache_dtype": "int4"}, r"kv_cache_dtype is 'int4'; allowed in vLLM 0.33.0: auto"),
        ({"kv_cache_dtype": "int4_per_token_head", "version": "0.24.0"}, "allowed in vLLM 0.24.0"),
        ({"draft_method": "medusa"}, "allowed: draft_model, eagle3"),
    ],
)
def test_choices_that_the_engine_lacks_are_refused(
    request_for: Callable[..., ServeCommandOptions], decided: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        export(request_for(**decided))


def test_a_command_is_a_shells_and_json_is_plain(request_for: Callable[..., ServeCommandOptions]) -> None:
    exported = export(request_for(context=120_000))
    assert tuple(shlex.split(exported.command.shell().replace("\\\n", " "))) == exported.command.words
    assert json.loads(json.dumps(exported.to_dict()))["engine"] == "vLLM"


@pytest.mark.parametrize(("name", "bits"), [("int8_per_token_head", 8.25), ("int4_per_token_head", 4.25), ("fp8", 8)])
def test_a_dtypes_bits_hold_its_scales(name: str, bits: float) -> None:
    """Of a head of 128 numbers: 4 bytes of scales are 32 bits, a quarter of a bit each."""
    assert DTYPES[name].bits == bits


def test_a_command_holds_no_text_that_becomes_another_argument() -> None:
    for text in ("--trust-remote-code", "a\nb", "\x1b[31m", "", "  ", "\ud800"):
        with pytest.raises(PlanError, match=r"the engine would get .*; allowed: texts in UTF-8"):
            Command(("vllm", "serve", "owner/model"), (("--tokenizer", text),))
        with pytest.raises(PlanError, match="the engine would get"):
            Command(("vllm", "serve", text), ())
    command = Command(
        ("vllm", "serve", "it's: #1"), (("--flag", True), ("--config", {"a": 'it\'s\n"b"'}), ("--x", 0.5))
    )
    assert yaml.safe_load(command.yaml()) == {"flag": True, "config": '{"a": "it\'s\\n\\"b\\""}', "x": 0.5}


def test_every_round_reads_the_weights_on_the_host_once(request_for: Callable[..., ServeCommandOptions]) -> None:
    """A tenth of a second per plain step, and per verification, which yields several tokens."""
    running, _ = served(request_for(batch=16))
    assert running.drafts is not None
    rounds = rounds_of(running, running.drafts)
    assert rounds is not None
    slower = replace(rounds, host_s=rounds.host_s + 0.1)
    for gamma in (0, 3):
        read_s = 0.1 / float(tokens_per_round(running.drafts.acceptance(gamma), gamma))
        assert slower.tpot_s(16, gamma) - rounds.tpot_s(16, gamma) == pytest.approx(read_s)


def test_a_draft_model_needs_a_cache_of_its_own(request_for: Callable[..., ServeCommandOptions]) -> None:
    """33792 tokens of 128 KiB for each sequence, beside weights that do not depend on the batch."""
    needs = []
    for batch in (1, 2):
        options = request_for(batch=batch)
        drafts = DraftModel(options.model, "draft_model", "fp8", "auto", 3, 0.8, options.shape)
        plain = Served(options, kv="auto")
        needs.append(replace(plain, drafts=drafts).needed_bytes - plain.needed_bytes)
    assert needs[0] > 33_792 * 131_072 + options.shape.parameters
    assert needs[1] - needs[0] == 33_792 * 131_072


def test_several_gpus_hold_what_one_lacks(request_for: Callable[..., ServeCommandOptions]) -> None:
    """Weights of 16.1 GB and 13.2 GB of KV are too much for 90% of 24 GB, and fit twice that."""
    request = request_for("autoregressive", gpu="rtx4090", context=100_000)
    workloads = (replace(request.plan.workload, parallel=Parallel(count)) for count in (1, 2))
    single, pair = (
        Served(replace(request, plan=replace(request.plan, workload=workload)), "auto") for workload in workloads
    )
    assert pair.memory.weights + pair.memory.kv == pytest.approx((single.memory.weights + single.memory.kv) / 2, 0.01)
    assert (single.missing_gib > 0, pair.missing_gib) == (True, 0)
