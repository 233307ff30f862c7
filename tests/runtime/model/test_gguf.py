"""A GGUF file becomes a safetensors folder with the same weights, once for each content."""

import copy
import json
import multiprocessing
import os
import shutil
import socket
import struct
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
import transformers
from filelock import FileLock
from gguf_files import write_gguf, write_gpt_oss, write_qwen35
from gguf_values import METADATA, TENSORS, gguf_bytes
from safetensors import SafetensorError
from safetensors.torch import load_file

from ridgeplan import runtime
from ridgeplan.roofline.catalog.model_shape import sizes_of
from ridgeplan.roofline.catalog.models import load_shape
from ridgeplan.roofline.plan.plan import Weights
from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model import gguf as gguf_convert
from ridgeplan.runtime.model.checkpoint import load_config, load_state_dict, load_tokenizer
from ridgeplan.runtime.model.config import decoder_config
from ridgeplan.runtime.model.gguf import converted
from ridgeplan.runtime.model.linear import Mxfp4
from ridgeplan.runtime.model.source import model_source

YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256, "truncate": False,
}  # fmt: skip
BESIDE = (gguf_convert.LOCK, gguf_convert.CONTENTS)


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept(cache_home: Path) -> list[str]:
    """What stands in the cache of converted models, but for its lock and the names of contents."""
    return [entry.name for entry in (cache_home / "ridgeplan" / "models").glob("*") if entry.name not in BESIDE]


@pytest.fixture
def path(tiny_model, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_model(head_dim=16).reference)
    return path


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    """All tensors of a converted model."""
    files = [load_file(file) for file in sorted(Path(folder).glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}


def test_weights_come_out_bit_by_bit(path, tiny_model, make_plan):
    model = tiny_model(head_dim=16).reference
    tensors = tensors_of(model_source(str(path)))
    expected = {name: tensor for name, tensor in model.state_dict().items() if name in tensors}
    assert len(expected) == len(tensors) == 3 + 9 * 2
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
    engine = runtime.load(make_plan(), str(path), device="cpu")
    tokens = list(range(40))
    with torch.inference_mode():
        reference = model(torch.tensor([tokens])).logits[0, -1]
    assert engine.generate(tokens, 1).tokens[0] == [int(reference.argmax())]
    assert engine.config.shape.q_heads == 4


def test_a_converted_dense_model_loads_without_transformers_models(path, make_plan, monkeypatch):
    """Importing these takes seconds at every start."""
    folder = model_source(str(path))
    expected = runtime.load(make_plan(), folder, device="cpu").generate(list(range(40)), 4).tokens
    readers = (transformers.AutoModelForCausalLM, "from_config"), (transformers.AutoConfig, "from_pretrained")
    for reader, name in (*readers, (transformers.AutoModelForCausalLM, "from_pretrained")):
        monkeypatch.setattr(reader, name, lambda *_, **__: pytest.fail("imported"))
    assert runtime.load(make_plan(), folder, device="cpu").generate(list(range(40)), 4).tokens == expected


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("blk.0.attn_output", None, "lacks the weight model.layers.0.self_attn.o_proj.weight"),
        ("blk.0.attn_output", [32, 16], r"o_proj.weight is \[16, 32\]; its config.json needs \[32, 32\]"),
        ("blk.0.ffn_norm", [16], r"post_attention_layernorm.weight is \[16\]; its config.json needs \[32\]"),
        ("output_norm", [16], r"model.norm.weight is \[16\]; its config.json needs \[32\]"),
        ("output_norm", None, "lacks the weight model.norm.weight"),
    ],
)
def test_a_file_without_a_weight_of_the_right_size_is_refused(name, sizes, said, tmp_path, make_plan):
    changed = {f"{name}.weight": {"shape": sizes, "type": 0, "at": 0}} if sizes else {}
    tensors = {other: each for other, each in TENSORS.items() if other != f"{name}.weight"} | changed
    (tmp_path / "wrong.gguf").write_bytes(gguf_bytes(METADATA, tensors))
    with pytest.raises(ModelError, match=said):
        runtime.load(make_plan(), str(tmp_path / "wrong.gguf"), device="cpu")


