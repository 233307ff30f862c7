"""Conversion of GGUF files to safetensors, cached in the folder of the user."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file

from ridgeplan.roofline.catalog.files import cache_folder, replacing
from ridgeplan.roofline.catalog.gguf import (
    KEPT_TYPE,
    GGUFHeader,
    gguf_bits,
    keeps_experts,
    read_gguf_header,
    shape_of_header,
)
from ridgeplan.runtime.buffers import available_bytes
from ridgeplan.runtime.errors import ModelError, failures_as, one_line, quiet_rust, quiet_transformers
from ridgeplan.runtime.heap import call_with_separate_heap
from ridgeplan.runtime.model.gguf_tensors import (
    hub_config,
    hub_tensors,
    hybrid_tensors,
    rope_parameters,
    stored_config,
    stored_tensors,
)
from ridgeplan.runtime.progress import OnProgress, silent

CONVERSION = "6"  # part of the folder's name: a change of what is written makes a new folder
MANIFEST = "conversion.json"  # sizes, times and CRC-32 of the files that a finished conversion wrote
CONTENTS = ".contents"  # the folder of the names that the contents of files have
NAME = re.compile(r"\w[\w.-]*-[0-9a-f]{16}", flags=re.ASCII)
LOCK = ".lock"
STORED = "-stored"  # ends the names of folders whose matrices are as the file stores them
STAGING = ".converting-"  # the names of folders that are not complete begin with it
FLOAT32_BYTES = 4
LARGER_STORED = 1.03  # of 4-bit blocks, whose scales of 6 bits take 8
BLOCK_BYTES = 1 << 20  # read at once for a checksum


class NoRoom(ModelError):
    """Too little memory or disk for a conversion."""


def converted(path: Path, on_progress: OnProgress = silent, *, stored: bool = False) -> Path:
    """The safetensors folder of the GGUF file `path`, converted now unless it is cached whole.

    Files of the same content share a folder. It appears under its name only when it is complete; one of which a file
    was lost or changed is made again. Two processes that want the same file convert it once, and what a killed one left
    is removed by the next. stored: matrices stay as the file stores them, else they are decoded to float32.
    on_progress: is called with the stage, and the parts of it that are done. Raises ModelError for a file that is
    truncated, corrupt, a pipe or a device, or of an architecture that transformers cannot read, for too little memory
    or disk, and for a cache that cannot be written.
    """
    models = cache_folder() / "models"
    try:
        folder = _folder(models, _name(path, models / CONTENTS, on_progress), stored)
        if _is_whole(folder):
            _remove_leftovers(models)
            return folder
        with _locked(folder):
            if not _is_whole(folder):  # another process may have finished meanwhile
                _require_room(path, models, stored)
                convert = _convert_stored if stored else _convert
                call_with_separate_heap(lambda: _convert_into(path, folder, convert, on_progress), torch.device("cpu"))
    except (OSError, SafetensorError) as error:  # a full disk is the latter
        where, reason = f"{models}, under $XDG_CACHE_HOME or ~/.cache", getattr(error, "strerror", None)
        raise ModelError(f"cannot write the converted model to {where}: {reason or one_line(error)}") from error
    return folder


def described(path: Path, on_progress: OnProgress = silent) -> Path:
    """A folder with the configuration and the tokenizer of the GGUF file `path`, whatever its weights are.

    It is a cached one, else that of decoded weights, or of stored ones where there is no room to decode them. Raises
    ModelError.
    """
    models = cache_folder() / "models"
    with contextlib.suppress(OSError):
        name = _name(path, models / CONTENTS, on_progress)
        cached = next((stored for stored in (False, True) if _is_whole(_folder(models, name, stored))), None)
        if cached is not None:
            return _folder(models, name, cached)
    try:
        return converted(path, on_progress)
    except NoRoom:
        return converted(path, on_progress, stored=True)


def _folder(models: Path, name: str, stored: bool) -> Path:
    return models / (f"{name}{STORED}" if stored else name)


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


def _require_room(path: Path, cache: Path, stored: bool) -> None:
    """Raises ModelError where the weights fit neither memory nor disk, before any of them is read.

    Those that stay as they are stored are in memory a layer at a time.
    """
    needed_bytes = path.stat().st_size * LARGER_STORED if stored else _decoded_bytes(path)
    memory_bytes = None if stored else available_bytes()
    for what, free_bytes in (("memory", memory_bytes), ("disk", shutil.disk_usage(cache).free)):
        if free_bytes is not None and needed_bytes > free_bytes:
            raise NoRoom(
                f"converting {path} takes {needed_bytes / 1e9:.1f} GB of {what} and {free_bytes / 1e9:.1f} GB are "
                "free; allowed: a smaller model, a safetensors folder, or a plan with stored weights, if products read "
                "the file's types (`ridgeplan estimate FILE --preset stored -o plan.json`)"
            )


def _decoded_bytes(path: Path) -> float:
    """Bytes of all tensors as they are written, once the file's sizes are in range. Raises ModelError."""
    try:
        header = read_gguf_header(path)
        shape, tensors = shape_of_header(header, path), header.tensors
    except ValueError as error:
        raise ModelError(f"cannot read the GGUF file {path}: {one_line(error)}") from error
    if shape.layers > len(tensors):  # transformers would build them all
        raise ModelError(f"cannot read the GGUF file {path}: it has {len(tensors)} tensors for {shape.layers} layers")
    kept_bytes = gguf_bits(KEPT_TYPE) / 8 if keeps_experts(header) else FLOAT32_BYTES
    return sum(
        math.prod(sizes) * (kept_bytes if header.types[name] == KEPT_TYPE else FLOAT32_BYTES)
        for name, sizes in tensors.items()
    )


