"""A step whose kernels start while those before them end computes what it does one kernel at a time."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ridgeplan.roofline.plan.plan import DraftCodes, KVFormat
from ridgeplan.runtime.kv.cache import Cache
from ridgeplan.runtime.kv.config import KVCacheConfig
from ridgeplan.runtime.kv.metadata_builder import AttentionMetadataBuilder
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model.linear import Dense, Linear
from ridgeplan.runtime.model.weights import DecoderWeights, WeightFormat
from ridgeplan.runtime.quantization.calibration import quantized_linear
from ridgeplan.validate.random_model import RandomDecoder, llama_like_shape
from ridgeplan.validate.timing import Bench

CONTEXT = 1000
SHAPE = llama_like_shape(3, 1024, 2816, 8, 2, 128, vocab=1000)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Apart:
    """A product that no other kernel runs beside."""

    linear: Linear

    def __call__(self, x: Tensor, gated: bool = False) -> Tensor:
        wait()
        out = self.linear(x, gated)
        wait()
        return out


class Patient(Decoder):
    """Waits for the device between kernels; products have to be `Apart`."""

    def rotary(self, positions):
        return self._waited(super().rotary(positions))

    def project(self, *args):
        return self._waited(super().project(*args))

    def norm(self, *args):
        return self._waited(super().norm(*args))

    def attend(self, *args):
        return self._waited(super().attend(*args))

    def _waited(self, result):
        wait()
        return result


class Step:
    """A decode step over random weights and a random hierarchical cache; drafts have 4-bit weights and codes."""

    def __init__(self, device: str, rows: int, drafting: bool) -> None:
        bench = Bench.build(torch.device(device), 32 << 20, 1, 0.0)
        model = RandomDecoder.build(bench, SHAPE, 128, 1)
        config = KVCacheConfig(rows, CONTEXT + 64, KVFormat.HIERARCHICAL, gamma=4, draft_codes=DraftCodes.UPPER)
        self.cache = Cache(model.shape, config, bench.device, bench.pool.dtype)
        self._fill()
        self.decoder, self.patient = model.decoder, Patient(model.decoder.config, bench.device)
        self.metadata = (
            AttentionMetadataBuilder(self.cache).draft_metadata(0)
            if drafting
            else AttentionMetadataBuilder(self.cache).target_metadata(4)
        )
        self.weights = changed(model.weights(), lambda linear: random_product(linear, drafting))
        self.tokens = torch.zeros(rows, 1 if drafting else 4, dtype=torch.int64, device=device)
        self._generator = torch.Generator(device).manual_seed(1)

    def _fill(self) -> None:
        cache, codes = self.cache, self.cache.stores[0].coded[0].codes
        for plane in (codes.key_upper, codes.key_lower, codes.value_upper, codes.value_lower):
            plane.random_(0, 256)
        for scale in (codes.key_scale, codes.value_scale):
            scale.fill_(0.05)
        for store in (cache.keys, cache.values):
            store.normal_()
        cache.lengths.copy_(torch.arange(len(cache.lengths)) * 100 + CONTEXT - 300)

    def renew(self) -> None:
        self.tokens.random_(0, SHAPE.vocab, generator=self._generator)

    def together(self) -> Tensor:
        return self.decoder.step(self.weights, self.cache, self.tokens, self.metadata)

    def apart(self) -> Tensor:
        return self.patient.step(changed(self.weights, Apart), self.cache, self.tokens, self.metadata)


def changed(weights: DecoderWeights, change) -> DecoderWeights:
    layers = tuple(layer.with_projections(change) for layer in weights.layers)
    return replace(weights, layers=layers, head=change(weights.head))


def random_product(linear: Dense, narrow: bool) -> Linear:
    """A product with random weights that no other has."""
    dense = Dense(torch.randn_like(linear.weight) / linear.weight.shape[1] ** 0.5)
    return quantized_linear(dense, WeightFormat(4, 128)) if narrow else dense


@pytest.mark.parametrize("drafting", [False, True])
def test_waiting_between_kernels_changes_nothing(drafting):
    step = Step("cpu", 1, drafting)
    step.renew()
    assert torch.equal(step.together(), step.apart())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("drafting", [False, True])
@torch.inference_mode()
def test_a_captured_step_equals_one_kernel_at_a_time(drafting, rows):
    step = Step("cuda", rows, drafting)
    step.together()  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step.together()
    for _ in range(30):
        step.renew()
        graph.replay()
        wait()
        captured = logits.clone()
        assert torch.equal(captured, step.apart())