def test_experts_are_read_from_a_gguf_file(tiny_model, tmp_path, make_plan):
    """Their width and their normed weights, of which transformers' reader has only defaults, too."""
    model = tiny_model("qwen3_moe")
    write_gguf(tmp_path / "experts.gguf", model.reference)
    engine = runtime.load(make_plan(), str(tmp_path / "experts.gguf"), device="cpu")
    tokens = list(range(40))
    with torch.inference_mode():
        expected = model.reference(torch.tensor([tokens])).logits[0, -1]
    assert (engine.teacher_forced_logits([tokens], [[]])[0, -1] - expected).abs().max() < 1e-4
    described, loaded = load_shape(str(tmp_path / "experts.gguf")), load_shape(model.folder)
    assert sizes_of(described) == sizes_of(loaded) and described.parameters == loaded.parameters
    assert described.weight_bits.experts == 32 and described.moe_layers == loaded.moe_layers > 0


@pytest.mark.parametrize(("kind", "bits"), [("MXFP4", 4.25), ("Q8_0", 8.5)])
def test_gpt_oss_keeps_its_experts_as_they_are_stored(kind, bits, tiny_model, tmp_path, make_plan):
    model = copy.deepcopy(tiny_model("gpt_oss", rope_parameters=YARN).reference)
    path = tmp_path / "gpt-oss.gguf"
    write_gpt_oss(path, model, kind)
    engine = runtime.load(make_plan(), str(path), device="cpu")
    tokens = list(range(40))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    assert (engine.teacher_forced_logits([tokens], [[]])[0, -1] - expected).abs().max() < 1e-4
    assert isinstance(engine.weights.layers[0].mlp.gate_up.layer, Mxfp4) == (kind == "MXFP4")
    described, loaded = load_shape(str(path)), load_shape(model_source(str(path)))
    assert sizes_of(described) == sizes_of(loaded) and described.parameters == loaded.parameters
    assert described.weight_bits.experts == bits and described.traits == loaded.traits
    assert described.weight_bits == loaded.weight_bits or kind != "MXFP4"


def test_hybrids_are_read_from_a_gguf_file(tiny_model, tmp_path, make_plan):
    model, path = tiny_model("qwen3_5_text"), tmp_path / "hybrid.gguf"
    write_qwen35(path, model.reference)
    engine = runtime.load(make_plan(), str(path), device="cpu")
    tokens = list(range(40))
    with torch.inference_mode():
        expected = model.reference(torch.tensor([tokens])).logits[0, -1]
    assert (engine.teacher_forced_logits([tokens], [[]])[0, -1] - expected).abs().max() < 1e-4
    described, loaded = load_shape(str(path)), load_shape(model.folder)
    assert sizes_of(described) == sizes_of(loaded) and described.parameters == loaded.parameters
    assert described.states == loaded.states


@pytest.mark.parametrize("kinds", [["Q8_0"], ["Q4_0"], ["Q4_K"], ["Q6_K"], ["Q4_K", "Q6_K"]], ids="+".join)
def test_quantized_tensors_are_what_their_codes_stand_for(kinds, tiny_model, tmp_path):
    model = copy.deepcopy(tiny_model(head_dim=64, hidden_size=256, intermediate_size=512).reference)
    write_gguf(tmp_path / "quantized.gguf", model, kinds=kinds)
    source = model_source(str(tmp_path / "quantized.gguf"))
    state = load_state_dict(source, decoder_config(load_config(source), source), torch.float32)
    assert len(model.state_dict()) == 3 + 9 * 2
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(state.tensors.get(name), expected, rtol=1e-6, atol=1e-7, msg=name)


