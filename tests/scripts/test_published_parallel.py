"""Published times of models on several GPUs: the files are read, and tensor parallelism is close to them."""

from statistics import median

import pytest
from published_parallel import ServedRow, other_steps, served_rows, source_title

from ridgeplan.validate.papers.rows import PublishedError


def test_rows_have_a_source_and_one_figure() -> None:
    rows = served_rows()
    assert len(rows) == 40 and all(source_title(row.source).startswith("[") for row in rows)
    with pytest.raises(PublishedError, match="concurrency and tpot_ms, or tokens_per_s_per_gpu"):
        ServedRow(source="a", model="b", gpu="h100", prompt=1, output=1, concurrency=4, tokens_per_s_per_gpu=9.0)


def test_times_per_token_of_tensor_parallelism_are_within_a_tenth() -> None:
    """The median; none is off by more than a fourth, but SGLang's on a B200, which has other kernels for experts."""
    rows = [row for row in served_rows() if row.tpot_ms and row.output < 2000][::2]
    errors = {row.source: [] for row in rows}
    for row in rows:
        errors[row.source].append(abs(row.predicted() / row.published - 1))
    assert max(errors.pop("sglang-b200")) < 0.4
    others = [error for of_source in errors.values() for error in of_source]
    assert median(others) < 0.06 and max(others) < 0.25


def test_steps_of_dense_models_agree_with_aiconfigurators() -> None:
    differences = [abs(ours / theirs - 1) for case, theirs, ours in other_steps() if "Llama" in case.model]
    assert len(differences) > 15 and max(differences) < 0.1
