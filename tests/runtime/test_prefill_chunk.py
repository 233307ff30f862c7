"""What the cost model assumes of prefill is what prefill does."""

from ridgeplan.roofline.memory import PREFILL_CHUNK_TOKENS
from ridgeplan.runtime.prefill import CHUNK_TOKENS


def test_the_priced_chunk_is_the_executed_one() -> None:
    assert PREFILL_CHUNK_TOKENS == CHUNK_TOKENS
