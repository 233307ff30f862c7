"""Triton's kernels of KV on the host compile for Hopper without a GPU, within its limits."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

ADA_SHARED_BYTES = 99 * 1024
INDEXES = ["slot_of", "unit_of", "used", "step", "index", "count", "into"]
OUT = [f"out_{name}" for name in ("slots", "units", "into", "count")]
STRIDES = [f"{prefix}{axis}stride" for prefix in ("", "slot_") for axis in ("batch_", "head_")]
SLOTS = dict.fromkeys((*INDEXES, *OUT), "*i32") | dict.fromkeys(("units", "slots", "width"), "i32")
SLOTS |= dict.fromkeys(("wanted", "loaded"), "*i64")
GATHER = dict.fromkeys(("units", "into", "count"), "*i32") | dict.fromkeys(("width", "rows", *STRIDES), "i32")
GATHER |= dict.fromkeys(("keys", "values", "slot_keys", "slot_values"), "*bf16")
GATHER |= dict.fromkeys(("token_stride", "slot_stride"), "i32")
STORE_STRIDES = [f"{prefix}{axis}stride" for prefix in ("", "out_") for axis in ("batch_", "head_")]
STORE = {"recent": "*bf16", "out": "*bf16", "first": "*i32", "mask": "*i1", "slot_stride": "i32", "out_stride": "i32"}
STORE |= dict.fromkeys(STORE_STRIDES, "i32")
COPY = {"source": "*i32", "out": "*i32", "count": "*i32", "source_entries": "i32", "out_entries": "i32"}


def job(kernel: str, warps: int, types: dict[str, str], **constants: Any) -> dict[str, Any]:
    return {
        "module": "offload.triton",
        "kernel": kernel,
        "types": types,
        "constants": constants,
        "options": {"num_warps": warps},
    }


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's wheels are for Linux")
def test_every_residency_kernel_compiles_for_hopper(
    compiled_for_hopper: Callable[[dict[str, Any]], dict[str, int]],
) -> None:
    gather = {"KV_HEADS": 8, "PARTS": 9, "TURNS": 2, "ROWS": 16, "HEAD_DIM": 128, "PADDED": 128}
    store = {name: value for name, value in gather.items() if name not in ("PARTS", "TURNS", "ROWS")}
    jobs = {
        "group store": job("_store_group_kernel", 4, STORE, GROUP=128, BLOCK=32, **store),
        "leading copy": job("_copy_leading_kernel", 8, COPY, ENTRY_WORDS=2048, HEADS=8, PARTS=9, BLOCK=4096),
        "slots": job("_take_slots_kernel", 8, SLOTS, SLOTS=4096, WIDTH=2048),
        "most slots": job("_take_slots_kernel", 8, SLOTS, SLOTS=16384, WIDTH=8192),
        "gather": job("_gather_kernel", 4, GATHER, SETS=8, PAGE=1, **gather),
        "gather pages": job("_gather_kernel", 4, GATHER, SETS=1, PAGE=16, **gather),
    }
    shared = compiled_for_hopper(jobs)
    assert all(used <= ADA_SHARED_BYTES for used in shared.values()), shared
