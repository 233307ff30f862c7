"""Model shapes from a Hugging Face config.json, local or fetched from the hub, without transformers."""

from __future__ import annotations

import json
import os
import re
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ridgeplan.roofline.catalog import families as known
from ridgeplan.roofline.catalog.files import read_document
from ridgeplan.roofline.catalog.layers import DELTA_RULE, MAMBA2, MLP, Attention, LayerGroup, Routing, State
from ridgeplan.roofline.catalog.model_shape import MAX_LAYERS, BadModelFile, ModelShape, UnknownModel
from ridgeplan.roofline.catalog.validation import brief
from ridgeplan.roofline.catalog.weight_formats import weight_bits_of_config

REACH_S = 3  # for the hub's first answer
CONFIG = "config.json"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TRUE = ("1", "ON", "YES", "TRUE")  # as huggingface_hub reads them


def fetched_config(hub_id: str) -> Path:
    """The cached config.json of `hub_id`, downloaded now.

    Raises UnknownModel, one line: at once where an offline variable is set, after REACH_S where the hub does not
    answer, or with the hub's own reason.
    """
    forbidden = next((name for name in OFFLINE if os.environ.get(name, "").upper() in TRUE), None)
    if forbidden:
        raise UnknownModel(
            f"{hub_id} is not in the local Hugging Face cache, and {forbidden} is set; {_advice(hub_id)}"
        )
    from huggingface_hub import constants, get_session, hf_hub_download

    try:
        get_session().head(constants.ENDPOINT, timeout=REACH_S)  # the download itself would retry for minutes
    except Exception as error:  # whatever the HTTP library of the day raises where there is no network
        raise UnknownModel(
            f"{hub_id} is not in the local Hugging Face cache, and {constants.ENDPOINT} cannot be reached within "
            f"{REACH_S} s; {_advice(hub_id)}"
        ) from error
    try:
        return Path(hf_hub_download(hub_id, CONFIG, etag_timeout=REACH_S))
    except (OSError, ValueError) as error:  # huggingface_hub's own errors are of these kinds
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnknownModel(f"cannot download {CONFIG} of {hub_id}: {reason[:200]}") from error


def _advice(hub_id: str) -> str:
    return f"`hf download {hub_id} {CONFIG}` gets it where the hub is reached"


Config = Mapping[str, Any]
Fields = dict[str, Any]


