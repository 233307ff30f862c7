"""The scratch arena: what it holds, and that the memory model says the same."""

import itertools

import torch

from ridgeplan.roofline import memory
from ridgeplan.runtime.buffers import Arena


def test_the_arena_takes_what_the_memory_model_says():
    sizes = [0, 256, 512, 768, 1280]
    for arena_bytes, buffers in itertools.product([0, 256, 512, 1024, 1280, 4096], itertools.product(sizes, repeat=4)):
        arena = Arena(torch.empty(arena_bytes, dtype=torch.uint8))
        taken = [arena.empty((size // 4,), torch.float32) for size in buffers]
        inside = [buffer.untyped_storage().data_ptr() == arena._memory.data_ptr() for buffer in taken if buffer.nbytes]
        taken_bytes = sum(size for size, lies in zip(filter(None, buffers), inside, strict=True) if lies)
        assert taken_bytes == memory.arena_bytes(arena_bytes, buffers) == arena.reached


def test_tensors_of_an_arena_do_not_overlap_until_it_is_cleared():
    arena = Arena(torch.zeros(2048, dtype=torch.uint8))
    shapes = ((3, 5), torch.float32), ((7,), torch.bfloat16), ((2, 3), torch.int64)
    taken = [arena.empty(shape, dtype).fill_(value) for value, (shape, dtype) in enumerate(shapes, start=1)]
    for value, (tensor, (shape, dtype)) in enumerate(zip(taken, shapes, strict=True), start=1):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert (tensor == value).all()
    reached = arena.reached
    arena.clear()
    assert arena.empty((1,), torch.uint8).data_ptr() == taken[0].data_ptr()
    assert arena.reached == reached
