"""Time of layers on the host: their copies over PCIe, as a pipeline with the layers that are on the device.

A layer is copied while those before it are computed. Copies of the first ones start with the round, beside its drafts,
as far as there are slots for them; each later one starts once a slot is free.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeplan.roofline.catalog.model_shape import ModelShape
from ridgeplan.roofline.cost import Term, maximum, minimum, where
from ridgeplan.roofline.execution import HOST_PAGE_BYTES, HOST_PIECE_BYTES, mean_quantized_tokens, token_row_bytes
from ridgeplan.roofline.latency import Machine
from ridgeplan.roofline.memory import Departures, HostLayers
from ridgeplan.roofline.ops import allocate_slots
from ridgeplan.roofline.strategy import Strategy

# On an H200, loads and the kernels that run beside them slow each other down. Kernels lose a share of the time that a
# layer's loads take alone: HELD_UP_BY_PAGE_WALKS where page tables are walked for single pieces, HELD_UP_BY_TRANSFERS
# where the bytes bound the loads. Loads lose HELD_UP_BY_KERNELS of the time alone of all kernels of the pass, whichever
# layers these are of. Fitted to generation and placements of specontext_h200.json up to 28k tokens, but for the
# first, which they have at 0.31, and the retrieval head at an overlap of 90% at 0.44 (offload_h200.json, elastic).
HELD_UP_BY_PAGE_WALKS, HELD_UP_BY_TRANSFERS, HELD_UP_BY_KERNELS = 0.34, 0.19, 0.34

# Gathers move this share of what copies do where their bytes bound them: 43.7 of 49.7 GB/s alone with pieces of 4 KB
# (offload_h200.json, elastic, one set for all heads at an overlap of 0%), up to 49 with pieces of 256 bytes of short
# rows (specontext_h200.json, placements).
GATHER_LINK_SHARE = 0.9

# Small launches that a layer on the host adds to a pass whatever it loads: of the gather, of what joins its stream, and
# waits between both. On an H200, 24 layers that load nothing add 9 to 10 us each (offload_h200.json, elastic, "round
# that loads nothing" beside "without a limit").
HOST_LAYER_KERNELS = 5


@dataclass(frozen=True)
class HostLink:
    """A strategy's traffic between the device and its layers on the `host`."""

    shape: ModelShape
    machine: Machine
    strategy: Strategy
    host: HostLayers

    def stream_seconds(self, context: Term) -> Term:
        """Seconds to copy all old tokens of one layer, at `context` tokens."""
        old = mean_quantized_tokens(context, self.strategy.kv_group)
        return self.machine.link_seconds("host_copy", old * self.host.token_bytes)

    def prompt_seconds(self) -> Term:
        """Seconds to write the prompts' tokens of all layers on the host there, behind each layer's prefill."""
        layer_bytes = self.strategy.context * self.host.token_bytes
        return self.host.layers * self.machine.link_seconds("host_store", layer_bytes)

    def departure_seconds(self, departures: Departures) -> Term:
        """Seconds in which layers leave during a generation: each is written to the host, and the others spread.

        Rows that spread are copied twice, as they may overlap where they were.
        """
        start, end = self.strategy.context, self.strategy.context + self.strategy.new_tokens
        moved = departures.final - departures.layers_at(start)
        middle = (maximum(departures.threshold(0), start) + end) / 2
        written_s = self.machine.link_seconds("host_store", middle * self.host.token_bytes)
        return moved * (written_s + 4 * departures.memory_bytes / self.machine.bandwidth_bytes_per_s)

    def load_seconds(self, context: Term, chosen: Term, run_tokens: Term) -> tuple[Term, Term]:
        """Seconds to load what a layer's slots miss of `chosen` tokens of `context`, in runs of `run_tokens` together.

        Returns the seconds of page walks and of the transfer; the longer of the two counts.

        Only the tokens that the last step did not choose are loaded (SpeContext, section 5.4). Each
        page of the host's memory that holds some of them costs a walk of the page tables. A walk takes as long as
        calibration measured for a piece of HOST_PIECE_BYTES in a page of its own. All loads together take at least as
        long as a gather of their bytes that walks nowhere. A token's key and value adjoin, and so do those of its KV
        heads.
        """
        batch = self.strategy.batch
        token_bytes = self.host.token_bytes / batch
        missed_bytes = chosen * (1 - self.strategy.offload.overlap) * token_bytes
        run = maximum(minimum(run_tokens, chosen), 1)  # short texts choose none
        full_bytes = self.shape.head_dim * self.machine.element_bytes
        head_bytes = where(self.strategy.loads_codes, token_row_bytes(self.shape.head_dim), full_bytes)
        pieces = missed_bytes / (2 * run * head_bytes)
        walks = batch * pages_of(pieces, run * token_bytes, context * token_bytes)
        page_walk_s = self.machine.link_seconds("host_gather", walks * HOST_PIECE_BYTES)
        return page_walk_s, self.machine.link_seconds("host_copy", batch * missed_bytes / GATHER_LINK_SHARE)

    def lookup_seconds(self, chosen: Term) -> Term:
        """Seconds to find which of a layer's `chosen` tokens are in slots, and room for the others.

        The kernel has a program for each set, as sampling has for each row, whose rates it is given.
        """
        slots = maximum(self.strategy.offload.budget, chosen)
        lookup = allocate_slots(self.strategy.batch, self.shape.kv_heads, chosen, slots)
        return self.machine.seconds(lookup, self.machine.rates["sampling"])

    def draft_seconds(self, context: Term, chosen: Term) -> Term:
        """Seconds to load what one draft chooses of every layer on the host."""
        chosen = minimum(chosen, self.strategy.offload.budget)
        page_walk_s, transfer_s = self.load_seconds(context, chosen, self.strategy.draft.host_run_tokens)
        return self.strategy.draft.loads * self.host.layers * maximum(page_walk_s, transfer_s)

    def target_seconds(self, context: Term, target_s: Term, choice_s: Term, drafts_s: Term) -> Term:
        """The target's pass, which on the device takes `target_s`, and its choices `choice_s`.

        A target that reads all tokens has layers streamed, from the round's drafts on, which take `drafts_s`. One that
        selects has missing tokens loaded for each of its queries, after they were looked up in slots.
        """
        streamed_s = self.streamed_seconds(target_s + choice_s, self.stream_seconds(context), drafts_s)
        return where(self.strategy.target_reads_all, streamed_s, self._selected_seconds(context, target_s, choice_s))

    def streamed_seconds(self, pass_s: Term, copy_s: Term, drafts_s: Term = 0) -> Term:
        """A pass that takes `pass_s` with all layers on the device; those on the host take `copy_s` each to copy.

        The layers on the device come first, and before them the round's drafts, which take `drafts_s`.
        """
        layers, layer_s = self.host.layers, pass_s / self.shape.kv_layers
        first_s = (self.shape.kv_layers - layers) * layer_s
        ahead_s = minimum(minimum(self.strategy.offload.prefetch + 1, layers) * copy_s, drafts_s + first_s)
        pipelined_s = first_s + layers * copy_s - ahead_s + layer_s
        return where(self.host.some, maximum(pass_s, pipelined_s), pass_s)

    def _selected_seconds(self, context: Term, target_s: Term, choice_s: Term) -> Term:
        """A pass whose queries have what they choose of every layer on the host looked up, and what misses loaded.

        A choice that is known before the first layer is loaded ahead, beside the layers before: either the kernels,
        held up by the loads, bound the pass, or the loads, held up by them. The first loads, of one layer more than are
        loaded ahead, start with the pass, and one more with each layer on the host. If all layers share the choice, it
        is looked up once. Any other is loaded where it is made.
        """
        target, host, kv_reads = self.strategy.target, self.host, self.strategy.kv_reads
        # Generated tokens that the target keeps stay in their slots: they are looked up, and never loaded.
        loads = self.load_seconds(context, self.strategy.target_loaded(context), target.host_run_tokens)
        page_walk_s, transfer_s = (kv_reads * seconds for seconds in loads)
        load_s = maximum(page_walk_s, transfer_s)
        lookup_s = kv_reads * host.some * self.lookup_seconds(self.strategy.target_tokens(context))
        layer_lookup_s = (1 - target.shared_across_layers) * lookup_s
        shared_lookup_s = target.shared_across_layers * lookup_s
        target_s = target_s + host.layers * HOST_LAYER_KERNELS * small_kernel_seconds(self.machine)
        layer_s = target_s / self.shape.kv_layers
        each_s, later = load_s + layer_lookup_s, maximum(host.layers - self.strategy.offload.prefetch - 1, 0)
        first_s = (self.shape.kv_layers - host.layers) * layer_s
        loading_s = maximum(host.layers * each_s, minimum(later, 1) * first_s + later * each_s)
        loaded_s = loading_s + HELD_UP_BY_KERNELS * target_s
        delay_s = maximum(HELD_UP_BY_PAGE_WALKS * page_walk_s, HELD_UP_BY_TRANSFERS * transfer_s)
        ahead_s = choice_s + shared_lookup_s + maximum(target_s + host.layers * delay_s, host.some * loaded_s)
        return where(target.selected_before_pass, ahead_s, target_s + choice_s + host.layers * (load_s + lookup_s))


def small_kernel_seconds(machine: Machine) -> Term:
    """A small kernel of torch within a graph: what the class of one such, row gathers, takes for a launch."""
    return machine.rates["gather"].launch_s


def pages_of(pieces: Term, piece_bytes: Term, held_bytes: Term) -> Term:
    """Pages of the host's memory, of those with `held_bytes`, that so many random pieces lie in, on average.

    piece_bytes: from a piece's first byte to its last.
    """
    pages = maximum(held_bytes / HOST_PAGE_BYTES, 1)
    drawn = pieces * maximum(piece_bytes / HOST_PAGE_BYTES, 1)
    return pages * (1 - (1 - 1 / pages) ** drawn)
