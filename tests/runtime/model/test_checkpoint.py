"""Reading a checkpoint: damage is one line, nothing in it is executed, weights are held once."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeplan import runtime
from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model.checkpoint import (
    checkpoint_elements,
    load_config,
    load_state_dict,
    load_tokenizer,
    load_weights,
)
from ridgeplan.runtime.model.config import decoder_config


@pytest.fixture
def broken_copy(tiny_model, tmp_path):
    """A copy of a tiny model's folder, to be damaged."""
    return Path(shutil.copytree(tiny_model().folder, tmp_path / "copy"))


def one_line(error):
    return "\n" not in str(error.value)


def test_missing_weights_are_not_filled_with_noise(broken_copy, make_plan):
    weights = load_file(broken_copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, the first is model\.layers\.1\.mlp\.up") as error:
        runtime.load(make_plan(), str(broken_copy))
    assert one_line(error)


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_damaged_weights_are_a_model_error(damage, broken_copy, make_plan):
    path = broken_copy / "model.safetensors"
    if damage == "truncate":
        path.write_bytes(path.read_bytes()[:1000])
    else:
        path.unlink()
    with pytest.raises(ModelError, match="cannot load the model") as error:
        runtime.load(make_plan(), str(broken_copy))
    assert one_line(error)


@pytest.mark.parametrize("config", ["{", "{}", json.dumps({"model_type": "no-such-model"})])
def test_a_damaged_config_is_a_model_error(config, broken_copy, make_plan):
    (broken_copy / "config.json").write_text(config)
    with pytest.raises(ModelError, match="cannot load the model") as error:
        runtime.load(make_plan(), str(broken_copy))
    assert one_line(error)


@pytest.fixture
def saying_yes(monkeypatch):
    """Whoever asks on stdin is told "y", as by `yes | ridgeplan run`."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")


def own_code(folder, key):
    """Python beside a checkpoint that leaves a mark where it runs; `key` names a class in it."""
    mark = folder / "ran"
    (folder / "custom.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Custom: pass\n")
    return mark, {"auto_map": {key: "custom.Custom"}}


def test_a_configs_own_code_is_never_run(broken_copy, make_plan, saying_yes):
    mark, code = own_code(broken_copy, "AutoConfig")
    config = json.loads((broken_copy / "config.json").read_text())
    (broken_copy / "config.json").write_text(json.dumps(config | {"model_type": "custom"} | code))
    with pytest.raises(ModelError, match="cannot load the model") as error:
        runtime.load(make_plan(), str(broken_copy))
    assert one_line(error)
    assert not mark.exists()


def test_a_models_own_code_is_never_run(broken_copy, make_plan, saying_yes, prompts):
    """Of a family that transformers knows, its own class runs instead."""
    mark, code = own_code(broken_copy, "AutoModelForCausalLM")
    config = json.loads((broken_copy / "config.json").read_text())
    (broken_copy / "config.json").write_text(json.dumps(config | code))
    engine = runtime.load(make_plan(), str(broken_copy), device="cpu")
    assert len(engine.generate(prompts(20), 3).tokens[0]) == 3
    assert not mark.exists()


def test_a_tokenizers_own_code_is_never_run(broken_copy, saying_yes):
    mark, code = own_code(broken_copy, "AutoTokenizer")
    code["auto_map"]["AutoTokenizer"] = ["custom.Custom", "custom.Custom"]
    (broken_copy / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Custom"} | code))
    with pytest.raises(ModelError, match="cannot load the model") as error:
        load_tokenizer(str(broken_copy))
    assert one_line(error)
    assert not mark.exists()


def test_a_pickle_is_not_opened(broken_copy, make_plan):
    mark = broken_copy / "ran"

    class Marks:
        def __reduce__(self):
            return open, (str(mark), "w")

    (broken_copy / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Marks()}, broken_copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot load the model") as error:
        runtime.load(make_plan(), str(broken_copy))
    assert one_line(error)
    assert not mark.exists()


def write_index(folder, index, held="shard.safetensors"):
    """The checkpoint as one shard called `held`, and an index."""
    (folder / "model.safetensors").rename(folder / held)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def of_all(folder, file):
    """An index that finds every weight in one file."""
    return {"metadata": {}, "weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), file)}


def test_an_index_names_the_files_that_are_read_and_counted(broken_copy, make_plan, prompts):
    elements = checkpoint_elements(str(broken_copy))
    write_index(broken_copy, of_all(broken_copy, "shard.safetensors"))
    save_file({"other": torch.zeros(7)}, broken_copy / "other.safetensors")
    assert checkpoint_elements(str(broken_copy)) == elements
    assert len(runtime.load(make_plan(), str(broken_copy), device="cpu").generate(prompts(20), 3).tokens[0]) == 3


@pytest.mark.parametrize("file", ["x.bin", "../x.safetensors", "sub/x.safetensors", "/dev/zero", 5, None])
def test_an_index_names_nothing_but_safetensors_beside_it(broken_copy, make_plan, file):
    """transformers would open the pickle, look into other folders, and read the device without end."""
    write_index(broken_copy, of_all(broken_copy, file))
    torch.save({}, broken_copy / "x.bin")
    with pytest.raises(ModelError, match=r"index\.json names .*; allowed: safetensors files beside it") as error:
        runtime.load(make_plan(), str(broken_copy))
    assert one_line(error)


@pytest.mark.parametrize("index", [[], {}, {"metadata": {}, "weight_map": []}, {"weight_map": {}}])
def test_a_damaged_index_is_a_model_error(broken_copy, make_plan, index):
    write_index(broken_copy, index)
    with pytest.raises(ModelError, match=r"index\.json has no object called (weight_map|metadata)"):
        runtime.load(make_plan(), str(broken_copy))


def test_a_config_cannot_name_a_pickle(broken_copy, make_plan, prompts):
    """transformers would open the file instead of the weights that were checked."""
    expected = runtime.load(make_plan(), str(broken_copy), device="cpu").generate(prompts(20), 3).tokens
    (broken_copy / "adapter_model.bin").write_bytes(b"a pickle")
    change_config(broken_copy, transformers_weights="adapter_model.bin")
    assert runtime.load(make_plan(), str(broken_copy), device="cpu").generate(prompts(20), 3).tokens == expected


def test_a_config_cannot_name_attention_from_the_hub(broken_copy, make_plan, prompts):
    """transformers would download the repository's kernels and run them."""
    change_config(broken_copy, _attn_implementation="owner/kernels")
    assert len(runtime.load(make_plan(), str(broken_copy), device="cpu").generate(prompts(20), 3).tokens[0]) == 3


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_labels": 10**9}, "num_labels is 1000000000; allowed: up to 100000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; allowed: up to 10000"),
        ({"num_hidden_layers": 10_000}, r"it has \d+ tensors for 10000 layers"),
        (
            {"model_type": "bert"},
            "model_type is 'bert', which is not executed; `ridgeplan list models` shows",
        ),
        ({"model_type": "qwen4"}, "model_type is 'qwen4', .*; near it are qwen3, qwen2"),
        ({"vocab_size": 100}, r"the weight lm_head\.weight is \[128, 64\]; its config\.json needs \[100, 64\]"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; allowed: above 0 up to 1"),
        ({"rms_norm_eps": "x"}, "'rms_norm_eps' expected float, got str"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused_at_once(broken_copy, make_plan, changes, message):
    """transformers makes a list of all labels and builds all layers, for minutes or until the memory ends."""
    change_config(broken_copy, **changes)
    with pytest.raises(ModelError, match=message) as error:
        runtime.load(make_plan(), str(broken_copy), device="cpu")
    assert one_line(error)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"])
def test_a_huge_file_is_refused_unread(broken_copy, name):
    with (broken_copy / name).open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ModelError, match=f"'{name}' has 1099511627776 bytes; allowed: up to 67108864"):
        load_tokenizer(str(broken_copy))


def test_a_pipe_is_not_waited_for(broken_copy, make_plan):
    os.mkfifo(broken_copy / "other.safetensors")
    with pytest.raises(ModelError, match=r"'other\.safetensors' is a pipe or a device; allowed: files"):
        runtime.load(make_plan(), str(broken_copy))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "lm_head", "model.embed_tokens"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(broken_copy, make_plan, value, name):
    weights = load_file(broken_copy / "model.safetensors")
    weights[f"{name}.weight"][3, 5] = value
    save_file(weights, broken_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="holds weights that are NaN or infinite"):
        runtime.load(make_plan(), str(broken_copy))


def test_elements_are_those_of_the_files(tiny_model):
    model = tiny_model()
    assert checkpoint_elements(model.folder) == sum(tensor.numel() for tensor in model.reference.state_dict().values())


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen2", {}),
    ],
    ids=["llama-tied", "qwen3", "qwen2"],
)
def test_weights_are_held_once(family, changes, tiny_model):
    model = tiny_model(family, **changes)
    config = decoder_config(load_config(model.folder), model.folder)
    shape = config.shape
    weights = load_weights(model.folder, config, torch.device("cpu"), torch.float32)
    expected = sum(parameter.numel() * 4 for parameter in model.reference.parameters())
    stretched_norms = shape.layers * (shape.q_heads + shape.kv_heads - 2) * shape.head_dim * 4
    assert weights.bytes == expected + (stretched_norms if family == "qwen3" else 0)


