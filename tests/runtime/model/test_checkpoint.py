"""Reading a checkpoint: damage is one line, nothing in it is executed, weights are held once."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeplan import runtime
from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model.checkpoint import checkpoint_elements, load_config, load_tokenizer, load_weights
from ridgeplan.runtime.model_config import decoder_config


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(broken_copy, make_plan, value):
    weights = load_file(broken_copy / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(weights, broken_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="holds weights that are NaN or infinite"):
        runtime.load(make_plan(), str(broken_copy))


def test_elements_are_those_of_the_files(tiny_model):
    model = tiny_model()
    assert checkpoint_elements(model.folder) == sum(one.numel() for one in model.reference.state_dict().values())


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
    shape = decoder_config(load_config(model.folder), model.folder).shape
    weights = load_weights(model.folder, shape, torch.device("cpu"), torch.float32)
    expected = sum(parameter.numel() * 4 for parameter in model.reference.parameters())
    stretched_norms = shape.layers * (shape.q_heads + shape.kv_heads - 2) * shape.head_dim * 4
    assert weights.bytes == expected + (stretched_norms if family == "qwen3" else 0)
