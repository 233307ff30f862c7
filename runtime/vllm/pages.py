"""A paged KV cache of codes: its layout in vLLM's memory, and the full-precision buffers of pages that are not full.

A page holds one group of 128 tokens of a layer. Full pages are codes; the tokens of the page that a sequence is filling
lie in a buffer in full precision, and become codes when the page is full. So what a page holds depends on the tokens up
to its end alone, not on how they were scheduled: a page that prefix caching hands to another sequence is what that
sequence would have written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeplan.kernels.kv_cache import append_to_pages, dequantize, quantize_to_pages, shift_slots
from ridgeplan.kernels.kv_cache.cuda import GROUP
from ridgeplan.kernels.kv_cache.layout import QuantizedKV

SCALE_BYTES = 8  # per token and head that vLLM adds to the bytes of `int8_per_token_head`: two float32


def page_width(head_dim: int) -> int:
    """Bytes of a page per KV head, as vLLM counts them for its dtype `int8_per_token_head`."""
    return GROUP * (2 * head_dim + SCALE_BYTES)


def codes_of(cache: Tensor, head_dim: int) -> QuantizedKV:
    """vLLM's memory of a layer, [pages, kv_heads, `page_width`] in bytes, as codes with a row of one group per page.

    Planes follow each other, each with all pages. Raises ValueError where they would not fit: scales of 128 tokens and
    of `head_dim` channels take at most what vLLM counts up to 128 channels.
    """
    pages, kv_heads, width = cache.shape
    shapes = {
        "key_upper": (GROUP, head_dim // 2),
        "key_lower": (GROUP, head_dim // 2),
        "value_upper": (head_dim, GROUP // 2),
        "value_lower": (head_dim, GROUP // 2),
        "key_scale": (2 * head_dim,),
        "key_min": (2 * head_dim,),
        "value_scale": (2 * GROUP,),
        "value_min": (2 * GROUP,),
    }
    needed = sum(torch.Size(shape).numel() for shape in shapes.values())
    if needed > width:
        raise ValueError(f"a page of {needed} bytes per KV head does not fit vLLM's {width}: head_dim is {head_dim}")
    memory, start, planes = cache.view(torch.uint8).flatten(), 0, {}
    for name, shape in shapes.items():
        stop = start + pages * kv_heads * torch.Size(shape).numel()
        plane = memory[start:stop].view(pages, kv_heads, 1, *shape)
        planes[name] = plane if len(shape) == 2 else plane.view(torch.float16)
        start = stop
    return QuantizedKV(**planes)


@dataclass(frozen=True, eq=False)
class LayerPages:
    """A layer's cache. codes: of full pages. keys, values: [buffers + 1, kv_heads, slots, head_dim], of open ones.

    A buffer's first GROUP slots are the open page. With drafts there are more, for tokens behind the page's end that
    may be rejected. The last buffer belongs to no sequence: rows that pad a batch read and write it.
    """

    codes: QuantizedKV
    keys: Tensor
    values: Tensor

    def append(self, keys: Tensor, values: Tensor, slots: Tensor, closing: Tensor) -> None:
        """Writes tokens [n, kv_heads, head_dim] to their slots, and buffers that one fills to its page in `closing`."""
        append_to_pages(keys, values, self.keys, self.values, self.codes, slots, closing)

    def slots_of_all(self, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values in which each of `rows` rows has the slots of all buffers: slot i of buffer b, of C slots, is
        b * kv_heads * C + i. A view, for kernels that write a row's token without knowing of buffers."""
        buffers, kv_heads, slots, head_dim = self.keys.shape
        shape = rows, kv_heads, (buffers - 1) * kv_heads * slots + slots, head_dim
        strides = 0, slots * head_dim, head_dim, 1
        return self.keys.as_strided(shape, strides), self.values.as_strided(shape, strides)

    def turn(self, turned: Tensor) -> None:
        """Moves tokens behind the page's end to the start of the next page, in buffers where `turned` [buffers + 1]."""
        shift_slots(self.keys, self.values, GROUP, turned)

    def fill(self, filled: Tensor) -> None:
        """Writes each buffer's first GROUP slots as codes to its page in `filled`, int32 [buffers + 1, 1], or -1."""
        quantize_to_pages(self.keys[:, :, :GROUP], self.values[:, :, :GROUP], self.codes, filled)

    def read(self, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of full pages [n], each [n, GROUP, kv_heads, head_dim] as FlashAttention takes pages."""
        decoded = dequantize(self.codes.gathered(pages), True, dtype)
        keys, values = (x[0].unflatten(1, (-1, GROUP)).permute(1, 2, 0, 3) for x in decoded)
        return keys, values


class OpenPages:
    """Which buffer holds the tokens of which open page. All layers share the assignment.

    vLLM names a sequence by its row in the batch, which changes, so a buffer is found by its page, which only that
    sequence fills. A sequence that ends or is preempted leaves a buffer behind: the one that was used longest ago is
    taken next. Those in use are at most one per sequence, and while one of them waits no new sequence starts (vLLM
    schedules running sequences first), so its buffer is not taken.
    """

    def __init__(self, buffers: int, device: torch.device) -> None:
        self.count = buffers
        self.owner = torch.full((buffers + 1,), -1, dtype=torch.int32, device=device)
        self.used = torch.full((buffers + 1,), -1, dtype=torch.int64, device=device)
        self.step = 0

    def assign(
        self, before: Tensor, after: Tensor, previous: Tensor | None = None, spilled: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The buffer of each row, int32 [rows], in a step before which `before` is its open page, and after it `after`.

        All are int32 [rows]; a row without tokens in an open page has none there, 0 or less, and one that has neither
        gets the last buffer. With drafts, a step may fill the row's page and write behind its end, so that the row's
        buffer is still that of `previous`, the page before the open one: such a row is True in the second result, bool
        [rows], and its buffer becomes that of `before`. spilled: pages behind the end that the step writes to, which
        have no buffer of their own yet. Does not synchronize.
        """
        self.step += 1
        owner, used = self.owner[: self.count], self.used[: self.count]
        held = (owner[None] == before[:, None]) & (before > 0)[:, None]
        hit, place = held.max(1)
        turned = torch.zeros_like(hit)
        if previous is not None:
            left = (owner[None] == previous[:, None]) & (previous > 0)[:, None]
            was_left, old = left.max(1)
            turned = was_left & ~hit & (before > 0)
            hit, place = hit | turned, torch.where(turned, old, place)
            kept = left & turned[:, None]
            held |= kept
            owner.masked_fill_(left.any(0) & ~kept.any(0), -1)  # of rows that begin a page
        needed = hit | (after > 0)
        used.masked_fill_(held.any(0), self.step)
        free_first = torch.where(owner < 0, -1, used).argsort(stable=True)
        rank = ((needed & ~hit).cumsum(0) - 1).clamp(0, self.count - 1)
        buffers = torch.where(hit, place, torch.where(needed, free_first[rank], self.count))
        stays = torch.where(after > 0, after, -1)
        # A page that is handed out again may still be that of the buffer of a sequence that had it open when it ended.
        taken = stays if spilled is None else torch.cat([stays, spilled])
        owner.masked_fill_(((owner[None] == taken[:, None]) & (taken > 0)[:, None]).any(0), -1)
        self.owner.scatter_(0, buffers, stays)
        self.used.scatter_(0, buffers, torch.full_like(buffers, self.step))
        return buffers.int(), turned