def llama3_divisors(head_dim: int, theta: float) -> torch.Tensor:
    """What llama.cpp divides frequencies by: 8 at wavelengths above 8192, 1 below 2048, and between them between."""
    wavelengths = 2 * torch.pi * theta ** (torch.arange(0, head_dim, 2) / head_dim)
    share = ((8192 / wavelengths - 1) / 3).clamp(0, 1)
    return 1 / ((1 - share) / 8 + share)


@pytest.mark.parametrize("stored", [False, True])
def test_llama_3s_rope_is_read_from_its_divisors(stored, tiny_model, tmp_path, make_plan):
    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    sizes = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512}
    model = copy.deepcopy(tiny_model(**sizes, rope_parameters=rope).reference)
    divisors = llama3_divisors(64, 5e5)
    write_gguf(tmp_path / "llama3.gguf", model, kinds=["Q4_K"], rope_factors=divisors.numpy())
    plan = replace(make_plan(), weights=Weights(stored=stored))
    engine = runtime.load(plan, str(tmp_path / "llama3.gguf"), device="cpu")
    tokens = list(range(40))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    actual = engine.teacher_forced_logits([tokens], [[]])[0, -1]
    assert (actual - expected).abs().max() < 2e-5 * expected.abs().max()


def test_divisors_of_another_rope_are_refused(tiny_model, tmp_path):
    write_gguf(tmp_path / "odd.gguf", tiny_model(head_dim=16).reference, rope_factors=np.linspace(1, 8, 8, dtype="f4"))
    with pytest.raises(ModelError, match=r"rope_freqs.weight is not of Llama 3's RoPE"):
        converted(tmp_path / "odd.gguf")


def writers(tiny_model):
    """A file of each reader: transformers', and those for gpt-oss and for Qwen3.5; and one with experts."""
    return (
        lambda path: write_gguf(path, tiny_model(head_dim=16).reference),
        lambda path: write_gpt_oss(path, copy.deepcopy(tiny_model("gpt_oss", rope_parameters=YARN).reference), "Q8_0"),
        lambda path: write_qwen35(path, tiny_model("qwen3_5_text").reference),
        lambda path: write_gguf(path, tiny_model("qwen3_moe").reference),
    )


@pytest.mark.parametrize("index", range(4))
def test_a_converted_configuration_needs_no_class_of_its_family(index, tiny_model, tmp_path):
    writers(tiny_model)[index](tmp_path / "model.gguf")
    folder = model_source(str(tmp_path / "model.gguf"))
    expected = decoder_config(load_config(folder, of_family=True), folder)
    assert decoder_config(load_config(folder), folder) == expected


@pytest.mark.parametrize("index", range(3), ids=["llama", "gpt-oss", "qwen3.5"])
def test_a_conversion_says_what_it_does(index, tiny_model, tmp_path, monkeypatch, capsys):
    """Its stages in order, each from its beginning; and nothing else shows a bar, not even on a terminal."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    path, said = tmp_path / "model.gguf", []
    writers(tiny_model)[index](path)
    capsys.readouterr()
    converted(path, lambda *state: said.append(state))
    layers = load_shape(str(path)).layers
    copied = [(done, total) for what, done, total in said if what.startswith("copying the weights")]
    assert copied == [(done, layers + 1) for done in range(layers + 1)]
    stages = dict.fromkeys(what for what, _, _ in said)
    assert [*stages] == ["reading model.gguf, once", "reading the vocabulary, once", "copying the weights, once"]
    assert capsys.readouterr().err == ""
    converted(path, lambda what, *_: pytest.fail(what))


def test_the_tokenizer_comes_along(path):
    tokenizer = load_tokenizer(model_source(str(path)))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("+-+")) == ["+-", "+"]


@pytest.mark.parametrize("added, first", [(True, 7), (True, 2), (False, 7)])
def test_a_tokenizer_without_the_first_token_of_its_file_is_refused(monkeypatch, added, first):
    """transformers before 5.23 reads Gemma's so."""
    tokenizer = SimpleNamespace(encode=lambda text: [first, 9], bos_token_id=2, bos_token="<bos>")
    monkeypatch.setattr(gguf_convert.transformers.AutoTokenizer, "from_pretrained", lambda **where: tokenizer)
    header = SimpleNamespace(metadata={"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_bos_token": added})
    if added and first != 2:
        with pytest.raises(ValueError, match=r"without the first token <bos>; allowed: a release that does not"):
            gguf_convert._tokenizer({}, header)
    else:
        assert gguf_convert._tokenizer({}, header) is tokenizer


