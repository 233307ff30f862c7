"""Time of layers on the host: their copies over PCIe, as a pipeline with the layers that are on the device.

A layer is copied while those before it are computed. Copies of the first ones start with the round, beside its drafts,
as far as there are slots for them; each later one starts once a slot is free.
"""

from __future__ import annotations

from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.cost import Term, maximum, minimum, where
from ridgeplan.roofline.execution import HOST_PAGE_BYTES, HOST_PIECE_BYTES, mean_quantized_tokens
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.memory import HostLayers
from ridgeplan.roofline.ops import allocate_slots
from ridgeplan.roofline.strategy import Strategy

# On an H200, loads and the kernels that run beside them slow each other down. Kernels lose a share of the time that a
# layer's loads take alone: HELD_UP_BY_PAGE_WALKS where page tables are walked for pieces of 512 bytes,
# HELD_UP_BY_TRANSFERS where pieces of 4 KB are copied. Loads lose HELD_UP_BY_LAYERS of the kernels' time alone.
HELD_UP_BY_PAGE_WALKS, HELD_UP_BY_TRANSFERS, HELD_UP_BY_LAYERS = 0.43, 0.25, 0.5


def stream_seconds(machine: Machine, strategy: Strategy, host: HostLayers, context: Term) -> Term:
    """Seconds to copy all old tokens of one layer, at `context` tokens."""
    return machine.link_seconds("host_copy", mean_quantized_tokens(context, strategy.kv_group) * host.token_bytes)


def load_seconds(
    machine: Machine,
    shape: ModelShape,
    strategy: Strategy,
    host: HostLayers,
    context: Term,
    chosen: Term,
    run_tokens: Term,
) -> tuple[Term, Term]:
    """Seconds to load what one layer's slots miss of `chosen` tokens of `context`, in runs of `run_tokens` together.

    Returns the seconds of page walks and of the transfer; the longer of the two counts.

    Only the tokens that the last step did not choose are loaded (SpeContext, section 5.4). A walk of page tables for
    each page of the host's memory that they lie in bounds the link, and takes as long as a piece of HOST_PIECE_BYTES
    did that calibration found in a page of its own; all of them take at least what a copy does. A token's key and value
    adjoin, and so do those of its KV heads.
    """
    token_bytes = host.token_bytes / strategy.batch
    missed_bytes = chosen * (1 - strategy.offload.overlap) * token_bytes
    run = minimum(run_tokens, chosen)
    pieces = missed_bytes / (2 * run * shape.head_dim * machine.element_bytes)
    walks = strategy.batch * pages_of(pieces, run * token_bytes, context * token_bytes)
    page_walk_s = machine.link_seconds("host_gather", walks * HOST_PIECE_BYTES)
    return page_walk_s, machine.link_seconds("host_copy", strategy.batch * missed_bytes)


def pages_of(pieces: Term, piece_bytes: Term, held_bytes: Term) -> Term:
    """Pages of the host's memory, of those with `held_bytes`, that so many random pieces lie in, on average.

    piece_bytes: from a piece's first byte to its last.
    """
    pages = maximum(held_bytes / HOST_PAGE_BYTES, 1)
    drawn = pieces * maximum(piece_bytes / HOST_PAGE_BYTES, 1)
    return pages * (1 - (1 - 1 / pages) ** drawn)


def slot_lookup_seconds(machine: Machine, shape: ModelShape, strategy: Strategy, chosen: Term) -> Term:
    """Seconds to find which of a layer's `chosen` tokens are in slots, and room for the others.

    The kernel has a program for each set, as sampling has for each row, whose rates it is given.
    """
    slots = maximum(strategy.offload.budget, chosen)
    return machine.seconds(allocate_slots(strategy.batch, shape.kv_heads, chosen, slots), machine.rates["sampling"])


def pass_with_host_seconds(
    shape: ModelShape, strategy: Strategy, host: HostLayers, pass_s: Term, copy_s: Term, drafts_s: Term = 0
) -> Term:
    """A pass that takes `pass_s` with all layers on the device, of which those on the host take `copy_s` each to copy.

    The layers on the device come first, and before them the round's drafts, which take `drafts_s`.
    """
    layer_s = pass_s / shape.layers
    first_s = (shape.layers - host.layers) * layer_s
    ahead_s = minimum(minimum(strategy.offload.prefetch + 1, host.layers) * copy_s, drafts_s + first_s)
    pipelined_s = first_s + host.layers * copy_s - ahead_s + layer_s
    return where(host.some, maximum(pass_s, pipelined_s), pass_s)


def target_with_host_seconds(
    machine: Machine,
    shape: ModelShape,
    strategy: Strategy,
    host: HostLayers,
    context: Term,
    target_s: Term,
    choice_s: Term,
    drafts_s: Term,
) -> Term:
    """The target's pass with layers on the host; on the device it takes `target_s`, and its choices `choice_s`.

    A target that reads all tokens has layers streamed, from the round's drafts on, which take `drafts_s`. One that
    selects has missing tokens loaded for each of its queries, after they were looked up in slots.
    """
    stream_s = stream_seconds(machine, strategy, host, context)
    streamed_s = pass_with_host_seconds(shape, strategy, host, target_s + choice_s, stream_s, drafts_s)
    selected_s = _selected_seconds(machine, shape, strategy, host, context, target_s, choice_s)
    return where(strategy.target_reads_all, streamed_s, selected_s)


def _selected_seconds(
    machine: Machine,
    shape: ModelShape,
    strategy: Strategy,
    host: HostLayers,
    context: Term,
    target_s: Term,
    choice_s: Term,
) -> Term:
    """A pass whose queries have what they choose of every layer on the host looked up, and what misses loaded.

    A choice that is known before the first layer is loaded ahead, beside the layers before: either the kernels, held up
    by the loads, bound the pass, or the loads, held up by them. If all layers share it, it is looked up once. Any other
    is loaded where it is made.
    """
    chosen, run_tokens = minimum(strategy.target.budget, context), strategy.target.host_run_tokens
    loads = load_seconds(machine, shape, strategy, host, context, chosen, run_tokens)
    page_walk_s, transfer_s = (strategy.kv_reads * seconds for seconds in loads)
    load_s = maximum(page_walk_s, transfer_s)
    lookup_s = strategy.kv_reads * host.some * slot_lookup_seconds(machine, shape, strategy, chosen)
    layer_lookup_s = (1 - strategy.target.shared_across_layers) * lookup_s
    shared_lookup_s = strategy.target.shared_across_layers * lookup_s
    layer_s = target_s / shape.layers
    before_s = maximum(shape.layers - host.layers - strategy.offload.prefetch, 0) * layer_s
    loaded_s = before_s + host.layers * (load_s + layer_lookup_s + HELD_UP_BY_LAYERS * layer_s)
    held_up_s = target_s + host.layers * maximum(HELD_UP_BY_PAGE_WALKS * page_walk_s, HELD_UP_BY_TRANSFERS * transfer_s)
    ahead_s = choice_s + shared_lookup_s + maximum(held_up_s, host.some * loaded_s)
    return where(strategy.target.selected_before_pass, ahead_s, target_s + choice_s + host.layers * (load_s + lookup_s))


def prompt_to_host_seconds(machine: Machine, strategy: Strategy, host: HostLayers) -> Term:
    """Seconds to write the prompts' tokens of all layers on the host there, behind each layer's prefill."""
    return host.layers * machine.link_seconds("host_store", strategy.context * host.token_bytes)
