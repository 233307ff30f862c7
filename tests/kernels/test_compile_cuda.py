"""Every CUDA source compiles for Hopper on a machine without a GPU, within its registers and shared memory.

NVRTC is what torch compiles kernels with at run time; its wheel `nvidia-cuda-nvrtc` works without a GPU.
"""

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import pytest
import torch
from grids import pairs

from ridgeplan.kernels.attention import cuda as attention
from ridgeplan.kernels.attention.cuda import BY_QUERY, MERGE_PARTS, AttentionVariant, Occupancy
from ridgeplan.kernels.device.cuda import KernelParams, include_options, program
from ridgeplan.kernels.experts import cuda as experts
from ridgeplan.kernels.experts.schedule import MXFP4, CodeFormat, make_experts_schedule, tiled_format
from ridgeplan.kernels.kv_cache import cuda as quantize_cuda
from ridgeplan.kernels.linear import cuda as linear
from ridgeplan.kernels.linear.schedule import (
    DeviceLimits,
    LinearSchedule,
    make_dense_schedule,
    make_integer_schedule,
    make_quantized_schedule,
)
from ridgeplan.kernels.sampling import cuda as top_k_top_p
from ridgeplan.kernels.sparse_attention import cuda as sparse

WHEEL = "nvidia-cuda-nvrtc"
REGISTERS = 65536  # of an SM
H200 = DeviceLimits(sm_bytes=228 * 1024, clusters=(132, 66, 30, 15))
# That a multicast copy would be slower on other GPUs if compiled for sm_90, which is what torch does.
TOLERATED = "Advisory: '.multicast::cluster' modifier"


@dataclass(frozen=True)
class Compiled:
    """What NVRTC says of a kernel: warnings, registers of a thread, spilled and shared bytes; PTX where asked for."""

    warnings: list[str]
    registers: int
    spilled: int
    shared: int
    ptx: str


Compile = Callable[..., Compiled]


class Nvrtc:
    """NVRTC's C interface, of which torch uses the same calls."""

    def __init__(self, libraries: Sequence[str]) -> None:
        for path in sorted(libraries):  # the builtins first: the compiler opens them by name
            self.library = ctypes.CDLL(path)

    def compile(self, text: str, entry: str, options: Sequence[str], arch: str = "sm_90") -> Compiled:
        """Raises RuntimeError with the compiler's messages where it refuses."""
        library, nvrtc_program = self.library, ctypes.c_void_p()
        library.nvrtcCreateProgram(ctypes.byref(nvrtc_program), text.encode(), f"{entry}.cu".encode(), 0, None, None)
        report = ["--ptxas-options=-v"] if arch.startswith("sm") else []
        arguments = [option.encode() for option in (f"-arch={arch}", *include_options(), *options, *report)]
        status = library.nvrtcCompileProgram(
            nvrtc_program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments)
        )
        log = self._text(nvrtc_program, "ProgramLog")
        ptx = "" if report or status else self._text(nvrtc_program, "PTX")
        library.nvrtcDestroyProgram(ctypes.byref(nvrtc_program))
        if status:
            raise RuntimeError(log)
        warnings = [line for line in log.splitlines() if "warning" in line and TOLERATED not in line]
        return Compiled(warnings, *(_bytes(log, what) for what in ("Used", "spill stores", "smem")), ptx)

    def _text(self, nvrtc_program: ctypes.c_void_p, what: str) -> str:
        size = ctypes.c_size_t()
        getattr(self.library, f"nvrtcGet{what}Size")(nvrtc_program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self.library, f"nvrtcGet{what}")(nvrtc_program, buffer)
        return buffer.value.decode()


def _bytes(log: str, what: str) -> int:
    """The number that ptxas reports of `what`; 0 where it says nothing."""
    match = re.search(rf"{what} (\d+)|(\d+) bytes {what}", log)
    return int(match[1] or match[2]) if match else 0


@pytest.fixture(scope="module")
def compile_cuda() -> Compile:
    try:
        files = distribution(WHEEL).files or []
    except PackageNotFoundError:
        pytest.skip(f"needs the wheel {WHEEL}")
    libraries = [str(path.locate()) for path in files if re.match(r"libnvrtc[^.]*\.so\.", path.name)]
    return cache(Nvrtc(libraries).compile)


def attention_kernel(
    compile_cuda: Compile, variant: AttentionVariant, kernel: str = "attend", parts: int = 1
) -> Compiled:
    occupancy = Occupancy(variant, num_sms=132, sm_bytes=H200.sm_bytes)
    options = tuple(variant.options(occupancy.stages, parts))
    arch = "sm_90a" if variant.warpgroup else "sm_90"
    return compile_cuda(program(attention.SOURCES[kernel], attention.AttentionParams), kernel, options, arch)


