"""Cells of the support matrix (docs/add-a-model.md): what a plan is said to lack is what the engine refuses."""

import re

import pytest

from ridgeplan import runtime
from ridgeplan.roofline.plan.plan import Placement
from ridgeplan.roofline.plan.support import missing_execution
from ridgeplan.runtime.errors import UnsupportedPlan
from ridgeplan.runtime.model.checkpoint import load_config
from ridgeplan.runtime.model.config import decoder_config

CONTEXT, NEW = 64, 8
COLUMNS = {
    "plain": {},
    "quantspec": {"kv": "int4x2", "gamma": 3, "draft_bits": 4},
    "progressive": {"kv": "bf16+int4", "gamma": 3, "selection": "progressive", "ratio": 0.4},
    "snapkv": {"evict": "snapkv", "budget": 48},
    "offload": {"placement": Placement(offload=True, budget=32)},
    "8-bit": {"target_bits": 8},
    "4-bit": {"target_bits": 4},
}
# Plans without drafts and host whose tokens those of a column must be: of the same weights and cache.
SAME_TOKENS = {"quantspec": {"kv": "int8"}, "progressive": {}, "offload": {}}
# Of sinks and windows, latents, states, and heads of two sizes: the columns that they lack.
LACKING = {
    "gpt_oss": {"progressive", "offload"},
    "deepseek_v2": {"progressive", "snapkv", "offload"},
    "qwen3_next": set(),
    "gemma4_text": {"quantspec", "progressive", "snapkv", "offload"},  # within its window, where stores are not apart
}


@pytest.mark.parametrize("family", LACKING)
def test_cells_are_what_the_engine_does(family, tiny_model, make_plan, prompts):
    folder, refused = tiny_model(family).folder, set()
    shape = decoder_config(load_config(folder), folder).shape
    for name, keys in COLUMNS.items():
        plan = make_plan(context=CONTEXT, new_tokens=NEW, **keys)
        if missing := missing_execution(plan, shape):
            refused.add(name)
            with pytest.raises(UnsupportedPlan, match=re.escape(missing[0])):
                runtime.load(plan, folder, device="cpu")
            continue
        tokens = runtime.load(plan, folder, device="cpu").generate(prompts(CONTEXT), NEW).tokens[0]
        assert len(tokens) == NEW
        if name in SAME_TOKENS:
            exact = make_plan(context=CONTEXT, new_tokens=NEW, **SAME_TOKENS[name])
            assert tokens == runtime.load(exact, folder, device="cpu").generate(prompts(CONTEXT), NEW).tokens[0]
    assert refused == LACKING[family]
