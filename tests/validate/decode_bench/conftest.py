"""An inflated model that several files run."""

from pathlib import Path
from typing import Any

import pytest

from ridgeplan.validate.random_model import llama_like_shape


@pytest.fixture(scope="session")
def model(smollm2: Path) -> Any:
    """SmolLM2 in a larger shape. It keeps its large weights and its text, which take seconds to make."""
    from ridgeplan.validate.decode_bench.inflated_model import InflatedModel

    return InflatedModel.load(str(smollm2), llama_like_shape(30, 640, 1600, 9, 3, 64, vocab=49_200), "cpu")
