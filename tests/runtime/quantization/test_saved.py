"""Fitted weights are saved once, found again by all that they depend on, and never used half-written."""

import json
import os
from pathlib import Path

import pytest
import torch

from ridgeplan import runtime
from ridgeplan.runtime import engine as engine_module
from ridgeplan.runtime import loading
from ridgeplan.runtime.model.gguf import MANIFEST
from ridgeplan.runtime.model.weights import WeightFormat
from ridgeplan.runtime.quantization import saved
from ridgeplan.runtime.quantization.calibration import CalibrationText

CPU = torch.device("cpu")


@pytest.fixture
def fitted(monkeypatch):
    """The number of times that weights were fitted."""
    times = []
    full = loading.quantized_target

    def counting(*arguments):
        times.append(arguments[3])
        return full(*arguments)

    monkeypatch.setattr(loading, "quantized_target", counting)
    return times


@pytest.mark.parametrize("options", [{"target_bits": 8}, {"gamma": 2, "draft_bits": 4}])
def test_progress_is_told_while_weights_are_fitted_and_only_then(options, tiny_model, make_plan, saved_weights_folder):
    folder, plan, steps = tiny_model().folder, make_plan(**options), []
    for _ in range(2):
        engine = runtime.load(plan, folder, device="cpu", on_progress=lambda *step: steps.append(step))
    layers = engine.config.shape.layers
    assert layers > 1
    quantizing = [("quantizing weights, once", done, layers) for done in range(layers)]
    sampling = [("sampling a text to fit weights to, once", 0, layers)] * ("target_bits" in options)
    assert steps == [*sampling, *quantizing]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("options", [{"target_bits": 4}, {"gamma": 2, "target_bits": 8, "draft_bits": 4}])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_read_again_as_they_were_fitted(options, tied, tiny_model, make_plan, saved_weights_folder, fitted):
    folder, plan = tiny_model(tie_word_embeddings=tied).folder, make_plan(**options)
    first, second = (runtime.load(plan, folder, device="cpu").weights for _ in range(2))
    assert len(fitted) == len(files(saved_weights_folder)) == 1
    assert second.format == first.format
    assert second.bytes == first.bytes
    ours, theirs = (list(loaded.tensors()) for loaded in (first, second))
    assert len(ours) == len(theirs) > 20
    assert all(torch.equal(loaded, other) for loaded, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])  # whose experts have biases: rows of the target's stack
def test_drafts_are_fitted_once_and_share_what_they_share_with_their_target(
    family, tiny_model, make_plan, saved_weights_folder, monkeypatch
):
    folder, plan = tiny_model(family).folder, make_plan(gamma=2, draft_bits=4)
    first = runtime.load(plan, folder, device="cpu")
    [file] = files(saved_weights_folder)
    assert file.stat().st_size < 1.1 * (first.draft_weights.bytes - first.weights.embedding.nbytes) + 8000
    monkeypatch.setattr(engine_module, "quantized_draft", None)
    second = runtime.load(plan, folder, device="cpu")
    assert second.draft_weights.embedding is second.weights.embedding
    assert second.generate([1, 2, 3], 8).tokens == first.generate([1, 2, 3], 8).tokens
    assert second.draft_weights.head.weight.packed.equal(first.draft_weights.head.weight.packed)
    assert runtime.load(make_plan(target_bits=4), folder, device="cpu").weights.head is not None
    assert len(files(saved_weights_folder)) == 2


