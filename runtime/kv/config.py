"""Configuration of a KV cache: sizes, format, and which codes drafts read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ridgeplan.roofline.execution import quantized_groups
from ridgeplan.roofline.plan.plan import DraftCodes, HostPart, KVCache, KVFormat, Plan
from ridgeplan.roofline.plan.policies.evictions import kept_tokens, layer_budgets


@dataclass(frozen=True)
class KVCacheConfig:
    """A cache for `batch` rows of up to `context` tokens each, including generated ones.

    group: tokens that are quantized together. gamma: drafts per round, which need slots too. draft_planes: whether
    codes are also stored by token, for policies that select by codes or gather them. target_chooses_by_codes: whether
    the target's policy does. budgets: the largest number of prompt tokens that each layer keeps; empty if layers keep
    all. A prompt has up to `context` - `new_tokens` tokens.
    host_layers: number of offloaded (last) layers, with `host_part` on the host. window_tokens: tokens of such a
    layer that stay on the device, as codes for drafts or as slots for selected tokens. prefetch: number of offloaded
    layers that are copied ahead of the one being read. offload: whether the plan allows offloading. elastic: whether
    the tokens that a step selects are loaded into slots of a full-precision layer on the host. target_loads: whether
    the target's steps do so too; it then never reads a full layer. reuses_slots: whether slots keep earlier selections,
    so that only missing tokens are loaded. adaptive: whether layers leave one by one as rows grow; until then rows may
    use their memory and `spare_bytes` more. overhang: tokens beyond a round's that a draft's pass may write.
    windows: the sliding window of each layer in tokens, 0 for layers that see all; empty where none hides a token. A
    layer with a window holds its latest tokens alone, in full precision.
    """

    batch: int
    context: int
    format: KVFormat = KVFormat.FULL
    group: int = 128
    gamma: int = 0
    draft_codes: DraftCodes = DraftCodes.FULL
    draft_planes: bool = False
    target_chooses_by_codes: bool = False
    budgets: tuple[int, ...] = ()
    new_tokens: int = 0
    host_layers: int = 0
    host_part: HostPart = HostPart.ALL
    window_tokens: int = 0
    prefetch: int = 1
    offload: bool = False
    elastic: bool = False
    target_loads: bool = False
    reuses_slots: bool = True
    adaptive: bool = False
    spare_bytes: int = 0
    overhang: int = 0
    windows: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        plan: Plan,
        layers: int,
        host_layers: int = 0,
        spare_bytes: int = 0,
        windows: Sequence[int | None] = (),
    ) -> KVCacheConfig:
        """The cache that executes a plan with a model of `layers` layers, the last `host_layers` of them offloaded.

        windows: each layer's sliding window, if any has one.
        """
        hiding = tuple(window if window and window < plan.workload.final_context else 0 for window in windows)
        workload, speculation, placement = plan.workload, plan.speculation, plan.placement
        return cls(
            batch=workload.batch,
            context=workload.final_context,
            format=plan.kv.format,
            group=plan.kv.group,
            gamma=speculation.gamma,
            overhang=speculation.overhang,
            windows=hiding if any(hiding) else (),
            draft_codes=speculation.codes,
            draft_planes=plan.gathers_codes,
            target_chooses_by_codes=plan.attention.selection.needs_codes,
            budgets=layer_budgets(plan, layers),
            new_tokens=workload.new_tokens,
            host_layers=host_layers,
            host_part=placement.part,
            window_tokens=placement.budget,
            prefetch=placement.prefetch,
            offload=placement.offload,
            elastic=placement.offload and plan.loads_chosen,
            target_loads=placement.offload and plan.attention.active,
            reuses_slots=placement.elastic,
            adaptive=placement.adaptive and host_layers > 0,
            spare_bytes=spare_bytes,
        )

    @property
    def buffered(self) -> bool:
        """`format.buffered`: full-precision slots are a buffer for recent tokens."""
        return self.format.buffered

    @property
    def target_uses_codes(self) -> bool:
        """Whether a flush changes the values or the addresses that the target reads."""
        return self.buffered or self.target_chooses_by_codes or self.target_loads

    @property
    def round_slots(self) -> int:
        """Slots for the tokens of a round."""
        return self.gamma + 1 + self.overhang

    @property
    def max_generated(self) -> int:
        """Bound on the tokens that grow old during a generation, whole groups."""
        return ((self.new_tokens + self.round_slots) // self.group + 1) * self.group

    @property
    def drafts_read_upper(self) -> bool:
        """Whether drafts read the upper codes alone."""
        return self.draft_codes is DraftCodes.UPPER

    @property
    def buffer_slots(self) -> int:
        """Slots for recent tokens where old ones are elsewhere: two groups, and a round's tokens."""
        return 2 * self.group + self.round_slots

    @property
    def streams(self) -> bool:
        """Whether passes of the target have whole layers copied from the host."""
        return self.host_layers > 0 and not self.target_loads

    @property
    def keeps_window(self) -> bool:
        """Whether the latest groups of a layer on the host stay on the device, for drafts."""
        return self.gamma > 0 and not self.elastic

    @property
    def window_slots(self) -> int:
        """Slots for old tokens of a full-precision layer on the host, whole groups.

        For each query of a pass of the target as many as it may choose: all are loaded before the first one reads.
        """
        if self.elastic:
            return -(-self.window_tokens // self.group) * self.group * (self.gamma + 1 if self.target_loads else 1)
        return self.window_groups * self.group if self.keeps_window else 0

    @property
    def host_slots(self) -> int:
        """Slots on the device of a full-precision layer on the host: for some old tokens, then for recent ones."""
        return self.window_slots + self.buffer_slots

    @property
    def window_groups(self) -> int:
        """Groups of an offloaded layer that drafts read: the first, and at least one of the latest."""
        return max(2, self.window_tokens // self.group)

    def kept(self, tokens: int) -> tuple[int, ...]:
        """Tokens of a prompt of `tokens` that each layer keeps; empty if layers keep all."""
        kept = kept_tokens(tokens, self.budgets, self._step) if self.budgets else ()
        if not self.windows:
            return kept
        kept = kept or (tokens,) * len(self.windows)
        return tuple(min(tokens, window) if window else count for window, count in zip(self.windows, kept, strict=True))

    def chosen(self, tokens: int) -> tuple[int, ...]:
        """`kept` of the layers in which an eviction may choose: those without a window."""
        return tuple(count for layer, count in enumerate(self.kept(tokens)) if not self.window(layer))

    def stored(self, tokens: int) -> int:
        """Tokens of a prompt of `tokens` in the layers without a window that keep the most."""
        return max(self.chosen(tokens), default=tokens)

    def window(self, layer: int) -> int:
        """The sliding window of a layer that holds no other tokens; 0 for any other layer."""
        return self.windows[layer] if self.windows else 0

    @property
    def of_windows(self) -> KVCacheConfig:
        """The configuration of layers that hold a window."""
        return replace(self, format=KVFormat.FULL, draft_codes=DraftCodes.FULL, draft_planes=False)

    def passes(self, stored: Sequence[int], tokens: int, max_tokens: int) -> Iterator[slice]:
        """Splits `tokens` tokens that follow each row's `stored` ones into passes of up to `max_tokens`.

        No pass crosses a multiple of the group in any row, as a flush there changes what the target reads.
        """
        start = 0
        while start < tokens:
            group_left = min(self.group - (count + start) % self.group for count in stored)
            stop = min(tokens, start + max_tokens, start + group_left)
            yield slice(start, stop)
            start = stop

    def capacity(self, layer: int) -> int:
        """Tokens that a row may hold in a layer, generated ones included."""
        if self.window(layer):  # and a group, which leaves at once
            return self.window(layer) + self.group
        if not self.budgets:
            return self.context
        return min(self.context, max(self.budgets[layer], self._step) + self.new_tokens)

    @property
    def longest(self) -> int:
        """The largest `capacity` of the layers without a window."""
        if not self.budgets:
            return self.context
        return max(self.capacity(layer) for layer in range(len(self.budgets)) if not self.window(layer))

    def slots(self, tokens: int) -> int:
        """Full-precision slots for `tokens` tokens and a round's: for all of them, or two groups for a buffer."""
        return self.buffer_slots if self.buffered else tokens + self.round_slots

    def groups(self, tokens: int) -> int:
        """Groups of codes allocated for `tokens` tokens and a round's."""
        return max(1, self.quantized_groups(tokens + self.round_slots))

    def quantized_groups(self, tokens: int) -> int:
        """Groups held as codes for a row of `tokens` tokens; `Cache.quantized` is the device version, in tokens."""
        return quantized_groups(tokens, self.group) if self.format.quantized else 0

    @property
    def _step(self) -> int:
        return KVCache(self.format, self.group).step
