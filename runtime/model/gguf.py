"""Conversion of GGUF files to safetensors, cached in the folder of the user."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import shutil
import zlib
from collections.abc import Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file

from ridgeplan.roofline.catalog.files import cache_folder, replacing
from ridgeplan.roofline.catalog.gguf import (
    FULL_TYPES,
    KEPT_TYPE,
    GGUFHeader,
    gguf_bits,
    keeps_experts,
    read_gguf_header,
    shape_of_header,
)
from ridgeplan.roofline.catalog.gguf_types import BLOCK_FORMATS
from ridgeplan.runtime.errors import ModelError, failures_as, one_line, quiet_rust, quiet_transformers
from ridgeplan.runtime.heap import call_with_separate_heap
from ridgeplan.runtime.model.gguf_tensors import file_tensors, hub_config, keeps_blocks, rope_parameters, stored_config
from ridgeplan.runtime.progress import OnProgress, silent

CONVERSION = "8"  # part of the folder's name: a change of what is written makes a new folder
MANIFEST = "conversion.json"  # sizes, times and CRC-32 of the files that a finished conversion wrote
CONTENTS = ".contents"  # the folder of the names that the contents of files have
NAME = re.compile(r"\w[\w.-]*-[0-9a-f]{16}", flags=re.ASCII)
LOCK = ".lock"
STAGING = ".converting-"  # the names of folders that are not complete begin with it
FLOAT32_BITS = 32
BLOCK_BYTES = 1 << 20  # read at once for a checksum


def converted(path: Path, on_progress: OnProgress = silent) -> Path:
    """The safetensors folder of the GGUF file `path`, converted now unless it is cached whole.

    Files of the same content share a folder. It appears under its name only when it is complete; one of which a file
    was lost or changed is made again. Two processes that want the same file convert it once, and what a killed one left
    is removed by the next. on_progress: is called with the stage, and the parts of it that are done. Raises ModelError
    for a file that is truncated, corrupt, a pipe or a device, or of an architecture that transformers cannot read, for
    too little disk, and for a cache that cannot be written.
    """
    models = cache_folder() / "models"
    try:
        folder = models / _name(path, models / CONTENTS, on_progress)
        if _is_whole(folder):
            _remove_leftovers(models)
            return folder
        with _locked(folder):
            if not _is_whole(folder):  # another process may have finished meanwhile
                _require_room(path, models)
                call_with_separate_heap(lambda: _convert_into(path, folder, on_progress), torch.device("cpu"))
    except (OSError, SafetensorError) as error:  # a full disk is the latter
        where, reason = f"{models}, under $XDG_CACHE_HOME or ~/.cache", getattr(error, "strerror", None)
        raise ModelError(f"cannot write the converted model to {where}: {reason or one_line(error)}") from error
    return folder


def _name(path: Path, names: Path, on_progress: OnProgress) -> str:
    """The name of the folder for a file's content, by which identical files share it.

    The content is hashed once for a path, size and modification time; the folder `names` remembers what its name was.
    """
    with failures_as(f"cannot read the GGUF file {path}"):
        status, source = path.stat(), path.resolve()
        seen = f"{CONVERSION}\n{source}\n{status.st_size}\n{status.st_mtime_ns}"
        remembered = names / hashlib.sha256(seen.encode("utf-8", "surrogateescape")).hexdigest()
        with contextlib.suppress(OSError, ValueError):
            if NAME.fullmatch(name := remembered.read_text(encoding="ascii")):
                return name
        title = read_gguf_header(path).metadata.get("general.name", "model")  # a pipe would be read without end
        digest = hashlib.sha256(CONVERSION.encode())
        for block in _blocks(path, on_progress, f"reading {path.name}, once"):
            digest.update(block)
    name = f"{re.sub(r'[^a-zA-Z0-9]+', '-', f'gguf-{title}')[:100]}-{digest.hexdigest()[:16]}"
    names.mkdir(parents=True, exist_ok=True)
    with replacing(remembered) as staging:
        staging.write_text(name, encoding="ascii")
    return name


def _blocks(path: Path, on_progress: OnProgress = silent, what: str = "") -> Iterator[bytes]:
    """The content of a file, of which little is in memory at a time."""
    total = -(-path.stat().st_size // BLOCK_BYTES)
    with path.open("rb") as file:
        for done, block in enumerate(iter(lambda: file.read(BLOCK_BYTES), b"")):
            on_progress(what, done, total)
            yield block


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; the system frees the lock of one that is killed, and what that left half done goes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / LOCK):
        _remove_staging(folder.parent)
        yield


def _remove_leftovers(cache: Path) -> None:
    """Removes what killed conversions left half done, unless a conversion runs: then it may be that one's."""
    if any(cache.glob(f"{STAGING}*")):
        with contextlib.suppress(OSError, Timeout), FileLock(cache / LOCK, timeout=0):
            _remove_staging(cache)


