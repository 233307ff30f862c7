"""The attention that a student is to learn: that of the queries and keys which become a retrieval head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from ridgeplan.runtime.retrieval.distill.student import query_projection
from ridgeplan.runtime.retrieval.distill.teacher import distant_tokens, visible_tokens


def student_logits(student: Any, tokens: Tensor, queries: Tensor) -> Tensor:
    """Attention logits float32 [q_heads, queries, tokens] of the head that a student becomes, with gradients.

    tokens: [tokens], a passage; queries: int64 [queries], places in it.
    """
    layer, model = student.model.layers[0], student.model
    attention, inputs = layer.self_attn, layer.input_layernorm(model.embed_tokens(tokens))
    places = torch.arange(len(tokens), device=tokens.device)
    cos, sin = (table[0] for table in model.rotary_emb(inputs, places[None]))

    def heads(projection: Any, norm: str, at: Tensor) -> Tensor:
        each = projection(inputs[at]).unflatten(-1, (-1, attention.head_dim))
        each = getattr(attention, norm)(each) if hasattr(attention, norm) else each
        return (each * cos[at, None] + rotate_half(each) * sin[at, None]).transpose(0, 1)

    asked = heads(query_projection(student), "q_norm", queries)
    keys = heads(attention.k_proj, "k_norm", places)
    logits = asked.unflatten(0, (len(keys), -1)) @ keys.mT[:, None] * attention.head_dim**-0.5
    return logits.flatten(0, 1).float()


def attention_loss(logits: Tensor, taught: Tensor, queries: Tensor) -> Tensor:
    """KL of attention to distant tokens, nats, the mean over queries and over the sets that the head chooses.

    logits: [q_heads, queries, tokens], of `student_logits`; taught: [sets, queries, tokens], shares of distant tokens.
    Several query heads of a set have the largest of their weights, as when the head chooses (SpeContext, 4.3).
    """
    unseen = ~visible_tokens(queries, logits.shape[-1])
    distant = distant_tokens(queries, logits.shape[-1])
    weights = logits.masked_fill(unseen, -torch.inf).log_softmax(-1)
    chosen_by = weights.unflatten(0, (len(taught), -1)).amax(1)
    own = chosen_by.masked_fill(~distant, -torch.inf).log_softmax(-1)
    known = taught.clamp_min(torch.finfo(torch.float32).tiny).log()
    return (taught * (known - own).masked_fill(~distant, 0.0)).sum(-1).mean()
