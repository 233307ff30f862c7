"""The C library's heap, on which what a process allocates and frees early decides what it holds later."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
OWN_MAPPING_BYTES = 1 << 20  # an allocation of this size has pages of its own, which go back when it is freed
TRIM_BYTES = 1 << 17  # of the heap's end that are free go back; glibc's default
RESULT_BYTES = 1 << 25  # the most that glibc takes from its heap
KEPT_BYTES = 1 << 26
CHUNK_BYTES = 9 << 20  # more than the temporaries of fitting, less than most weights
WAKE_S = 0.2  # between looks at signals
Result = TypeVar("Result")


def return_freed_memory() -> None:
    """Returns what the C library's allocator holds free to the system, at once and from now on.

    By default glibc takes allocations of up to 32 MB from its heap, where conversions and fitting leave gaps.
    """
    library = _thresholds(OWN_MAPPING_BYTES, TRIM_BYTES)
    if library is not None:
        library.malloc_trim(0)


def keep_freed_memory() -> None:
    """Keeps what operations allocate on the heap, and its free end, from now until `return_freed_memory`.

    With new pages for every result, which the system zeroes, a small model's prompt takes up to a fifth longer.
    """
    _thresholds(RESULT_BYTES, KEPT_BYTES)


def _thresholds(mapped: int, trimmed: int) -> ctypes.CDLL | None:
    """Sizes from which on glibc maps an allocation, and gives the heap's free end back; None for another library."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return None
    library.mallopt(M_MMAP_THRESHOLD, mapped)
    library.mallopt(M_TRIM_THRESHOLD, trimmed)
    return library


def call_with_separate_heap(function: Callable[[], Result], device: torch.device) -> Result:
    """Returns `function()`, or raises what it raises. On a CPU it runs in a thread, to which glibc gives another heap.

    Conversions and fitting free many megabytes between what they keep. On the caller's heap, later temporaries of any
    size would fill these gaps, which are then resident until the heap is trimmed: after the function. Until then the
    heap keeps what is freed, as new pages for the function's temporaries take longer than its arithmetic. On a GPU the
    heap does not matter, and a thread would start on the first device. A signal that interrupts the caller interrupts
    the function.
    """
    if device.type != "cpu":
        return function()
    _thresholds(CHUNK_BYTES, KEPT_BYTES)
    with ThreadPoolExecutor(max_workers=1) as pool:  # whose end waits until the function has cleaned up
        thread = pool.submit(threading.get_ident).result()
        running: Future[Result] | None = None
        try:
            running = pool.submit(function)
            while not wait([running], timeout=WAKE_S).done:
                pass  # a signal that arrives just before a wait does not end it
            return running.result()
        except BaseException as error:
            if running is None or not running.done():  # a signal may arrive as soon as the function runs
                raised = ctypes.py_object(type(error))
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
            raise
        finally:
            return_freed_memory()