def _remove_staging(cache: Path) -> None:
    for staging in cache.glob(f"{STAGING}*"):
        shutil.rmtree(staging, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    """Whether every file that its conversion wrote is there: of its size and time, or of its size and content.

    Reading gigabytes for their checksums at every start takes seconds, so files that nobody wrote since are not read.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return bool(files) and all(_is_as_written(folder / name, *expected) for name, expected in files.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _is_as_written(path: Path, size: int, modified_ns: int, crc: int) -> bool:
    status = path.stat()
    same_time = status.st_mtime_ns == modified_ns
    return status.st_size == size and (same_time or _checksum(path, status.st_mtime_ns, status.st_ino) == crc)


@cache
def _checksum(path: Path, modified_ns: int, inode: int) -> int:
    """CRC-32 of a file, which is read once in a process as long as it is not written again."""
    checksum = 0
    for block in _blocks(path):
        checksum = zlib.crc32(block, checksum)
    return checksum


def _require_room(path: Path, cache: Path) -> None:
    """Raises ModelError where the weights do not fit the disk, before any of them is read."""
    needed_bytes, free_bytes = _converted_bytes(path), shutil.disk_usage(cache).free
    if needed_bytes > free_bytes:
        raise ModelError(
            f"converting {path} takes {needed_bytes / 1e9:.1f} GB of disk and {free_bytes / 1e9:.1f} GB are free; "
            "allowed: a smaller model, or a safetensors folder"
        )


def _converted_bytes(path: Path) -> float:
    """Bytes of all tensors as they are written, once the file's sizes are in range. Raises ModelError."""
    try:
        header = read_gguf_header(path)
        shape, tensors = shape_of_header(header, path), header.tensors
    except ValueError as error:
        raise ModelError(f"cannot read the GGUF file {path}: {one_line(error)}") from error
    if shape.layers > len(tensors):  # transformers would build them all
        raise ModelError(f"cannot read the GGUF file {path}: it has {len(tensors)} tensors for {shape.layers} layers")
    kept = {KEPT_TYPE: gguf_bits(KEPT_TYPE)} if keeps_experts(header) else {}
    if keeps_blocks(header):
        kept |= {kind: described.held_bits for kind, described in BLOCK_FORMATS.items()}
        kept |= {kind: gguf_bits(kind) for kind in FULL_TYPES}
    return sum(math.prod(sizes) * kept.get(header.types[name], FLOAT32_BITS) / 8 for name, sizes in tensors.items())


def _convert_into(path: Path, folder: Path, on_progress: OnProgress) -> None:
    """Writes to a staging folder and renames it over any damaged one."""
    staging = folder.with_name(f"{STAGING}{folder.name}")
    staging.mkdir()
    try:
        _convert(path, staging, on_progress)
        written = [(file, file.stat()) for file in staging.iterdir()]
        files = {
            file.name: (at.st_size, at.st_mtime_ns, _checksum(file, at.st_mtime_ns, at.st_ino)) for file, at in written
        }
        (staging / MANIFEST).write_text(json.dumps(files), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _convert(path: Path, staging: Path, on_progress: OnProgress) -> None:
    """Writes config, tokenizer and weights, a file for each layer, so that one layer is in memory at a time."""
    places: dict[str, str] = {}
    reading = partial(failures_as, f"cannot read the GGUF file {path}")
    on_progress("reading the vocabulary, once", 0, 1)  # gguf takes up to a minute
    with _isolated_link(path, staging) as (link, where), _one_reader():
        with reading():
            header = read_gguf_header(path)
            config, tokenizer, shape = _config(link, header), _tokenizer(where, header), shape_of_header(header, path)
        gguf.GGUFReader(link).fields.clear()  # the vocabulary as objects, some GB
        layers = file_tensors(link, header, shape)
        for index in count():
            with reading():
                tensors = next(layers, None)
            if tensors is None:
                break
            on_progress("copying the weights, once", index, shape.layers + 1)
            name = f"model-{index:05}.safetensors"
            save_file(tensors, staging / name, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, name)
    with quiet_transformers():
        config.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
    index_text = json.dumps({"metadata": {}, "weight_map": places})
    (staging / "model.safetensors.index.json").write_text(index_text, encoding="utf-8")


@contextlib.contextmanager
def _isolated_link(path: Path, staging: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A link to the file in a folder of its own, which goes after the body, and what transformers' readers take of it.

    They would also read configurations beside it, which may not be its own and may name Python to run.
    """
    folder = staging / "alone"
    folder.mkdir()
    link = folder / "model.gguf"
    link.symlink_to(path.resolve())
    # Without trust_remote_code transformers asks on stdin.
    yield link, {"pretrained_model_name_or_path": str(folder), "gguf_file": link.name, "trust_remote_code": False}
    shutil.rmtree(folder)


class PlainReader(gguf.GGUFReader):
    """gguf's reader on a plain array: slices of its memmap take three times as long, 13 s for a vocabulary of 262k."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, np.asarray(value) if name == "data" else value)


@contextlib.contextmanager
def _one_reader() -> Iterator[None]:
    """Inside the body all readers of a file share one: transformers reads a header for its config and its tokenizer."""
    reader_class = gguf.GGUFReader

    @cache
    def read_of(path: str) -> gguf.GGUFReader:
        """Without gpt-oss's RoPE, of which transformers takes the lengths of names for values."""
        read = PlainReader(path)
        for name in [name for name in read.fields if name.startswith("gpt-oss.rope.scaling.")]:
            del read.fields[name]
        return read

    gguf.GGUFReader = lambda path: read_of(str(path))
    try:
        yield
    finally:
        gguf.GGUFReader = reader_class


def _config(path: Path, header: GGUFHeader) -> Any:
    """transformers' configuration. Its own reader of files leaves out widths of experts and RoPE's scaling."""
    keys, rope = hub_config(header), rope_parameters(path, header)
    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    config.update(stored_config(header) | ({} if rope is None else {"rope_parameters": rope}))
    return config


def _tokenizer(where: dict[str, Any], header: GGUFHeader) -> Any:
    """transformers' tokenizer. Raises ValueError if it leaves out the first token that a SentencePiece file asks for.

    Releases before 5.23 do so for Gemma's, of which some also lack the merges: text then reads as noise.
    """
    with quiet_rust():
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    asks = header.metadata.get("tokenizer.ggml.model") == "llama" and header.metadata.get(
        "tokenizer.ggml.add_bos_token"
    )
    if asks and tokenizer.encode("It works.")[0] != tokenizer.bos_token_id:
        raise ValueError(
            f"transformers {transformers.__version__} reads its tokenizer without the first token "
            f"{tokenizer.bos_token}; allowed: a release that does not, from 5.23 on for Gemma"
        )
    return tokenizer
