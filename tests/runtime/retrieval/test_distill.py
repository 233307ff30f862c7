"""Distillation: the loss and its gradients, resumed runs, and a head that the model's engine takes."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeplan import runtime
from ridgeplan.runtime.errors import ModelError, WorkloadError
from ridgeplan.runtime.model.checkpoint import load_config, load_state_dict
from ridgeplan.runtime.model.decoder import Decoder
from ridgeplan.runtime.model_config import decoder_config
from ridgeplan.runtime.retrieval.distill.run import distill
from ridgeplan.runtime.retrieval.distill.student import make_student, trained_parameters
from ridgeplan.runtime.retrieval.distill.teacher import Teacher
from ridgeplan.runtime.retrieval.distill.train import Distillation, Training, attention_loss
from ridgeplan.runtime.retrieval.file import load_head, save_head

CPU = torch.device("cpu")
SMALL = Training(steps=6, tokens=160, batch=2, rate=1e-2, warmup=2)


@pytest.fixture(scope="module")
def ids():
    """A text that repeats, which a layer learns."""
    return torch.randint(128, (40,), generator=torch.Generator().manual_seed(1)).repeat(30).tolist()


@pytest.fixture
def made(tiny_model, ids):
    """A distillation of a tiny model."""

    def make(family="llama", training=SMALL):
        folder = tiny_model(family).folder
        hub = load_config(folder)
        config = decoder_config(hub, folder)
        state = load_state_dict(folder, config.shape, torch.float32)
        student = make_student(hub, state, CPU)
        return Distillation(Teacher(Decoder(config, CPU), state.decoder_weights(CPU)), student, ids, training)

    return make


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_teacher_is_the_model(family, made, tiny_model, ids):
    tokens = torch.tensor(ids[:50])
    teacher = made(family).teacher
    with torch.no_grad():
        expected = tiny_model(family).reference(tokens[None]).logits[0]
    torch.testing.assert_close(teacher.logits(teacher.read(tokens, False)[0]), expected, rtol=1e-3, atol=1e-4)


def test_a_student_starts_as_the_first_layer_and_learns_nothing_but_it(made, tiny_model):
    student, reference = made("qwen2").student, tiny_model("qwen2").reference
    names = set(trained_parameters(student))
    assert all(name.startswith(("model.layers.0.", "model.norm.")) for name in names)
    assert {"model.norm.weight", "model.layers.0.self_attn.q_proj.bias"} <= names
    for name, value in student.named_parameters():
        assert torch.equal(value, reference.get_parameter(name)), name


def test_the_loss_is_the_divergence_and_has_its_gradients(made, ids):
    """Against one KL of all logits at once, for a passage that takes several parts."""
    one, tokens = made(training=replace(SMALL, attention=0.0)), torch.tensor(ids[:160])
    loss = one._passage(tokens)
    found = {name: value.grad.clone() for name, value in one.parameters.items()}
    one.student.zero_grad()
    wanted = one.teacher.logits(one.teacher.read(tokens, False)[0]).softmax(-1)
    drawn = one.student(tokens[None]).logits[0].softmax(-1)
    divergence = (wanted * (wanted / drawn).log()).sum(-1).mean()
    (divergence / SMALL.batch).backward()
    assert loss == pytest.approx(divergence.item(), rel=1e-4)
    for name, value in one.parameters.items():
        torch.testing.assert_close(found[name], value.grad, rtol=1e-3, atol=1e-6)


def test_attention_that_is_taught_is_to_distant_tokens_and_the_mean_over_layers(made, tiny_model, ids):
    """Against transformers' own attention, of which sinks, recent tokens and other queries' keys are left out."""
    one, tokens = made(), torch.tensor(ids[:160])
    reference = tiny_model(attn_implementation="eager").reference
    with torch.no_grad():
        layers = torch.stack(reference(tokens[None], output_attentions=True).attentions)[:, 0]
    expected = layers.unflatten(1, (2, 2)).mean(2)  # over the query heads of a KV head
    expected = expected[:, :, 140, 4:13] / expected[:, :, 140, 4:13].sum(-1, keepdim=True)  # 13 is 127 before 140
    taught = one.teacher.read(tokens, True)[1]
    torch.testing.assert_close(taught[:, 140, 4:13], expected.mean(0), rtol=1e-3, atol=1e-5)
    assert taught[:, 140, 13:].abs().sum() == taught[:, 140, :4].abs().sum() == taught[:, 130].abs().sum() == 0


def test_the_loss_of_attention_is_a_divergence_over_queries_that_have_distant_tokens():
    """133 tokens: one query has one distant token, and learns nothing. 134: another has two."""
    own = torch.full((2, 134, 134), 1e-3)
    own[:, 133, 4:6] = torch.tensor([0.1, 0.3])
    taught = torch.zeros(1, 134, 134)
    taught[:, 132, 4] = 1.0
    taught[:, 133, 4:6] = torch.tensor([0.5, 0.5])
    own.requires_grad_()
    loss = attention_loss(own, taught)
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert loss.item() == pytest.approx(expected / 2)  # the mean of both queries
    loss.backward()
    assert own.grad[:, 133, 4].max() < 0 < own.grad[:, 133, 5].min()
    assert own.grad[:, :133].abs().max() < 1e-4


def test_attention_is_learned(made, ids):
    one, tokens = made(training=Training(steps=25, tokens=160, batch=1, rate=1e-2, warmup=1, attention=10.0)), ids[:160]

    def focus():
        asked = torch.tensor(tokens)
        with torch.no_grad():
            found = one.student.model(asked[None], output_attentions=True).attentions[0][0]
        return attention_loss(found, one.teacher.read(asked, True)[1]).item()

    before = focus()
    one.run(lambda step, loss: None)
    assert focus() < 0.7 * before


def test_it_learns(made):
    losses = []
    one = made(training=Training(steps=40, tokens=64, batch=2, rate=1e-2, warmup=2))
    one.run(lambda step, loss: losses.append(loss))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_run_that_was_stopped_ends_as_one_that_was_not(made, tmp_path):
    whole, path = made(), tmp_path / "run.safetensors"
    whole.run(lambda step, loss: None)

    class Stop(Exception):
        pass

    def stop(step, loss):
        if step == 5:
            raise Stop

    with pytest.raises(Stop):
        made().run(stop, path, every=2)
    again, steps = made(), []
    again.resume(path)
    again.run(lambda step, loss: steps.append(step), path, every=2)
    assert steps == [5, 6]
    for name, value in whole.parameters.items():
        assert torch.equal(value, again.parameters[name]), name
    other = made(training=Training(steps=7, tokens=160, batch=2, rate=1e-2, warmup=2))
    with pytest.raises(ModelError, match="it is of another run; allowed: the same options, or no checkpoint"):
        other.resume(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="cannot resume from"):
        again.resume(path)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_head_is_the_queries_and_keys_of_its_student(family, tiny_model, ids, make_plan, tmp_path, prompts):
    """Its head chooses for the engine, whose budget of all tokens changes nothing."""
    folder, path = tiny_model(family).folder, tmp_path / "head.safetensors"
    found = distill(folder, lambda source: ids, SMALL, lambda step, loss: None, device="cpu",
                    checkpoint=tmp_path / "run.safetensors", every=3)  # fmt: skip
    assert (found.steps, found.head.config.context, found.head.config.model) == (6, 160, Path(folder).name)
    assert math.isfinite(found.loss)
    save_head(path, found.head)
    assert torch.equal(load_head(path).weights.k, found.head.weights.k)
    assert (found.head.weights.q_bias is not None, found.head.weights.q_norm is not None) == (
        family == "qwen2", family == "qwen3",
    )  # fmt: skip
    plan = make_plan(target="retrieval-head", target_budget=200)
    few = make_plan(target="retrieval-head", target_budget=40, target_options={"recent": 8})
    dense, chosen, sparse = (
        runtime.load(one, folder, device="cpu", retrieval_head=None if one == make_plan() else path)
        for one in (make_plan(), plan, few)
    )
    (prompt,) = prompts(100)
    assert chosen.generate(prompt, 30).tokens == dense.generate(prompt, 30).tokens
    assert torch.isfinite(sparse.forced_logits(prompt, [1, 2, 3])).all()


def test_what_cannot_be_trained_is_named(tiny_model, ids, made):
    with pytest.raises(WorkloadError, match="the text has 100 tokens; allowed: 320, two passages, or more"):
        distill(tiny_model().folder, lambda source: ids[:100], SMALL, lambda step, loss: None, device="cpu")
    with pytest.raises(WorkloadError, match="steps is 0; allowed: a whole number from 1"):
        Training(steps=0)
    broken = made(training=Training(steps=3, tokens=64, batch=1, rate=1.0, warmup=0))
    broken.student.model.norm.weight.data.fill_(torch.inf)
    with pytest.raises(WorkloadError, match="the loss is nan at step 1; allowed: a lower learning rate"):
        broken.run(lambda step, loss: None)


def test_training_warms_up_and_cools_down_to_a_tenth():
    rates = [Training(steps=101, rate=1.0, warmup=1).rate_at(step) for step in (0, 1, 51, 101)]
    assert rates == pytest.approx([1.0, 1.0, 0.55, 0.1])
    assert Training(rate=1.0, warmup=4).rate_at(1) == 0.5
