"""The engines' argument schemas, and the parser that is made of them."""

import pytest

from ridgeplan.planner import PlanError
from ridgeplan.planner.export.schema import Rejected, schema_for, versions

VLLM = schema_for("vllm")


def test_versions_from_the_first_measured_one_to_the_latest() -> None:
    assert versions("vllm")[0] == "0.24.0" and versions("vllm")[-1] == "0.33.0"
    assert versions("sglang") == ("0.5.23",)


@pytest.mark.parametrize(
    ("text", "taken"), [("0.24.0", "0.24.0"), ("0.26.3", "0.24.0"), ("0.29", "0.27.1"), ("0.33.7", "0.33.0")]
)
def test_the_nearest_older_version_is_taken(text: str, taken: str) -> None:
    assert schema_for("vllm", text).version == taken


@pytest.mark.parametrize("text", ["0.23.9", "0.34.0", "9.9", "latest", "", "0..1", "-1"])
def test_unknown_versions_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"allowed: 0\.24\.0 up to 0\.33\.0"):
        schema_for("vllm", text)


def test_what_the_engines_documents_say_of_versions() -> None:
    """INT4 per token and head came between them (vllm#40835), a draft's own KV dtype in July (vllm#48787)."""
    old, new = schema_for("vllm", "0.24.0"), VLLM
    assert not old.allows("--kv-cache-dtype", "int4_per_token_head")
    assert new.allows("--kv-cache-dtype", "int4_per_token_head")
    assert not old.has_field("--speculative-config", "kv_cache_dtype")
    assert new.has_field("--speculative-config", "kv_cache_dtype")
    for schema in (old, new):
        assert schema.has_field("--speculative-config", "num_speculative_tokens_per_batch_size")
        assert schema.allows("-tp") and not schema.allows("--no-such-argument")


def test_a_real_command_is_read() -> None:
    """Beside a shorthand, a suffix (1k is 1000, 1K is 1024), flags and their negation, lists and objects."""
    words = [
        "some/model", "-tp", "2", "--max-model-len", "128K", "--no-enable-prefix-caching", "--trust-remote-code",
        "--served-model-name", "a", "b", "--speculative-config", '{"num_speculative_tokens": 3, "method": "eagle3"}',
    ]  # fmt: skip
    options = VLLM.parse(words)
    assert (options["tensor_parallel_size"], options["max_model_len"]) == (2, 131072)
    assert (options["enable_prefix_caching"], options["trust_remote_code"]) == (False, True)
    assert options["speculative_config"] == {"num_speculative_tokens": 3, "method": "eagle3"}
    assert VLLM.parse(["--max-model-len", "25.6k"])["max_model_len"] == 25600
    assert VLLM.parse(["--max-model-len", "auto"])["max_model_len"] == -1


@pytest.mark.parametrize(
    "words",
    [
        ["--max-num-seq", "1"],  # no abbreviations
        ["--kv-cache-dtype", "int4"],
        ["--gpu-memory-utilization", "1.5"],
        ["--gpu-memory-utilization", "0"],
        ["--max-num-seqs", "0"],
        ["--max-num-seqs", "four"],
        ["--max-model-len", "128Q"],
        ["--speculative-config", '{"gamma": 3}'],
        ["--speculative-config", '{"num_speculative_tokens": 0}'],
        ["--speculative-config", '{"method": "quantspec"}'],
        ["--speculative-config", "{"],
        ["--quantization", "int4"],
        ["--trust-remote-code", "--made-up"],
    ],
    ids=" ".join,
)
def test_what_the_engine_would_not_take_is_rejected(words: list[str]) -> None:
    with pytest.raises(Rejected):
        VLLM.parse(words)


def test_sglang_switches_have_no_negation_and_aliases_work() -> None:
    schema = schema_for("sglang")
    options = schema.parse(["--model", "m", "--tp-size", "4", "--enable-hicache", "--context-length", "64K"])
    assert (options["model_path"], options["tp_size"], options["enable_hierarchical_cache"]) == ("m", 4, True)
    assert options["context_length"] == 65536
    with pytest.raises(Rejected):
        schema.parse(["--no-enable-hicache"])