# Bytes that are written to local memory outside the loops over tokens, by variant; the others spill nothing.
ATTENTION_SPILLS = {(128, 8, 8): 16, (128, 4, 24): 36, (128, 8, 24): 84}
SPILLS_BY_QUERY = {(128, 8, 24): 92}  # of scores for each query
SPILLS_PAGED = {(128, 8, 8): 20}
# Of these, up to three words of heads of 128 inside the loop.
SPILLS_WARPGROUP = {(64, 4, 32): 12, (64, 8, 32): 4, (64, 4, 64): 8, (64, 8, 64): 4, (128, 4, 64): 24, (128, 8, 64): 16}
MAIN = [AttentionVariant(d, bits, True, 8) for d in (64, 128) for bits in (0, 4, 8)]
MORE = [AttentionVariant(d, bits, True, rows) for d in (64, 128) for bits in (0, 4, 8) for rows in (16, 24, 32)]
HALF = [AttentionVariant(64, bits, False, 8) for bits in (0, 4)]
SCORED = [AttentionVariant(128, bits, True, rows, 2) for bits in (0, 8) for rows in (24, 32)]
SCORED += [AttentionVariant(128, bits, True, 32, 1) for bits in (0, 4, 8)]
SCORED += [AttentionVariant(128, bits, True, rows, BY_QUERY) for bits in (0, 8) for rows in (24, 32)]


PAGED = [
    AttentionVariant(d, bits, True, rows, paged=True) for d in (64, 128) for bits in (4, 8) for rows in (8, 24, 32)
]
SINKS = [AttentionVariant(d, bits, True, rows, sinks=True) for d in (64, 128) for bits in (0, 4, 8) for rows in (8, 24)]
WARPGROUP = [
    AttentionVariant(d, bits, bf16, rows, warpgroup=True)
    for d in (64, 128)
    for bits in (4, 8)
    for rows, bf16 in ((24, False), (32, True), (64, True))
]
FAST = [AttentionVariant(64, 0, True, 8), AttentionVariant(128, 4, True, 8), AttentionVariant(128, 8, True, 8)]
FAST += [AttentionVariant(128, 8, True, 8, paged=True), AttentionVariant(64, 8, True, 8, sinks=True)]


def fast_and_slow(fast: Sequence[Any], variants: Sequence[Any]) -> list[Any]:
    """The fast variants, then the others as slow cases: each takes NVRTC one to seven seconds."""
    others = [variant for variant in variants if variant not in fast]
    return [
        *fast,
        *(pytest.param(*case if type(case) is tuple else (case,), marks=pytest.mark.slow) for case in others),
    ]


@pytest.mark.parametrize(
    "variant", fast_and_slow(FAST, MAIN + MORE + HALF + SCORED + PAGED + SINKS + WARPGROUP), ids=str
)
def test_attention(variant: AttentionVariant, compile_cuda: Compile) -> None:
    compiled = attention_kernel(compile_cuda, variant)
    assert compiled.warnings == []
    assert compiled.registers * attention.THREADS * variant.ctas_per_sm <= REGISTERS
    spills = ATTENTION_SPILLS | (SPILLS_BY_QUERY if variant.scores == BY_QUERY else {})
    spills |= SPILLS_PAGED if variant.paged else {}
    spills = SPILLS_WARPGROUP if variant.warpgroup else spills
    assert compiled.spilled <= spills.get((variant.head_dim, variant.bits, variant.rows), 0)
    assert compiled.shared <= variant.static_bytes(Occupancy(variant, 132, H200.sm_bytes).stages)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("head_dim", "parts"), pairs([64, 128], MERGE_PARTS, 0))
def test_the_reduction_of_many_splits(head_dim: int, parts: int, sinks: bool, compile_cuda: Compile) -> None:
    variant = AttentionVariant(head_dim, 4, True, 8, sinks=sinks)
    compiled = attention_kernel(compile_cuda, variant, "merge", parts)
    assert compiled.warnings == []
    assert compiled.spilled == 0


def linear_kernel(compile_cuda: Compile, schedule: LinearSchedule | None) -> Compiled:
    assert schedule is not None
    compiled = compile_cuda(program(linear.SOURCE, linear.LinearParams), linear.ENTRY, schedule.options)
    assert compiled.warnings == []
    assert compiled.registers * schedule.threads <= REGISTERS
    return compiled


