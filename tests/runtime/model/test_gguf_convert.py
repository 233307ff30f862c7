"""A GGUF file becomes a safetensors folder with the same weights, once for each content."""

import os
import struct
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

from ridgeplan import runtime
from ridgeplan.runtime.errors import ModelError
from ridgeplan.runtime.model.checkpoint import load_tokenizer, model_source
from ridgeplan.runtime.model.gguf_convert import converted

# GGUF's names of a layer's tensors, and transformers'.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
REST = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def interleaved(weight, heads):
    """The order of GGUF's query and key rows: the halves of a rotary pair are neighbours there."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model, merge: str = "+ -") -> None:
    """A transformers Llama in float32, as llama.cpp's converter writes it."""
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: config.vocab_size - 1]
    writer.add_token_list([*letters, "+-"])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges([merge])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    names = {f"{name}.weight": f"{ours}.weight" for name, ours in REST.items()}
    for layer in range(config.num_hidden_layers):
        names |= {f"blk.{layer}.{name}.weight": f"model.layers.{layer}.{ours}.weight" for name, ours in LAYER.items()}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, ours in names.items():
        count = heads.get(name.split(".")[-2])
        tensor = state[ours] if count is None else interleaved(state[ours], count)
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def path(tiny_model, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_model(head_dim=16).reference)
    return path


def test_weights_come_out_bit_by_bit(path, tiny_model, make_plan):
    model = tiny_model(head_dim=16).reference
    found = load_file(Path(model_source(str(path))) / "model.safetensors")
    expected = {name: tensor for name, tensor in model.state_dict().items() if name in found}
    assert len(expected) == len(found) == 3 + 9 * 2
    assert all(torch.equal(found[name], expected[name]) for name in found)
    engine = runtime.load(make_plan(), str(path), device="cpu")
    tokens = list(range(40))
    with torch.inference_mode():
        reference = model(torch.tensor([tokens])).logits[0, -1]
    assert engine.generate(tokens, 1).tokens[0] == [int(reference.argmax())]
    assert engine.config.shape.q_heads == 4


def test_the_tokenizer_comes_along(path):
    tokenizer = load_tokenizer(model_source(str(path)))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("+-+")) == ["+-", "+"]


def test_a_tokenizer_that_contradicts_itself_is_one_clear_line(tiny_model, tmp_path, cache_home):
    path = tmp_path / "strange.gguf"
    write_gguf(path, tiny_model(head_dim=16).reference, merge="! !")  # there is no token "!!"
    with pytest.raises(ModelError, match=r"cannot read the GGUF file .*strange\.gguf: .*out of vocabulary") as error:
        converted(path)
    assert "\n" not in str(error.value)
    assert list((cache_home / "ridgeplan" / "models").iterdir()) == []


@pytest.mark.parametrize("changed", ["time", "size"])
def test_a_changed_file_is_converted_anew(path, changed):
    first, status = converted(path), path.stat()
    assert converted(path) == first
    if changed == "time":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    else:
        path.write_bytes(path.read_bytes() + b"\0")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = converted(path)
    assert second != first
    assert {first.parent, second.parent} == {first.parent}


def test_counts_that_the_file_cannot_hold_reach_no_other_reader(tmp_path, monkeypatch, cache_home):
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda **_: pytest.fail("the file was read"))
    path = tmp_path / "huge.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**40, 1) + bytes(4096))
    with pytest.raises(ModelError, match=r"cannot read the GGUF file .*: it announces 1099511627776 items"):
        converted(path)
    assert not [*cache_home.glob("ridgeplan/models/*")]