def test_a_tokenizer_that_contradicts_itself_is_one_clear_line(tiny_model, tmp_path, cache_home):
    path = tmp_path / "strange.gguf"
    write_gguf(path, tiny_model(head_dim=16).reference, merge="! !")  # there is no token "!!"
    with pytest.raises(ModelError, match=r"cannot read the GGUF file .*strange\.gguf: .*out of vocabulary") as error:
        converted(path)
    assert "\n" not in str(error.value)
    assert kept(cache_home) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"GGUF", b"not a model at all" * 50, b"GGUF\x03\x00\x00\x00" + b"\xff" * 64],
    ids=["empty", "magic only", "text", "huge counts"],
)
def test_a_corrupt_file_is_one_clear_line_and_leaves_nothing(content, tmp_path, cache_home):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"cannot read the GGUF file .*bad\.gguf") as error:
        converted(path)
    assert "\n" not in str(error.value)
    assert kept(cache_home) == []


def test_a_truncated_file_is_one_clear_line(path, cache_home):
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelError, match=r"cannot read the GGUF file .*model\.gguf: "):
        converted(path)
    assert kept(cache_home) == []


def test_nothing_beside_the_file_is_read_or_run(path, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    mark = tmp_path / "ran"
    (tmp_path / "custom.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Custom: pass\n")
    names = {
        "AutoConfig": "custom.Custom",
        "AutoModelForCausalLM": "custom.Custom",
        "AutoTokenizer": ["custom.Custom"] * 2,
    }
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps({"model_type": "custom", "auto_map": names}))
    folder = converted(path)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert not mark.exists()


@pytest.fixture
def conversions(monkeypatch):
    """The files that were converted, each to a folder with a config only; one named broken fails halfway."""
    calls = []

    def convert(path, staging, on_progress):
        calls.append(path)
        (staging / "config.json").write_text("{}")
        if path.stem == "broken":
            raise ModelError("broken")

    monkeypatch.setattr(gguf_convert, "_convert", convert)
    return calls


def test_a_file_is_converted_once(path, conversions):
    folder = converted(path)
    assert converted(path) == folder
    assert conversions == [path]
    assert (folder / "config.json").read_text() == "{}"


def test_a_failed_conversion_is_not_cached(path, conversions, cache_home):
    path = path.rename(path.with_stem("broken"))
    for _ in range(2):
        with pytest.raises(ModelError, match="broken"):
            converted(path)
    assert len(conversions) == 2
    assert kept(cache_home) == []


@pytest.mark.parametrize("damage", ["cut", "changed", "file", "manifest", "garbage"])
def test_a_damaged_folder_is_made_again(path, conversions, damage):
    folder = converted(path)
    config, manifest = folder / "config.json", folder / gguf_convert.MANIFEST
    changes = {
        "cut": lambda: config.write_text("{"),
        "changed": lambda: config.write_text("[]"),  # as long as before
        "file": config.unlink,
        "manifest": manifest.unlink,
        "garbage": lambda: manifest.write_text("[1, 2]"),
    }
    changes[damage]()
    assert converted(path) == folder
    assert len(conversions) == 2
    assert config.read_text() == "{}"


def test_files_that_nobody_wrote_since_are_not_read_again(path, conversions, monkeypatch):
    folder = converted(path)
    monkeypatch.setattr(gguf_convert, "_checksum", lambda file, *_: pytest.fail(f"{file} was read"))
    assert converted(path) == folder
    assert len(conversions) == 1


