"""The study of selections: figures counted by hand, and what a run on a tiny model must show whatever its weights."""

import pytest
import torch

from ridgeplan.roofline.plan.plan import PlanError
from ridgeplan.runtime import WorkloadError
from ridgeplan.runtime.policies.base import TokenIndex
from ridgeplan.validate.studies.retrieval import METHODS, MODEL, RECENT, Sizes, compared, mask_of, study

UNTRAINED = tuple(name for name in METHODS if not name.startswith("retrieval"))


def test_figures_of_one_step_by_hand():
    """Of 4 top tokens 0, 2, 4 and 399, head 0 reads three and head 1 one; 2 and 4 are neither sinks nor recent."""
    top, read = torch.zeros(2, 400, dtype=torch.bool), torch.zeros(2, 400, dtype=torch.bool)
    top[:, [0, 2, 4, 399]] = True
    read[0, [0, 2, 399, 7]] = True
    read[1, 4] = True
    weights = torch.zeros(2, 400)
    weights[:, [2, 4]] = torch.tensor([0.25, 0.75])
    (found,) = compared(read[None], top[None], weights, torch.tensor([1]))
    assert found.tolist() == [(3 / 4 + 1 / 4) / 2, (1 / 2 + 1 / 2) / 2, (0.25 + 0.75) / 2]
    top[:, [2, 4]] = False
    assert compared(read[None], top[None], weights, torch.tensor([1]))[0, 1].isnan()  # none that is distant


def test_an_index_list_as_a_mask():
    index = torch.tensor([[[1, 3, 9], [0, 7, 7]]], dtype=torch.int32)
    count = torch.tensor([[2, 1]], dtype=torch.int32)
    found = mask_of(TokenIndex(index, count), 2, 8)
    assert [row.nonzero().flatten().tolist() for row in found] == [[1, 3], [0]]
    pages = mask_of(TokenIndex(index[:, :1], count[:, :1], page=2), 2, 7)
    assert [row.nonzero().flatten().tolist() for row in pages] == [[2, 3, 6], [2, 3, 6]]


@pytest.fixture(scope="module")
def rows(tiny_folder, long_text):
    sizes = Sizes((600,), (256, 520), UNTRAINED, tokens=3)
    found = study(str(tiny_folder), long_text, sizes, device="cpu")
    return {(row.method, row.budget): row for row in found}


def test_what_holds_for_any_model(rows):
    assert {method for method, _ in rows} == {*UNTRAINED, MODEL}
    for (method, budget), row in rows.items():
        assert 0 < row.hit <= 1 and 0 < row.mass <= 1.0001 and 0 <= row.overlap <= 1, method
        assert row.hit <= rows[MODEL, budget].hit == 1
        assert row.mass <= rows[MODEL, budget].mass + 1e-4, "no set of a size has more attention than the top one"
        assert len(row.by_layer) == 2
    for method in UNTRAINED:
        assert rows[method, 520].hit > rows[method, 256].hit, "more is found with more tokens"
    assert rows["progressive", 256].hit > rows["random", 256].hit, "2-bit keys know something of the keys"
    assert rows["streamingllm", 256].overlap == 1


def test_what_cannot_be_studied_is_named(tiny_folder, long_text):
    with pytest.raises(PlanError, match="context is 256; allowed: more than 256, the smallest budget"):
        Sizes((256, 600))
    with pytest.raises(PlanError, match="budget is 255; allowed: 256 to 599"):
        Sizes((600,), (2 * RECENT - 1,))
    with pytest.raises(PlanError, match="method is 'guess'; allowed: retrieval-head, retrieval-batch"):
        Sizes(methods=("guess",))
    with pytest.raises(WorkloadError, match="methods of a retrieval head need one"):
        next(study(str(tiny_folder), long_text, Sizes((600,), (256,))))