def _convert_into(
    path: Path, folder: Path, convert: Callable[[Path, Path, OnProgress], None], on_progress: OnProgress
) -> None:
    """Writes to a staging folder and renames it over any damaged one."""
    staging = folder.with_name(f"{STAGING}{folder.name}")
    staging.mkdir()
    try:
        convert(path, staging, on_progress)
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
    """Writes config, weights and tokenizer; in float32, since dequantized 4-bit values need more than 16 bits."""
    with _isolated_link(path, staging) as (link, where), _reading(path, on_progress) as header:
        if header.metadata["general.architecture"] == "gpt-oss":
            config, tensors = transformers.GptOssConfig(**hub_config(header)), hub_tensors(link, header)
        elif header.metadata["general.architecture"] == "qwen35":
            config, shape = transformers.AutoConfig.from_pretrained(**where), shape_of_header(header, path)
            tensors = hybrid_tensors(link, shape.states[0][0], shape.layers)
        else:
            config = _config(link, where, header)
            if config.model_type == "qwen3_moe":  # what transformers leaves at defaults, which llama.cpp does not read
                experts = header.metadata["qwen3moe.expert_feed_forward_length"]
                config.update({"moe_intermediate_size": experts, "norm_topk_prob": True})
            tensors = _tensors(link, config)
        tokenizer = _tokenizer(where)
    on_progress("writing the decoded weights, once", len(tensors), len(tensors))
    _save_model(config, tokenizer, staging)
    save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})


def _convert_stored(path: Path, staging: Path, on_progress: OnProgress) -> None:
    """Writes config, tokenizer and weights as the file stores them, a file for each layer."""
    places: dict[str, str] = {}
    on_progress("reading the vocabulary, once", 0, 1)  # gguf takes up to a minute
    with _isolated_link(path, staging) as (link, where), _reading(path, silent) as header:
        config, tokenizer = _config(link, where, header), _tokenizer(where)
        config.update(stored_config(header))
        layers = shape_of_header(header, path).layers
        for index, tensors in enumerate(stored_tensors(link, header)):
            on_progress("copying the stored weights, once", index, layers + 1)
            name = f"model-{index:05}.safetensors"
            save_file(tensors, staging / name, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, name)
    _save_model(config, tokenizer, staging)
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


@contextlib.contextmanager
def _reading(path: Path, on_progress: OnProgress) -> Iterator[GGUFHeader]:
    """The header, as `_read_once`. Raises ModelError, one line that names the file."""
    with failures_as(f"cannot read the GGUF file {path}"), _read_once(path, on_progress) as header:
        yield header


def _config(path: Path, where: dict[str, Any], header: GGUFHeader) -> Any:
    config, rope = transformers.AutoConfig.from_pretrained(**where), rope_parameters(path, header)
    if rope is not None:
        config.rope_parameters = rope
    return config


def _tokenizer(where: dict[str, Any]) -> Any:
    with quiet_rust():
        return transformers.AutoTokenizer.from_pretrained(**where)


def _save_model(config: Any, tokenizer: Any, folder: Path) -> None:
    with quiet_transformers():
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _read_once(path: Path, on_progress: OnProgress) -> Iterator[GGUFHeader]:
    """The header. Inside the body all readers share one of gguf's, and `on_progress` hears of tensors they dequantize.

    transformers reads a header for its config, weights and tokenizer: 13 s each for a vocabulary of 262k. For each of
    the model's modules it asks for the names of all layers' tensors.
    """
    header, done = read_gguf_header(path), count()
    reader_class, dequantize, name_map = gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map

    def counted(*arguments: Any) -> Any:
        on_progress("decoding weights, once", next(done), len(header.tensors))
        return dequantize(*arguments)

    @cache
    def reader(*arguments: Any) -> gguf.GGUFReader:
        """Without gpt-oss's RoPE, of which transformers takes the lengths of names for values."""
        read = reader_class(*arguments)
        for name in [name for name in read.fields if name.startswith("gpt-oss.rope.scaling.")]:
            del read.fields[name]
        return read

    gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map = reader, counted, cache(name_map)
    try:
        yield header
    finally:
        gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map = reader_class, dequantize, name_map


def _tensors(path: Path, config: Any) -> dict[str, torch.Tensor]:
    """The dequantized tensors under transformers' names, which it derives from an empty model."""
    # from_pretrained would do the same conversion, but needs the accelerate package for it.
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    tensors = {name: tensor.contiguous() for name, tensor in read["tensors"].items()}
    for name, parameter in model.named_parameters():  # what reads the folder does not check it again
        if name in tensors and tensors[name].shape != parameter.shape:
            sizes = f"{list(tensors[name].shape)}; its configuration needs {list(parameter.shape)}"
            raise ModelError(f"in the GGUF file the weight {name} is {sizes}")
        if name not in tensors and not (name == "lm_head.weight" and config.tie_word_embeddings):
            raise ModelError(f"the GGUF file lacks the weight {name}")
    return tensors
