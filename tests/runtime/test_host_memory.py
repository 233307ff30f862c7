"""The peak memory of a generation on a CPU is what was predicted, in a process of its own that has just begun."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

PRESETS = (
    "autoregressive", "int8", "int8-weights", "int4-weights", "quantspec", "magicdec-snapkv", "dapq", "progressive",
)  # fmt: skip
CONTEXTS = (1024, 4096)
FAST = ("autoregressive", 512, ("cold",))  # the others take minutes
NEW_TOKENS = 16
LIMIT_S = 1800  # far beyond what a case takes, also on a busy machine
MEASURE = """
import json, sys
import torch
from ridgeplan import runtime
from ridgeplan.planner.capacity import predicted_memory
from ridgeplan.roofline.latency import Device
from ridgeplan.roofline.plan.plan import Workload
from ridgeplan.roofline.plan.presets import preset
model, name, context, new_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
plan = preset(name, Workload("SmolLM2-135M", "here", context, new_tokens))
engine = runtime.load(plan, model, device="cpu")
engine.generate([[1 + index * 7919 % 40000 for index in range(context)]], new_tokens)
host = Device(memory_bytes=0, element_bytes=4, num_sms=torch.get_num_threads(), asynchronous=0)
predicted = float(predicted_memory(plan, engine.config.shape, host).peak)
print(json.dumps([predicted, engine.statistics.peak_memory_bytes]))
"""


def peaks(model: Path, name: str, context: int, cache: Path) -> tuple[float, float]:
    """The predicted and the measured peak in bytes. cache: the user's, where conversions are kept."""
    command = [sys.executable, "-c", MEASURE, str(model), name, str(context), str(NEW_TOKENS)]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    assert ran.returncode == 0, ran.stderr
    predicted, measured = json.loads(ran.stdout.splitlines()[-1])
    return predicted, measured


@pytest.mark.model
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not reset peaks of memory")
@pytest.mark.parametrize(
    ("name", "context", "processes"),
    [FAST, *(pytest.param(*case, ("cold", "warm"), marks=pytest.mark.slow) for case in product(PRESETS, CONTEXTS))],
)
def test_a_cpus_peak_is_within_a_tenth_of_the_prediction_cold_and_warm(
    smollm2: Path, tmp_path: Path, name: str, context: int, processes: tuple[str, ...]
) -> None:
    """Cold, the process converts the model, and fits quantized weights; warm, it reads what the cold one saved."""
    for _ in processes:
        predicted, measured = peaks(smollm2, name, context, tmp_path)
        assert predicted == pytest.approx(measured, rel=0.1)