@pytest.mark.parametrize(
    ("rows", "inputs", "gated"),
    fast_and_slow([(1, 4096, True), (16, 4096, False)], [(8, 4096, False), (8, 4096, True), (8, 14336, False)]),
)
def test_dense_products(rows: int, inputs: int, gated: bool, compile_cuda: Compile) -> None:
    schedule = make_dense_schedule(rows, 4096, inputs, rows > 1, gated, H200)
    assert linear_kernel(compile_cuda, schedule).spilled == 0


@pytest.mark.parametrize(
    ("bits", "group", "rows", "inputs", "gated"),
    fast_and_slow(
        [(4, 128, 1, 4096, True), (4, 32, 16, 8192, False), (8, 128, 16, 14336, False)],
        [
            (bits, *product)
            for bits in (4, 8)
            for product in (
                (128, 1, 4096, True), (128, 8, 4096, True), (128, 16, 4096, False), (128, 16, 14336, False),
                (256, 16, 4096, False), (64, 8, 14336, False), (32, 16, 8192, False),
            )
        ],
    ),
)  # fmt: skip
def test_quantized_products(bits: int, group: int, rows: int, inputs: int, gated: bool, compile_cuda: Compile) -> None:
    schedule = make_quantized_schedule(rows, 4096, inputs, group, rows > 1, gated, H200, bits)
    assert linear_kernel(compile_cuda, schedule).spilled == 0


@pytest.mark.parametrize(
    ("bits", "inputs"), fast_and_slow([(4, 4096), (4, 14336), (8, 4096)], [(4, 1152), (8, 14336), (8, 1152)])
)
def test_products_of_integers(bits: int, inputs: int, compile_cuda: Compile) -> None:
    compiled = linear_kernel(compile_cuda, make_integer_schedule(4, 4096, inputs, True, inputs == 4096, H200, bits))
    assert compiled.spilled <= (8 if inputs == 14336 else 0)  # addresses, beside 112 registers of x


@pytest.mark.parametrize(
    ("weights", "outputs", "inputs", "gated"),
    fast_and_slow(
        [
            (tiled_format(4, 128), 1536, 2048, True), (tiled_format(8, 128), 2048, 1408, False),
            (MXFP4, 5760, 2880, True),
        ],
        [
            (tiled_format(4, 128), 2048, 768, False), (tiled_format(4, 64), 5760, 2880, True),
            (tiled_format(4, 32), 96, 32, False), (tiled_format(8, 128), 1536, 2048, True),
            (tiled_format(8, 64), 2880, 2880, False), (MXFP4, 2880, 2880, False),
        ],
    ),
)  # fmt: skip
def test_routed_experts(weights: CodeFormat, outputs: int, inputs: int, gated: bool, compile_cuda: Compile) -> None:
    bf16 = weights == MXFP4 or gated
    schedule = make_experts_schedule(weights, bf16, outputs, inputs, gated, 32, 8, 132, H200.sm_bytes)
    assert schedule is not None
    compiled = compile_cuda(program(experts.SOURCE, experts.ExpertsParams), experts.ENTRY, schedule.options)
    assert compiled.warnings == []
    assert compiled.spilled == 0
    assert compiled.registers * schedule.threads * schedule.ctas_per_sm <= REGISTERS
    assert schedule.ctas_per_sm * (compiled.shared + schedule.shared_bytes + 1024) <= H200.sm_bytes


@pytest.mark.parametrize(
    ("head_dim", "planes", "bf16"), pairs(quantize_cuda.HEAD_DIMS, [(2, True), (1, True), (1, False), (2, False)], 1)
)
def test_quantization(head_dim: int, planes: int, bf16: bool, compile_cuda: Compile) -> None:
    text = program(quantize_cuda.SOURCE, quantize_cuda.QuantizeParams)
    compiled = compile_cuda(text, quantize_cuda.ENTRY, tuple(quantize_cuda.options(head_dim, planes, bf16)))
    assert compiled.warnings == []
    assert compiled.spilled == 0
    assert 768 * compiled.registers <= REGISTERS  # threads that are resident


@pytest.mark.parametrize(
    ("dtype", "aligned", "cluster"), pairs([*top_k_top_p.ELEMENTS], [(True, 4), (False, 4), (True, 8)], 0), ids=str
)
def test_top_k_and_top_p(dtype: torch.dtype, aligned: bool, cluster: int, compile_cuda: Compile) -> None:
    text = program(top_k_top_p.SOURCE, top_k_top_p.FilterParams)
    variant = top_k_top_p.TopKVariant(dtype, aligned, cluster)
    compiled = compile_cuda(text, top_k_top_p.ENTRY, tuple(variant.options))
    assert compiled.warnings == []
    assert compiled.spilled == 0
    assert compiled.registers * top_k_top_p.THREADS * (2 if cluster == 4 else 3) <= REGISTERS
    assert compiled.shared <= 17 * 1024  # what test_top_k_top_p_cuda.py leaves to it