def shape_from_config_file(path: Path, name: str) -> ModelShape:
    """The shape that a config.json describes. Raises BadModelFile, one line that names the file."""
    try:
        config = json.loads(read_document(path))
        return shape_from_config(config, name, source=str(path))
    except OSError as error:
        raise BadModelFile(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{path} is not a usable config.json: {error}") from None


def shape_from_config(config: object, name: str, source: str) -> ModelShape:
    """The shape of a parsed config.json, of transformers 4 or 5. Raises ValueError naming the bad or missing key.

    A `model_type` that `families` does not know is read by its keys, with a note, if these say all of its structure.
    """
    if not isinstance(config, dict):
        raise ValueError(f"it must hold an object, not {brief(config)}")
    keys, family = _family_keys(config)
    if keys.get("is_encoder_decoder"):
        raise ValueError("is_encoder_decoder is true; allowed: models without an encoder")
    notes = []
    if keys.model_type in known.families():
        shape = _read_shape(keys, family, name, source)
    else:
        try:
            shape = _read_shape(keys, family, name, source)
            unread = keys.unread()
        except ValueError as error:
            raise ValueError(f"model_type {brief(keys.model_type)} is not known, and {error}") from None
        left_out = f"; not read: {', '.join(unread)}" if unread else ""
        notes.append(f"{name} was {READ_BY_FIELDS} ({brief(keys.model_type)}){left_out}")
    beside = [key for key, value in config.items() if _BESIDE.search(key) and isinstance(value, dict) and value]
    if beside:
        notes.append(f"only the language model of {name} is counted, without its {' and '.join(beside)}")
    return replace(shape, note="; ".join(notes), weight_bits=weight_bits_of_config(keys, shape))


def _read_shape(keys: _Keys, family: known.Family, name: str, source: str) -> ModelShape:
    layers = _layers(keys, family)
    shape = ModelShape(name=name, source=source, **_flat_fields(keys, family, layers))
    if len(set(layers)) > 1 or not _says_all(shape, layers[0]):
        shape = replace(shape, groups=_groups(layers))
    return shape


PER_LAYER = "per_layer_config"
KDA_KEYS = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")  # of transformers' class
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
PATTERNS = ("sliding_window_pattern", "global_attn_every_n_layers")  # every so many layers see all tokens
WINDOW_KEYS = ("use_sliding_window", "max_window_layers", *PATTERNS)  # moot beside `layer_types`
READ_BY_FIELDS = "read by its fields; not checked against this architecture"
# Of what stands beside a language model: the keys of encoders of images and sound.
_BESIDE = re.compile(
    r"^(?!text|quantization|compression|linear_attn|per_layer|generation)\w+_(config|processor)$|^embd_layer$"
)
# Of a key that may say something of the layers. For a family that is not known, such a key must have been read.
_STRUCTURE = re.compile(
    r"expert|moe|mamba|ssm|linear_|conv|lora|latent|index|compress|hybrid|altup|laurel|recurr|ngram|layer_types|pattern|"
    r"window|swa_|sparse|cross|encoder|hash|block_type|attn_type|state_size|global|per_layer|local|cycles|per_stack|"
    r"kv_channels|loop|mla_|_kind|_rank$|multi_query|cla_|block_configs|attention_(chunk|other_setting)"
)
_GATE = re.compile(r"gated_(mlp|act|ffn|linear)|glu")  # of MLPs, which are read as gated
# Keys that say nothing of shapes: training, routing, norms, factors, tokens, and names of implementations.
_HARMLESS = re.compile(
    r"^_|_coef$|aux_loss|score|scoring|jitter|router|topk_method|group|scal|norm_topk|_dtype$|use_cache|"
    r"^expert_model|_implementation|chunk_size_feed|local_rope|rope_local|^time_step|mamba_(expand|chunk)|"
    r"linear_(a_log|dt|allow)|return_dict|^id2label|^label2id|initializer|_version$|eps$|token_(id|ids|index)$|"
    r"(embedding|residual|attention|logits?|output)_multiplier|softcap|dropout|pdrop|pretraining_tp|^qk_head_dim|"
    r"rope_(theta|interleave)|architectures|auto_map|tokenizer|name_or_path|^output_|problem_type|fp32|(?<!encoder)_config$"
)


class _Keys(UserDict[str, Any]):
    """The keys of a config.json over the family's defaults; remembers which ones were read."""

    def __init__(self, values: Config, defaults: Config) -> None:
        self._read: set[str] = set()
        super().__init__({**defaults, **values})

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    @property
    def model_type(self) -> str:
        """The family's name."""
        return str(self["model_type"])

    def unread(self) -> list[str]:
        """The keys that hold a value, were not read, and may matter; 0 and false are values, but need no layer.

        Raises ValueError for one that may say something of the layers.
        """
        for key in ACTIVATIONS:
            if self.get(key) not in (None, "silu", "swish"):
                raise ValueError(f"{key} {brief(self[key])} does not say whether the MLP is gated")
        ungated = next((key for key, value in self.data.items() if value is False and _GATE.search(key)), None)
        if ungated:
            raise ValueError(f"{ungated} is false; allowed: gated MLPs")
        given = {key: value for key, value in self.data.items() if value not in (None, "", [], {})}
        values = {key: value for key, value in given.items() if key not in self._read}
        if values.get("cla_share_factor") and self.get("use_cla") is False:
            del values["cla_share_factor"]
        unread = [key for key in values if not _HARMLESS.search(key)]
        unknown = [key for key in unread if values[key] and _STRUCTURE.search(key)]
        if unknown:
            raise ValueError(f"{', '.join(unknown)} {'has' if len(unknown) == 1 else 'have'} no known meaning")
        return unread


def _family_keys(config: Config) -> tuple[_Keys, known.Family]:
    """The keys of the language model, which may be inside those of a model of images and text, and its family."""
    inner = config.get("text_config")
    model_type = config.get("model_type")
    if isinstance(inner, dict):
        inner_type = inner.get("model_type")
        if not isinstance(inner_type, str) or inner_type not in known.families():
            inner_type = known.INNER_TYPES.get(str(model_type), inner_type or model_type)
        shared = {key: config[key] for key in ("quantization_config", "dtype", "torch_dtype") if key in config}
        config, model_type = {**shared, **inner, "model_type": inner_type}, inner_type
    if not isinstance(model_type, str) or not model_type:
        raise ValueError(f"model_type is {brief(model_type)}; allowed: the name of a family, such as 'llama'")
    family = known.families().get(model_type, known.Family(sliding="keys"))
    config = {key: value for key, value in config.items() if key != PER_LAYER} | _global_heads(config)
    spelled = {name for names in known.SPELLINGS if any(name in config for name in names) for name in names}
    keys = _Keys(config, {key: value for key, value in family.defaults.items() if key not in spelled})
    for key, (factor, of, *by) in family.derived.items():
        keys[key] = _whole(keys, key, int(factor * _whole(keys, of) / max([1, *(_whole(keys, name) for name in by)])))
    return keys, family


def _global_heads(config: Config) -> Fields:
    """Sizes of heads in layers of full attention where these have others, as transformers 5 saves them, by layer.

    An empty table says that they have the same. Raises ValueError for sizes that differ otherwise.
    """
    overrides = _object(config, PER_LAYER)
    if not overrides:
        same = {"global_head_dim": config.get("head_dim")} if PER_LAYER in config else {}
        # Without that table, other KV heads go with values that are keys.
        return same if config.get("attention_k_eq_v") else {**same, "num_global_key_value_heads": None}
    kinds = _list(config, "layer_types", tuple(known.LAYER_KINDS))
    full = {str(layer) for layer, kind in enumerate(kinds) if kind == "full_attention"}
    named = {str(layer).lstrip("0") or "0" for layer in overrides}  # with zeros ahead from 10 layers on
    first, *others = overrides.values()
    if not isinstance(first, dict) or any(other != first for other in others) or named != full:
        raise ValueError(f"{PER_LAYER} must hold the same sizes for all layers of full attention, and no others")
    return {
        "global_head_dim": first.get("head_dim", config.get("head_dim")),  # what is alike is not repeated
        "num_global_key_value_heads": first.get("num_key_value_heads"),
    }


def _whole(config: Config, key: str, default: int | None = None, least: int = 0, most: int = 10**9) -> int:
    """A whole number small enough to compute with; ModelShape checks the exact range of most."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise ValueError(f"{key} is missing")
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{key} must be a whole number from {least} to {most}, not {brief(value)}")
    return value


def _first(config: Config, keys: Sequence[str], default: int | None = None) -> int:
    """The whole number of the first of several keys that is there, and not 0 if another is not.

    Raises ValueError naming the first one.
    """
    there = [key for key in keys if config.get(key) is not None]
    present = next((key for key in there if config[key] != 0), there[0] if there else keys[0])
    return _whole(config, present, default)


def _number(config: Config, key: str, default: float, least: float = 0) -> float:
    """A number up to a million; `default` where the key is missing or 0. Raises ValueError for anything else."""
    value = config.get(key) or default
    if not isinstance(value, (int, float)) or not least <= value <= 10**6:
        raise ValueError(f"{key} must be a number from {least} to 1000000, not {brief(value)}")
    return float(value)


def _flag(config: Config, key: str, default: bool) -> Any:
    return default if config.get(key) is None else config[key]


def _list(config: Config, key: str, allowed: Sequence[Any], length: int | None = None) -> list[Any]:
    """A list of allowed entries; an empty one where the key is missing.

    Raises ValueError for anything else, or another length.
    """
    value = config.get(key) or []
    if not isinstance(value, list) or (value and length is not None and len(value) != length):
        entries = "a list" if length is None else f"a list of {length} entries"
        raise ValueError(f"{key} must be {entries}, not {brief(value)}")
    for entry in value:
        if entry not in allowed:
            each = allowed if not isinstance(allowed, range) else (f"{allowed[0]} to {allowed[-1]}",)
            raise ValueError(f"{key} has {brief(entry)}; allowed: {', '.join(map(str, each))}")
    return value


def _object(config: Config, key: str) -> Config:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be an object, not {brief(value)}")
    return value


@dataclass(frozen=True)
class _Layer:
    """What one layer is made of."""

    attention: Attention | None
    state: State | None
    mlp: MLP | None


def _layers(config: _Keys, family: known.Family) -> list[_Layer]:
    """Every layer in the model's order."""
    kinds = layer_kinds(config, family)
    shared = _whole(config, "num_kv_shared_layers", 0)
    routed = _routed_layers(config, len(kinds))
    wide = shared if config.get("use_double_wide_mlp") else 0
    state = _state(config) if any(kind == "state" for kind, _ in kinds) else None
    first_shared = len(kinds) - shared
    dense = _dense_mlp(config, family, 1)
    doubled = _dense_mlp(config, family, 2) if wide else dense
    experts = _routed_mlp(config, family) if any(routed) or any(mlp == "routed" for _, mlp in kinds) else None
    attentions = {
        (kind, later): _attention(config, family, kind == "sliding", later)
        for kind in {kind for kind, _ in kinds} - {"state", "none"}
        for later in (False, True)
    }
    layers = []
    for index, (kind, named_mlp) in enumerate(kinds):
        mlp_kind = named_mlp or ("routed" if routed[index] else "dense")
        plain = doubled if index >= first_shared else dense
        mlp = {"routed": experts, "dense": plain, "none": None}[mlp_kind]
        attention = attentions.get((kind, index >= first_shared))
        layers.append(_Layer(attention, state if kind == "state" else None, mlp))
    return layers


def layer_kinds(config: Config, family: known.Family) -> list[tuple[str, str]]:
    """How each layer mixes tokens ("full", "sliding", "state", "none"), and its MLP: "" for what other keys say.

    Raises ValueError naming a key with a value of no known meaning.
    """
    pattern = config.get("hybrid_override_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(known.PATTERN_KINDS):
            letters = ", ".join(known.PATTERN_KINDS)
            raise ValueError(f"hybrid_override_pattern must consist of {letters}, not {brief(pattern)}")
        if config.get("num_hidden_layers") not in (None, len(pattern)):
            layers = brief(config["num_hidden_layers"])
            raise ValueError(
                f"hybrid_override_pattern has {len(pattern)} letters; allowed: num_hidden_layers, {layers}"
            )
        return [known.PATTERN_KINDS[letter] for letter in pattern]
    kinds_allowed = tuple(known.LAYER_KINDS)
    named = _list(config, "layer_types", kinds_allowed) or _list(config, "layers_block_type", kinds_allowed)
    count = len(named) if named and config.get("num_hidden_layers") is None else _layer_count(config)
    if named:
        for key in WINDOW_KEYS:
            config.get(key)
        if len(named) != count:
            raise ValueError(f"layer_types has {len(named)} entries; allowed: {count}, one for each layer")
        windows = config.get("sliding_window") is not None
        kinds = [known.LAYER_KINDS[kind] for kind in named]
        kinds = [("full", mlp) if kind == "sliding" and not windows else (kind, mlp) for kind, mlp in kinds]
        bare = any(mlp for _, mlp in kinds)  # layers of one block each
        return [(kind, mlp or ("none" if bare else "")) for kind, mlp in kinds]
    kimi = _object(config, "linear_attn_config")
    if kimi:  # counted from 1
        full = _list(kimi, "full_attn_layers", range(1, count + 1))
        return [("full" if layer + 1 in full else "state", "") for layer in range(count)]
    interval = _whole(config, "full_attention_interval", family.full_every)
    if interval:
        return [("state" if (layer + 1) % interval else "full", "") for layer in range(count)]
    sliding = set(_sliding_layers(config, family.sliding, count))
    return [("sliding" if layer in sliding else "full", "") for layer in range(count)]


def _layer_count(config: Config) -> int:
    return _whole(config, "num_hidden_layers", least=1, most=MAX_LAYERS)


def _sliding_layers(config: Config, rule: str, layers: int) -> Sequence[int]:
    """The layers that have a window by the family's rule, where config.json lists none."""
    used, last = (config.get(key) for key in WINDOW_KEYS[:2])
    pattern = config.get(next((key for key in PATTERNS if config.get(key) is not None), PATTERNS[0]))
    if config.get("sliding_window") is None:
        return range(0)
    if rule == "keys":
        rule = "last" if used is False or last is not None else "all" if pattern is None else "pattern"
    if rule == "last":
        return range(_whole(config, "max_window_layers"), layers) if used else range(0)
    if rule == "pattern" or (rule == "none" and type(pattern) is int):
        period = _first(config, PATTERNS)
        return [layer for layer in range(layers) if period and (layer + 1) % period]
    return {"all": range(layers), "even": range(0, layers, 2), "none": range(0)}[rule]


def _attention(config: Config, family: known.Family, sliding: bool, later: bool) -> Attention:
    """Attention of a layer; `sliding` within the window, `later` of layers that read an earlier layer's cache."""
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    kv_heads = _first(config, known.KV_HEADS, heads)
    head_dim = _whole(config, "head_dim", hidden // max(heads, 1))
    sizes: Fields = {"q_heads": heads, "window_tokens": _whole(config, "sliding_window") if sliding else None}
    if config.get("kv_lora_rank"):
        rope, nope = _whole(config, "qk_rope_head_dim"), _whole(config, "qk_nope_head_dim")
        latent: Fields = {
            "kv_heads": kv_heads,
            "head_dim": rope + nope,
            "latent_rank": _whole(config, "kv_lora_rank"),
            "q_lora_rank": _whole(config, "q_lora_rank", 0) or None,  # null in the Lite models
            "rope_head_dim": rope,
            "nope_head_dim": nope,
            "v_head_dim": _whole(config, "v_head_dim"),
        }
        return Attention(**sizes, **latent, **_indexer(config))
    same_values = False
    if not sliding:
        head_dim = _whole(config, "global_head_dim", head_dim)
        kv_heads = _whole(config, "num_global_key_value_heads", kv_heads)
        same_values = bool(config.get("attention_k_eq_v"))
    value_dim = _whole(config, "v_head_dim", head_dim)
    gated = _flag(config, "attn_output_gate", family.output_gate)
    return Attention(
        **sizes,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=None if value_dim == head_dim else value_dim,
        gate_width=heads * head_dim if gated else 0,
        shares_cache=later,
        shares_values=same_values,
    )


def _indexer(config: Config) -> Fields:
    """The sparse indexer of DeepSeek-V3.2: its heads, their width, and the tokens that it chooses."""
    if not config.get("index_topk"):
        return {}
    names = {"index_heads": "index_n_heads", "index_head_dim": "index_head_dim", "index_tokens": "index_topk"}
    return {name: _whole(config, key) for name, key in names.items()}


def _state(config: Config) -> State:
    """The recurrent state by the keys that describe it: Kimi Delta Attention, gated delta net or Mamba-2."""
    dtype = config.get("mamba_ssm_dtype", config.get("mamba_ssm_cache_dtype"))
    bytes_per_element = 2 if dtype in ("bfloat16", "float16") else 4
    kimi = _object(config, "linear_attn_config")
    if kimi or config.get("linear_num_heads"):  # the published file, or transformers' class
        sizes_of = kimi or {name.removeprefix("linear_"): config.get(name) for name in KDA_KEYS}
        heads, dim = _whole(sizes_of, "num_heads"), _whole(sizes_of, "head_dim")
        taps = _first(sizes_of, ("short_conv_kernel_size", "conv_kernel_dim"), 4)
        return State(
            rule=DELTA_RULE, key_heads=heads, value_heads=heads, key_dim=dim, value_dim=dim, conv_width=taps,
            gate_rank=dim, bytes_per_element=bytes_per_element,
        )  # fmt: skip
    if any(config.get(key) for key in known.MAMBA_HEADS):
        heads = _first(config, known.MAMBA_HEADS)
        inner = _whole(config, "hidden_size") * _whole(config, "mamba_expand", 2)
        own_width = any(type(config.get(key)) is int for key in known.MAMBA_HEAD_DIM)
        return State(
            rule=MAMBA2,
            key_heads=_first(config, known.MAMBA_GROUPS),
            value_heads=heads,
            key_dim=_first(config, known.MAMBA_STATE),
            value_dim=_first(config, known.MAMBA_HEAD_DIM) if own_width else inner // max(heads, 1),
            conv_width=_first(config, known.MAMBA_TAPS, 4),
            bytes_per_element=bytes_per_element,
        )
    names = {
        "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads", "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim", "conv_width": "linear_conv_kernel_dim",
    }  # fmt: skip
    sizes = {name: _whole(config, key) for name, key in names.items()}
    limit = 2 if config.get("linear_allow_neg_eigval") else 1
    return State(rule=DELTA_RULE, **sizes, bytes_per_element=bytes_per_element, step_limit=limit)


def _routed_layers(config: Config, layers: int) -> list[bool]:
    """Whether each layer has routed experts."""
    if not _first(config, known.EXPERTS, 0):
        return [False] * layers
    named = _list(config, "mlp_layer_types", ("dense", "sparse"), layers)
    if named:
        return [kind != "dense" for kind in named]
    leading, dense = _first(config, known.LEADING_DENSE, 0), _list(config, "mlp_only_layers", range(layers))
    step, frequency = _whole(config, "decoder_sparse_step", 1), config.get("moe_layer_freq", 1)
    if isinstance(frequency, list) and frequency:
        return [bool(each) for each in _list(config, "moe_layer_freq", (0, 1), layers)]
    step = max(step, _whole(config, "moe_layer_freq", 1))
    if step < 1:
        raise ValueError("decoder_sparse_step must be 1 or more")
    return [layer >= leading and layer not in dense and not (layer + 1) % step for layer in range(layers)]


def _dense_mlp(config: Config, family: known.Family, times: int) -> MLP | None:
    """A dense MLP, `times` as wide as usual; None where no layer may have one."""
    width = _whole(config, "intermediate_size", 0)
    if not width and _first(config, known.EXPERTS, 0):
        return None
    return MLP(intermediate=times * _whole(config, "intermediate_size"), gated=family.gated_mlp)


def _routed_mlp(config: Config, family: known.Family) -> MLP:
    usual = _whole(config, "intermediate_size", 0)
    width = _first(config, known.EXPERT_WIDTH, usual or None)
    shared = _first(config, known.SHARED_WIDTH, 0)
    if not shared:
        shared = width * _first(config, known.SHARED_EXPERTS, 0)
    return MLP(
        intermediate=usual if config.get("enable_moe_block") else 0,
        gated=family.gated_mlp,
        experts=_first(config, known.EXPERTS),
        experts_per_token=_first(config, known.EXPERTS_PER_TOKEN),
        expert_intermediate=width,
        shared_intermediate=shared,
        expert_hidden=_whole(config, "moe_latent_size", 0) or None,
    )


def routing_of(config: Config) -> Routing | None:
    """How the model's routers choose experts; None without experts. Raises ValueError naming a bad key."""
    keys, family = _family_keys(config)
    if not _first(keys, known.EXPERTS, 0):
        return None
    grouped = keys.get("topk_method") != "greedy"
    experts, groups = _first(keys, known.EXPERTS), _whole(keys, "n_group", 1) if grouped else 1
    kept_groups = _whole(keys, "topk_group", groups) if grouped else 1
    if groups < 1 or experts % groups or experts < 2 * groups * (groups > 1):
        raise ValueError(f"n_group is {groups}; allowed: a divisor of the {experts} experts, of 2 or more each")
    if not 1 <= kept_groups <= groups:
        raise ValueError(f"topk_group is {kept_groups}; allowed: 1 to {groups}, n_group")
    fields = {
        "per_token": _first(keys, known.EXPERTS_PER_TOKEN),
        "normalized": bool(_flag(keys, "norm_topk_prob", True)),
        "groups": groups,
        "kept_groups": kept_groups,
        "scale": _number(keys, "routed_scaling_factor", _number(keys, "router_scaling_factor", 1)),
        "min_sum": _number(keys, "moe_norm_min", 0),
    }
    return Routing(**fields | dict(family.routing))


def _groups(layers: Sequence[_Layer]) -> tuple[LayerGroup, ...]:
    indices: dict[_Layer, list[int]] = {}
    for index, layer in enumerate(layers):
        indices.setdefault(layer, []).append(index)
    return tuple(LayerGroup(count=len(each), indices=tuple(each), **vars(layer)) for layer, each in indices.items())


def _says_all(shape: ModelShape, layer: _Layer) -> bool:
    """Whether the fields of a shape without groups describe its layers, which are all alike."""
    attentions = tuple(attention for attention, count in shape.attentions if count)
    mlps = tuple(mlp for mlp, count in shape.mlps if count)
    return layer.state is None and attentions == (layer.attention,) and mlps == (layer.mlp,)


def _flat_fields(config: _Keys, family: known.Family, layers: Sequence[_Layer]) -> Fields:
    """The fields of a shape beside its groups: those of its widest-reaching attention and of its experts."""
    attentions = [layer.attention for layer in layers if layer.attention and not layer.attention.shares_cache]
    if not attentions:
        raise ValueError("no layer has attention that caches keys and values; allowed: models with such layers")
    primary = min(attentions, key=lambda attention: attention.window_tokens is not None)
    windows = [layer.attention.window_tokens for layer in layers if layer.attention and layer.attention.window_tokens]
    routed = next((layer.mlp for layer in layers if layer.mlp and layer.mlp.experts), None)
    dense = [layer.mlp for layer in layers if layer.mlp and not layer.mlp.experts]
    bias = family.attention_bias
    fields = {
        "architecture": config.model_type,
        "layers": len(layers),
        "hidden": _whole(config, "hidden_size"),
        "q_heads": primary.q_heads,
        "kv_heads": primary.kv_heads,
        "head_dim": primary.head_dim,
        "intermediate": _whole(config, "intermediate_size", routed.expert_intermediate if routed else None),
        "vocab": _whole(config, "vocab_size"),
        "tied_embeddings": _flag(config, "tie_word_embeddings", False),
        "attention_bias": _flag(config, "attention_bias", False) if bias is None else bias,
        "qk_norm": _flag(config, family.qk_norm_key, family.qk_norm),
        "wide_qk_norm": family.wide_qk_norm,
        "sandwich_norms": family.sandwich_norms,
        "traits": family.traits,
        "mtp_layers": _first(config, known.MTP_LAYERS, 0),
        "layer_embedding_width": _whole(config, "hidden_size_per_layer_input", 0),
        **_rope_fields(config),
    }
    if windows:
        fields |= {"window_tokens": windows[0], "window_layers": len(windows)}
    if primary.is_latent:
        names = ("latent_rank", "q_lora_rank", "rope_head_dim", "nope_head_dim", "v_head_dim")
        fields |= {name: getattr(primary, name) for name in names}
    if routed:
        sizes = ("experts", "experts_per_token", "expert_intermediate")
        fields |= {name: getattr(routed, name) for name in sizes}
        fields |= {"shared_experts_intermediate": routed.shared_intermediate, "dense_layers": len(dense)}
    return fields


def _rope_fields(config: Config) -> Fields:
    """`rope_parameters` (transformers 5) or `rope_scaling` beside `rope_theta` (transformers 4)."""
    rope = _object(config, "rope_parameters") or _object(config, "rope_scaling")
    context = _first(config, ("max_position_embeddings", "model_max_length"))
    rope = _object(rope, "full_attention") or rope  # layers with a sliding window may have another base
    theta = rope.get("rope_theta", config.get("rope_theta"))
    fields: Fields = {} if theta is None else {"rope_theta": theta}
    if rope.get("original_max_position_embeddings") is not None:
        original = _whole(rope, "original_max_position_embeddings")
        factor = _number(rope, "factor", 1, 1)
        fields["rope_original_context"] = original
        # Qwen's YaRN recipe leaves max_position_embeddings at the original context.
        context = max(context, int(original * factor))
    return {**fields, "max_context": context}
