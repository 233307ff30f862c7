"""Messages between GPUs: the operations of a pass, and their time by link and algorithm.

All-reduce of S bytes on n GPUs of a node, at bandwidth B, first message t and step h:
one-shot: t + (n - 1) S / B; two-shot: t + 3 h + 2 (n - 1) / n S / B; ring: t + 2 (n - 1) h + 2 (n - 1) / n S / B
(Patarasuk and Yuan 2009); in the switch (NVLS): t + 10 h + (n + 1) / n S / B. The fastest counts, as engines choose by
size. All-gather, reduce-scatter and all-to-all move (n - 1) / n S in n - 1 steps.

Across nodes an all-reduce scatters within a node, reduces a node's share over the nodes by a ring, and gathers. An
all-gather goes over the nodes first, where every GPU moves the share of its rank in a node, and then within nodes; a
reduce-scatter the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ridgeplan.roofline.catalog.hardware import Hardware
from ridgeplan.roofline.catalog.links import Link, link_between_nodes, link_of
from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.cost import Cost, Term, minimum
from ridgeplan.roofline.passes import Op

# Steps beside the first message, fitted to all-reduces of vLLM 0.24 on H200 (links.toml): a second barrier, and what
# reductions in the switch take to set up.
TWO_SHOT_HOPS, IN_SWITCH_HOPS = 3, 10
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND = "all_reduce", "all_gather", "reduce_scatter", "send"
GATHER_LOGITS = "gather_logits"  # an all-gather of sampled rows, not of all
COLLECTIVES = (ALL_REDUCE, ALL_GATHER, GATHER_LOGITS, REDUCE_SCATTER, SEND)
STREAMS = 2  # that pipeline stages hand on: hidden states and the residual


@dataclass(frozen=True)
class Network:
    """The links of a GPU: within its node, and between nodes."""

    link: Link
    between: Link

    @classmethod
    def of(cls, hardware: Hardware) -> Network:
        """The network of a catalog GPU."""
        return cls(link_of(hardware), link_between_nodes())

    def seconds(self, kind: str, message_bytes: Term, ranks: int, stride: int = 1) -> Term:
        """Seconds of one message of a kind among so many GPUs, of which neighbors are `stride` GPUs apart.

        The bytes of a gather or a scatter are those of all ranks.
        """
        local = max(1, min(ranks, self.link.gpus_per_node // stride))
        nodes = -(-ranks // local)
        if kind == SEND:  # at the pace of the slowest hop of the pipeline
            link = self.link if nodes == 1 else self.between
            return link.latency_s + message_bytes / link.bytes_per_s
        if kind == ALL_REDUCE:
            if nodes == 1:
                return all_reduce_seconds(self.link, message_bytes, ranks)
            inside = 2 * gather_seconds(self.link, message_bytes, local)
            return inside + ring_seconds(self.between, message_bytes / local, nodes)
        between_s = gather_seconds(self.between, message_bytes / local, nodes)
        return gather_seconds(self.link, message_bytes, local) + between_s


def all_reduce_seconds(link: Link, message_bytes: Term, ranks: int) -> Term:
    """The fastest all-reduce within a node."""
    if ranks == 1:
        return 0.0
    moved_s = message_bytes / link.bytes_per_s
    one_shot_s = link.latency_s + (ranks - 1) * moved_s
    two_shot_s = link.latency_s + TWO_SHOT_HOPS * link.hop_s + 2 * (ranks - 1) / ranks * moved_s
    fastest_s = minimum(one_shot_s, minimum(two_shot_s, ring_seconds(link, message_bytes, ranks)))
    if not link.multicast:
        return fastest_s
    in_switch_s = link.latency_s + IN_SWITCH_HOPS * link.hop_s + (ranks + 1) / ranks * moved_s
    return minimum(fastest_s, in_switch_s)


def ring_seconds(link: Link, message_bytes: Term, ranks: int) -> Term:
    """An all-reduce around a ring."""
    steps = 2 * (ranks - 1)
    return link.latency_s + steps * link.hop_s + steps / ranks * message_bytes / link.bytes_per_s


def gather_seconds(link: Link, message_bytes: Term, ranks: int) -> Term:
    """An all-gather, a reduce-scatter or an all-to-all of `message_bytes` on all ranks together."""
    if ranks == 1:
        return 0.0
    return link.latency_s + (ranks - 1) * (link.hop_s + message_bytes / ranks / link.bytes_per_s)


def pass_messages(shape: ModelShape, rows: Term, sampled_rows: Term, element_bytes: Term) -> Iterator[Op]:
    """The messages of one pass of a pipeline stage with `rows` tokens, of which `sampled_rows` have logits.

    Tensor parallelism adds up the output of every block, and of the embedding. Under data parallelism the tokens of all
    ranks are gathered ahead of routed experts, and their outputs scattered back (vLLM's default all-to-all backend).
    """
    parallel = shape.parallel
    stream_bytes = rows * shape.hidden * element_bytes
    if parallel.tensor > 1:
        vocab_bytes = sampled_rows * parallel.tensor * shape.vocab * element_bytes
        yield _message("all-reduce", ALL_REDUCE, stream_bytes, shape.blocks + 1, parallel.tensor)
        yield _message("gather logits", GATHER_LOGITS, vocab_bytes, 1, parallel.tensor)
    if parallel.data > 1 and shape.is_moe:
        routed_bytes = parallel.data * stream_bytes
        group = parallel.data, parallel.tensor
        yield _message("gather tokens", ALL_GATHER, routed_bytes, shape.moe_layers, *group)
        yield _message("scatter outputs", REDUCE_SCATTER, routed_bytes, shape.moe_layers, *group)
    if parallel.pipeline > 1:
        yield _message("pipeline hop", SEND, STREAMS * stream_bytes, 1, parallel.pipeline, parallel.expert_ranks)


def _message(name: str, kind: str, message_bytes: Term, launches: Term, ranks: int, stride: int = 1) -> Op:
    return Op(name, kind, Cost(write_bytes=message_bytes), launches, ranks, stride)