def test_a_half_written_file_is_never_used(tiny_model, make_plan, saved_weights_folder, fitted):
    folder, plan = tiny_model().folder, make_plan(target_bits=4)
    expected = runtime.load(plan, folder, device="cpu").weights.layers[0].mixer.qkv.weight.packed
    [file] = files(saved_weights_folder)
    content = file.read_bytes()
    flipped = content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]  # one bit of a tensor
    for damaged in (content[: len(content) // 2], content[:-1], b"", b"\0" * 100, flipped):
        file.write_bytes(damaged)
        again = runtime.load(plan, folder, device="cpu").weights
        assert torch.equal(again.layers[0].mixer.qkv.weight.packed, expected)
        assert file.read_bytes() == content
    assert len(fitted) == 6


@pytest.mark.parametrize(
    ("find", "replace", "nested"),
    [
        ('"group": 32', '"group": 16', 2),
        ('"tensor": "t0"', '"tensor": "t1"', 2),
        ("Int4Weight", "Int8Weight", 2),
        ('"dtype":"F32"', '"dtype":"I32"', 0),  # of safetensors' own header: as many bytes, of another type
    ],
)
def test_a_changed_structure_is_never_used(find, replace, nested, tiny_model, make_plan, saved_weights_folder, fitted):
    """nested: times that the text is encoded as JSON within JSON."""
    folder, plan = tiny_model().folder, make_plan(target_bits=4)
    expected = list(runtime.load(plan, folder, device="cpu").weights.tensors())
    [file] = files(saved_weights_folder)
    content = file.read_bytes()
    for _ in range(nested):
        find, replace = json.dumps(find)[1:-1], json.dumps(replace)[1:-1]
    changed = content.replace(find.encode(), replace.encode(), 1)
    assert changed != content
    file.write_bytes(changed)
    again = runtime.load(plan, folder, device="cpu").weights
    assert len(fitted) == 2
    assert all(torch.equal(*pair) for pair in zip(again.tensors(), expected, strict=True))
    assert file.read_bytes() == content


def test_what_a_killed_process_left_is_not_taken_for_weights(tiny_model, make_plan, saved_weights_folder, monkeypatch):
    def killed(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    folder, plan = tiny_model().folder, make_plan(target_bits=4)
    monkeypatch.setattr(saved, "save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        runtime.load(plan, folder, device="cpu")
    assert files(saved_weights_folder) == []


def test_other_files_formats_and_texts_have_files_of_their_own(tmp_path):
    model = tmp_path / "model.safetensors"
    model.write_bytes(b"1")
    texts = [None, *(CalibrationText(torch.tensor([[count, 2]]), natural=True) for count in (1, 3))]
    formats = [WeightFormat(4, 64), WeightFormat(8, 64), WeightFormat(8, 64, hierarchical=True), WeightFormat(4, 32)]

    def paths():
        return {
            saved.weights_path(str(tmp_path), torch.float32, CPU, weight_format, text)
            for weight_format in formats
            for text in texts
        }

    before = paths()
    assert len(before) == len(texts) * len(formats)
    assert paths() == before
    os.utime(model, ns=(1, 1))
    assert not paths() & before


def test_a_gguf_file_that_is_converted_again_keeps_its_fitted_weights(tmp_path):
    """Its folder's name says the file's content, and the manifest the checksums of what was written."""

    def path(cache, checksum, name="gguf-model-0123"):
        folder = tmp_path / cache / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(b"1")
        modified_ns = len(cache)
        (folder / MANIFEST).write_text(json.dumps({"model.safetensors": (1, modified_ns, checksum)}))
        return saved.weights_path(str(folder), torch.float32, CPU, WeightFormat(8, 64), None)

    assert path("first", 7) == path("another", 7)
    assert len({path("first", 7), path("first", 8), path("first", 7, "gguf-model-4567")}) == 3


@pytest.mark.parametrize(("device", "shared"), [("cpu", False), ("cuda", True)])
def test_torchs_own_layout_is_not_shared_by_its_versions(device, shared, tmp_path, monkeypatch):
    def path():
        return saved.weights_path(str(tmp_path), torch.float32, torch.device(device), WeightFormat(4, 64), None)

    before = path()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert (path() == before) == shared


def test_a_full_disk_costs_only_a_warning(tiny_model, make_plan, saved_weights_folder, monkeypatch):
    monkeypatch.setattr(saved, "available_bytes", lambda: 10)
    with pytest.warns(UserWarning, match="the fitted weights are not saved: 0.0 GB of memory are not free"):
        runtime.load(make_plan(target_bits=4), tiny_model().folder, device="cpu")
    assert files(saved_weights_folder) == []


def test_a_lock_that_cannot_be_taken_costs_only_a_warning(tiny_model, make_plan, saved_weights_folder, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(saved.FileLock, "acquire", refused)
    with pytest.warns(UserWarning, match="the fitted weights are not saved: cannot lock .*Permission denied"):
        runtime.load(make_plan(target_bits=4), tiny_model().folder, device="cpu")
    assert files(saved_weights_folder) == []