def test_a_copied_folder_is_whole_if_its_content_is(path, conversions):
    folder = converted(path)
    for file in folder.iterdir():
        os.utime(file, ns=(0, 0))
    assert converted(path) == folder
    assert len(conversions) == 1


def test_what_a_killed_conversion_left_goes(path, conversions, cache_home):
    folder = converted(path)
    folder.rename(folder.with_name(f".converting-{folder.name}"))
    assert converted(path) == folder
    assert kept(cache_home) == [folder.name]


def test_what_a_killed_conversion_of_another_file_left_goes_as_well(path, conversions, cache_home):
    """The file may have changed or gone since: nobody would convert it under that name again."""
    left = cache_home / "ridgeplan" / "models" / f"{gguf_convert.STAGING}other-0123456789abcdef"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(bytes(100))
    assert kept(cache_home) == [left.name]
    folder = converted(path)
    assert kept(cache_home) == [folder.name]


@pytest.mark.parametrize("running", [False, True])
def test_what_a_killed_conversion_left_goes_on_warm_runs_too(path, conversions, cache_home, running):
    folder = converted(path)
    left = folder.with_name(f"{gguf_convert.STAGING}other-0123456789abcdef")
    left.mkdir()
    with FileLock(folder.parent / gguf_convert.LOCK) if running else nullcontext():  # a conversion holds the lock
        assert converted(path) == folder
    assert left.exists() == running
    assert conversions == [path]


@pytest.mark.parametrize("name", ["模" * 80, "two words"])
def test_any_file_name_can_be_converted(path, conversions, name):
    path = path.rename(path.with_stem(name))
    folder = converted(path)
    assert folder.name.isascii()
    assert (folder / "config.json").exists()


def test_a_header_with_more_layers_than_tensors_is_refused_at_once(tmp_path, conversions):
    path = tmp_path / "deep.gguf"
    path.write_bytes(gguf_bytes({**METADATA, "llama.block_count": 10_000}, TENSORS))
    with pytest.raises(ModelError, match=r"cannot read the GGUF file .*: it has 12 tensors for 10000 layers"):
        converted(path)
    assert not conversions


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_file_is_refused_before_it_is_read(kind, monkeypatch, tmp_path, cache_home):
    """A pipe would be waited for, and a device may have no end."""
    path = tmp_path / "special.gguf"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    monkeypatch.setattr(gguf_convert, "_blocks", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ModelError, match=r"special\.gguf: it is a pipe or a device; allowed: a file$"):
        converted(path)
    assert not cache_home.exists()