def with_tensors(folder, extra, **keys):
    """Adds tensors to a checkpoint, and keys to its configuration."""
    path, config = folder / "model.safetensors", folder / "config.json"
    save_file(load_file(path) | extra, path, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))
    return str(folder)


@pytest.mark.parametrize("target_bits", [16, 8])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["self_attn.q_scale", "post_feedforward_layernorm.weight"])
def test_a_tensor_that_the_family_does_not_read_is_refused(name, packed, target_bits, broken_copy, make_plan):
    """A checkpoint of another architecture than its model_type would run with wrong logits."""
    extra = {f"model.layers.{layer}.{name}": torch.ones(32) for layer in range(2)}
    keys = {"quantization_config": {"quant_method": "fp8"}} if packed else {}
    folder = with_tensors(broken_copy, extra, **keys)
    message = rf"the checkpoint .* has 2 weights that 'llama' does not read: model\.layers\.\*\.{name}"
    with pytest.raises(ModelError, match=message) as error:
        runtime.load(make_plan(target_bits=target_bits), folder)
    assert one_line(error)


def test_what_only_transformers_reads_is_refused(tiny_model):
    """As of a family whose table forgot its norms."""
    folder = tiny_model().folder
    state = load_state_dict(folder, decoder_config(load_config(folder), folder), torch.float32)
    state.tensors["model.layers.1.self_attn.value_norm.weight"] = torch.ones(32)
    with pytest.raises(ModelError, match=r"1 weights .* not read: model\.layers\.\*\.self_attn\.value_norm\.weight"):
        state.decoder_weights(torch.device("cpu"))


@pytest.mark.parametrize("packed", [False, True])
def test_tensors_beside_the_decoder_are_left_unread(packed, broken_copy, make_plan):
    """RoPE's frequencies, scales of a cache, a layer of multi-token prediction, and a part that sees images."""
    names = (
        "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.self_attn.k_scale", "mtp.fc.weight",
        "model.layers.2.self_attn.q_proj.weight", "vision_tower.layers.0.norm.bias", "multi_modal_projector.norm",
    )  # fmt: skip
    keys = {"quantization_config": {"quant_method": "fp8"}} if packed else {}
    folder = with_tensors(broken_copy, {name: torch.ones(4) for name in names}, num_nextn_predict_layers=1, **keys)
    assert runtime.load(make_plan(), folder).generate([[1, 2, 3]], 2).tokens
