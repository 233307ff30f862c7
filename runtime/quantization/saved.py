"""Quantized weights, saved once in the user's cache: fitting takes minutes, reading them seconds.

A file appears under its name only when it is complete. Its header gives its length, and the CRC-32 of each tensor and
of the objects that hold them, so a damaged file is detected and replaced. Its name is a hash of everything that the
weights depend on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ridgeplan.kernels.experts import Activation
from ridgeplan.kernels.linear.weights import Int4Weight, Int8Weight, Mxfp4Weight
from ridgeplan.kernels.state import DeltaVectors
from ridgeplan.roofline.catalog import files as user_files
from ridgeplan.roofline.catalog.files import NoHomeFolder
from ridgeplan.roofline.catalog.layers import Routing
from ridgeplan.runtime.buffers import available_bytes
from ridgeplan.runtime.model.experts import ListedExperts, RoutedMLP, StackedExperts
from ridgeplan.runtime.model.gguf import MANIFEST
from ridgeplan.runtime.model.latent import LatentAttentionWeights
from ridgeplan.runtime.model.linear import Dense, GatedMLP, Int4, Int8, LibraryInt4Weight, LibraryInt8Weight, Mxfp4
from ridgeplan.runtime.model.norms import LayerNorm, NoNorm, ParallelNorm, RMSNorm
from ridgeplan.runtime.model.weights import AttentionWeights, DecoderWeights, DeltaWeights, LayerWeights, WeightFormat
from ridgeplan.runtime.quantization.calibration import CalibrationText

VERSION = "7"  # part of the name: a change of what is fitted or written makes a new file
STRUCTURE = "structure"  # the entry of a file's metadata: a text and its checksum, see `_save`
Place = tuple[Any, ...]  # of a tensor: its address, shape, strides and dtype
PARTS = {
    kind.__name__: kind
    for kind in (
        DecoderWeights, LayerWeights, AttentionWeights, RMSNorm, LayerNorm, NoNorm, ParallelNorm, GatedMLP, Dense,
        Int4, Int8, Int4Weight, Int8Weight, Mxfp4, Mxfp4Weight, LibraryInt4Weight, LibraryInt8Weight, RoutedMLP,
        StackedExperts, ListedExperts, Routing, Activation, DeltaWeights, DeltaVectors, LatentAttentionWeights,
    )
}  # fmt: skip


def saved_weights(
    path: Path | None, device: torch.device, make: Callable[[], DecoderWeights], shared: DecoderWeights | None = None
) -> DecoderWeights:
    """The weights in the file `path`, on `device`. If it is missing or damaged, they are computed and saved there.

    Processes that need the same weights compute them once. Weights that cannot be saved are used after a warning;
    without a path there is no warning. shared: weights whose tensors a file does not repeat: a target's, of its drafts.
    """
    if path is None:
        return make()
    weights = read_saved(path, device, shared)
    if weights is not None:
        return weights
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        return make()
    with ExitStack() as held:
        try:
            held.enter_context(FileLock(path.with_suffix(".lock")))
        except (OSError, NotImplementedError) as error:
            warnings.warn(f"the fitted weights are not saved: cannot lock {path.parent}: {error}", stacklevel=2)
            return make()
        weights = read_saved(path, device, shared)  # another process may have finished meanwhile
        if weights is None:
            weights = make()
            _save(weights, path, shared)
    return weights


def weights_path(
    source: str,
    dtype: torch.dtype,
    device: torch.device,
    target: WeightFormat,
    text: CalibrationText | None,
    *,
    drafts: bool = False,
) -> Path | None:
    """The path for weights of the folder `source` that are fitted to `text`, by default one that the model generates.

    drafts: those beside an unquantized target, whose head is quantized, too. None for a user without a home folder.
    """
    try:
        folder = user_files.quantized_folder()
    except NoHomeFolder:
        return None
    # torch's layout of 4-bit weights for CPUs is its own: it depends on their instructions, and may on its version.
    library = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    layout = library if device.type == "cpu" else device.type
    tokens = b"" if text is None else text.tokens.cpu().numpy().tobytes()
    identity = repr((VERSION, _contents(Path(source).resolve()), str(dtype), layout, target, drafts))
    digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape") + tokens).hexdigest()[:24]
    return folder / f"{target.bits}-bit-{digest}.safetensors"


def _contents(source: Path) -> tuple[str, list[tuple[Any, ...]]]:
    """What tells a model's folder from others: its path and its files' sizes and times.

    That of a GGUF file has a name and checksums by the file's content instead, so that an identical file, which is
    converted again elsewhere or after its folder was removed, is not fitted again.
    """
    with suppress(OSError, ValueError, TypeError, AttributeError):
        written = json.loads((source / MANIFEST).read_text(encoding="utf-8"))
        return source.name, sorted((name, size, checksum) for name, (size, _, checksum) in written.items())
    status = [(file.name, file.stat()) for file in sorted(source.iterdir()) if file.is_file()]
    return str(source), [(name, at.st_size, at.st_mtime_ns) for name, at in status]


def read_saved(path: Path, device: torch.device, shared: DecoderWeights | None = None) -> DecoderWeights | None:
    """The weights in a file; None if it is missing or damaged. shared: as for `saved_weights`."""
    try:
        with safe_open(path, framework="pt") as file:
            text, checksum = json.loads(file.metadata()[STRUCTURE])
            if zlib.crc32(text.encode()) != checksum:
                return None
            structure, checksums = json.loads(text)
            tensors = dict(_shared_tensors(shared).values())
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                if _checksum(tensor) != checksums[name]:
                    return None
                tensors[name] = tensor.to(device)
        weights = _restored(structure, tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
    return weights if isinstance(weights, DecoderWeights) else None


def _place(tensor: Tensor) -> Place:
    """What tells a tensor from another: the first row of a stack has its address, too."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _shared_tensors(weights: DecoderWeights | None) -> dict[Place, tuple[str, Tensor]]:
    """Names of tensors that another's file does not hold, by place."""
    tensors = () if weights is None else dict.fromkeys(weights.tensors())
    return {_place(tensor): (f"shared{index}", tensor) for index, tensor in enumerate(tensors)}