def test_a_cache_that_cannot_be_written_is_a_model_error(path, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write the converted model to .*Not a directory"):
        converted(path)


def test_a_disk_that_fills_up_is_one_clear_line(path, monkeypatch, cache_home):
    def save_file(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(gguf_convert, "save_file", save_file)
    with pytest.raises(ModelError, match=r"cannot write the converted model to .*: I/O error: No space left on device"):
        converted(path)
    assert kept(cache_home) == []


@pytest.mark.parametrize(("kinds", "bits"), [([], 32), (["Q4_K"], 4.625), (["F16"], 16)])
def test_what_does_not_fit_is_refused_before_it_is_read(kinds, bits, path, conversions, monkeypatch, tiny_model):
    """Blocks and numbers as the file has them."""
    model = copy.deepcopy(tiny_model(head_dim=64, hidden_size=256, intermediate_size=512).reference)
    write_gguf(path, model, kinds=kinds)
    tensors = gguf.GGUFReader(path).tensors
    needed_bytes = sum(int(each.n_elements) * (bits if len(each.shape) > 1 else 32) / 8 for each in tensors)
    free, usage = [needed_bytes - 1], shutil.disk_usage(path.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free[0]))
    with pytest.raises(ModelError, match=r"converting .* takes 0\.0 GB of disk and 0\.0 GB are free"):
        converted(path)
    assert not conversions
    free[0] += 1
    converted(path)
    assert conversions


def converting(path, marks, seconds):
    """A process that converts `path` in so many seconds and leaves a mark when it starts to, and a process's answer.

    It is forked: what it would import takes longer than all that it does.
    """
    forking = multiprocessing.get_context("fork")
    answers = forking.SimpleQueue()

    def convert(path, staging, on_progress):
        Path(marks, f"started-{os.getpid()}").touch()
        (staging / "config.json").write_text("{")
        time.sleep(seconds)
        (staging / "config.json").write_text("{}")

    def run():
        gguf_convert._convert = convert
        answers.put(gguf_convert.converted(path))

    process = forking.Process(target=run)
    process.start()
    return process, answers


def finished(process, answers):
    """The folder that it converted into."""
    process.join(120)
    assert process.exitcode == 0
    return answers.get()


def started(marks):
    return len([*marks.iterdir()])


def test_two_processes_convert_once(path, tmp_path, cache_home):
    marks = tmp_path / "marks"
    marks.mkdir()
    processes = [converting(path, marks, 0.5) for _ in range(2)]
    folders = {finished(*process) for process in processes}
    assert len(folders) == started(marks) == 1
    assert (folders.pop() / "config.json").read_text() == "{}"


def test_a_conversion_that_was_killed_is_done_by_the_next(path, tmp_path, cache_home):
    marks = tmp_path / "marks"
    marks.mkdir()
    first, _ = converting(path, marks, 600)
    while not started(marks):
        assert first.is_alive()
        time.sleep(0.05)
    first.kill()
    first.join()
    (left,) = kept(cache_home)
    assert left.startswith(".converting-")
    folder = finished(*converting(path, marks, 0))
    assert kept(cache_home) == [folder.name]


@pytest.mark.parametrize("changed", ["content", "size"])
def test_a_changed_file_is_converted_anew(path, conversions, changed):
    first, status, content = converted(path), path.stat(), path.read_bytes()
    if changed == "content":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    else:
        path.write_bytes(content + b"\0")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = converted(path)
    assert second != first and second.parent == first.parent
    assert len(conversions) == 2


def test_an_identical_file_elsewhere_is_not_converted_again(path, conversions, tmp_path):
    folder = converted(path)
    copied = tmp_path / "elsewhere" / "other name.gguf"
    copied.parent.mkdir()
    shutil.copy(path, copied)
    os.utime(path, ns=(0, 0))
    assert converted(copied) == converted(path) == folder
    assert conversions == [path]


def test_a_content_is_read_once(path, conversions, monkeypatch):
    folder = converted(path)
    monkeypatch.setattr(gguf_convert, "_blocks", lambda *_: pytest.fail("the file was read again"))
    assert converted(path) == folder


@pytest.mark.parametrize("content", ["", "../../elsewhere", "gguf-other-0123456789abcdeF", "é"])
def test_a_damaged_name_of_a_content_is_found_again(path, conversions, content):
    folder = converted(path)
    (remembered,) = (folder.parent / gguf_convert.CONTENTS).iterdir()
    remembered.write_text(content)
    assert converted(path) == folder
    assert conversions == [path] and remembered.read_text() == folder.name


def test_counts_that_the_file_cannot_hold_reach_no_other_reader(tmp_path, monkeypatch, cache_home):
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda **_: pytest.fail("the file was read"))
    path = tmp_path / "huge.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**40, 1) + bytes(4096))
    with pytest.raises(ModelError, match=r"cannot read the GGUF file .*: it announces 1099511627776 items"):
        converted(path)
    assert kept(cache_home) == []


def test_the_tokenizer_of_a_converted_file_is_read_alike_by_its_familys_class(smollm2: Path) -> None:
    folder = str(converted(smollm2))
    tokenizer, by_family = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    text = "<|im_start|>user\nAn émigré's 12,345 words\t\n\n  😀<|im_end|>"
    assert tokenizer.encode(text) == by_family.encode(text)
    messages = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == by_family.apply_chat_template(
        messages, tokenize=False
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (by_family.bos_token_id, by_family.eos_token_id)
