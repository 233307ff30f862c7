"""What runs on a separate heap leaves no gaps for the caller's temporaries, and ends as it would have in the caller."""

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ridgeplan.runtime.heap import call_with_separate_heap

CPU = torch.device("cpu")
# A function frees pieces between those that it keeps, each too small for pages of its own. Temporaries of the caller
# fill these gaps; then the caller needs as much memory at once, while the gaps are still resident.
GAPS = """
import ctypes, json, sys
import torch
from ridgeplan.runtime.heap import call_with_separate_heap, return_freed_memory
from ridgeplan.runtime.memory import MemoryMeter

KEPT_BYTES, FREED_BYTES, PIECES = 200_000, 400_000, 100
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]

def allocated(nbytes):
    address = library.malloc(nbytes)
    ctypes.memset(address, 1, nbytes)
    return address

def fit():
    freed = [(allocated(KEPT_BYTES), allocated(FREED_BYTES))[1] for _ in range(PIECES)]
    for address in freed:
        library.free(address)

return_freed_memory()
call_with_separate_heap(fit, torch.device("cpu")) if sys.argv[1] == "separate" else fit()
meter = MemoryMeter(torch.device("cpu"))
temporaries = [allocated(FREED_BYTES) for _ in range(PIECES)]
for address in temporaries:
    library.free(address)
large = torch.ones(PIECES * FREED_BYTES // 4)
print(json.dumps(meter.peak_bytes() / large.nbytes))
"""


def peak_in_units_of_the_largest(heap: str) -> float:
    """The growth of a new process after fitting on this heap."""
    ran = subprocess.run([sys.executable, "-c", GAPS, heap], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return float(json.loads(ran.stdout))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not reset peaks of memory")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries' heaps differ")
def test_gaps_of_a_separate_heap_stay_empty() -> None:
    assert peak_in_units_of_the_largest("separate") == pytest.approx(1, abs=0.1)
    assert peak_in_units_of_the_largest("same") == pytest.approx(2, abs=0.1)  # the gaps that this is about


@pytest.mark.parametrize(("device", "separate"), [("cpu", True), ("cuda", False)])
def test_it_returns_and_raises_what_the_function_does(device: str, separate: bool) -> None:
    """On a GPU in the caller's thread, whose current device a new thread would not have."""
    place = torch.device(device)
    assert (call_with_separate_heap(threading.get_ident, place) != threading.get_ident()) is separate
    with pytest.raises(ZeroDivisionError):
        call_with_separate_heap(lambda: 1 // 0, place)


def test_it_computes_with_the_callers_number_of_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert call_with_separate_heap(torch.get_num_threads, CPU) == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_a_signal_raises_ends_the_function_first(error: type[BaseException]) -> None:
    ended: list[type[BaseException]] = []

    def interrupt(*_: object) -> None:
        raise error

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            for _ in range(3000):
                time.sleep(0.01)
        except BaseException as raised:
            ended.append(type(raised))
            raise

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(error):
            call_with_separate_heap(work, CPU)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended == [error]