@pytest.mark.parametrize(
    ("head_dim", "heads", "bf16"),
    fast_and_slow([(128, 4, True), (64, 1, False)], [(128, 8, False), (64, 7, True)]),
)
def test_attention_to_chosen_tokens(head_dim: int, heads: int, bf16: bool, compile_cuda: Compile) -> None:
    variant = sparse.SparseVariant(head_dim, heads, bf16)
    cta_bytes = H200.sm_bytes - 1024  # the driver keeps 1 KiB
    bins = sparse.GROUP_BYTES * sparse.max_groups(variant, cta_bytes)
    shared = (
        (sparse.PROGRESSIVE_SOURCE, sparse.PROGRESSIVE_ENTRY, sparse.buffer_bytes(variant), bins),
        (sparse.INDEX_LIST_SOURCE, sparse.INDEX_LIST_ENTRY, sparse.TILES * variant.tile_bytes, 0),
    )
    for source, entry, buffers, extra in shared:
        dynamic = variant.shared_bytes(buffers) + extra
        compiled = compile_cuda(program(source, sparse.SparseParams), entry, tuple(variant.options))
        assert compiled.warnings == []
        assert compiled.registers * sparse.THREADS <= REGISTERS
        assert compiled.shared + dynamic <= cta_bytes
        assert compiled.spilled <= 12  # words that attention to a tile reads once, and the scan of a group never
        if extra:
            assert compiled.shared <= sparse.STATIC_BYTES


def test_another_layout_of_the_arguments_does_not_compile(compile_cuda: Compile) -> None:
    fields = dict(top_k_top_p.FilterParams._fields_)
    swapped = [(name, fields[name]) for name in ("logits", "cutoffs", "peaks", *list(fields)[3:])]
    wrong = type("FilterParams", (KernelParams,), {"_fields_": swapped})
    options = tuple(top_k_top_p.TopKVariant(torch.bfloat16, True, 4).options)
    with pytest.raises(RuntimeError, match="offset of FilterParams::peaks"):
        compile_cuda(program(top_k_top_p.SOURCE, wrong), top_k_top_p.ENTRY, options)
    longer = type("FilterParams", (KernelParams,), {"_fields_": [*fields.items(), ("more", ctypes.c_int)]})
    with pytest.raises(RuntimeError, match="size of FilterParams"):
        compile_cuda(program(top_k_top_p.SOURCE, longer), top_k_top_p.ENTRY, options)


def test_another_number_of_threads_does_not_compile(compile_cuda: Compile) -> None:
    fewer = {"_fields_": top_k_top_p.FilterParams._fields_, "constants": {"THREADS": 256}}
    options = tuple(top_k_top_p.TopKVariant(torch.bfloat16, True, 4).options)
    with pytest.raises(RuntimeError, match="THREADS"):
        compile_cuda(program(top_k_top_p.SOURCE, type("FilterParams", (KernelParams,), fewer)), "filter", options)


TRIGGER, WAIT, ACCESS = (
    "griddepcontrol.launch_dependents",
    "griddepcontrol.wait",
    re.compile(r"\b(ld|st|cp)\S*\.global"),
)


def test_kernels_that_read_activations_wait_first(compile_cuda: Compile) -> None:
    """Attention and products read lengths, codes and weights before the wait, these kernels nothing."""
    variant = AttentionVariant(128, 4, True, 8)
    for params, source, entry, options in (
        (
            top_k_top_p.FilterParams,
            top_k_top_p.SOURCE,
            "filter",
            top_k_top_p.TopKVariant(torch.bfloat16, True, 4).options,
        ),
        (attention.AttentionParams, attention.SOURCES["merge"], "merge", variant.options(4)),
    ):
        ptx = compile_cuda(program(source, params), entry, tuple(options), "compute_90").ptx
        assert 0 < ptx.find(TRIGGER) < ptx.find(WAIT) < ACCESS.search(ptx).start()  # type: ignore[union-attr]


def test_quantization_waits_and_lets_no_kernel_start_early(compile_cuda: Compile) -> None:
    """Attention reads codes before it waits."""
    text = program(quantize_cuda.SOURCE, quantize_cuda.QuantizeParams)
    ptx = compile_cuda(text, "quantize", tuple(quantize_cuda.options(128, 2, True)), "compute_90").ptx
    assert TRIGGER not in ptx
    assert 0 < ptx.find(WAIT) < ACCESS.search(ptx).start()  # type: ignore[union-attr]