def _save(weights: DecoderWeights, path: Path, shared: DecoderWeights | None) -> None:
    """Writes to a file beside `path` and renames it.

    The text in its metadata holds the objects that the tensors belong to, and the tensors' checksums.
    """
    for what, free_bytes in (("memory", available_bytes()), ("disk", shutil.disk_usage(path.parent).free)):
        if free_bytes is not None and weights.bytes > free_bytes:
            gb = weights.bytes / 1e9
            warnings.warn(f"the fitted weights are not saved: {gb:.1f} GB of {what} are not free", stacklevel=2)
            return
    staging = path.with_suffix(".partial")  # the lock keeps others off; what a killed process left is overwritten
    known = _shared_tensors(shared)
    tensors = dict(known)
    structure = _described(weights, tensors)
    named = {name: tensor.cpu().contiguous() for at, (name, tensor) in tensors.items() if at not in known}
    try:
        checksums = {name: _checksum(tensor) for name, tensor in named.items()}
        text = json.dumps([structure, checksums])
        save_file(named, staging, metadata={STRUCTURE: json.dumps([text, zlib.crc32(text.encode())])})
        staging.replace(path)
    except (OSError, SafetensorError) as error:
        warnings.warn(f"the fitted weights cannot be saved to {path.parent}: {error}", stacklevel=2)
    finally:
        staging.unlink(missing_ok=True)


def _checksum(tensor: Tensor) -> int:
    """CRC-32 of a contiguous tensor on the host: its dtype, its shape and its values."""
    kind = f"{tensor.dtype} {list(tensor.shape)}"
    return zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, zlib.crc32(kind.encode()))


def _described(item: Any, tensors: dict[Place, tuple[str, Tensor]]) -> Any:
    """JSON values of weights or a part of them; their tensors get names, by place, so that tied ones stay tied."""
    if isinstance(item, Tensor):
        name, _ = tensors.setdefault(_place(item), (f"t{len(tensors)}", item))
        return {"tensor": name}
    if isinstance(item, tuple):
        return [_described(element, tensors) for element in item]
    if dataclasses.is_dataclass(item):
        values = {field.name: _described(getattr(item, field.name), tensors) for field in dataclasses.fields(item)}
        return {"part": type(item).__name__, "fields": values}
    return item


def _restored(described: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `_described`."""
    if isinstance(described, list):
        return tuple(_restored(element, tensors) for element in described)
    if not isinstance(described, dict):
        return described
    if "tensor" in described:
        return tensors[described["tensor"]]
    fields = {name: _restored(value, tensors) for name, value in described["fields"].items()}
    return PARTS[described["part"]](**fields)
