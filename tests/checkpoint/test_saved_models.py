"""Models saved beside the optimizer are as small, and load as well, as without it."""

import copy
import importlib.util
import io

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model

from shardopt import Sharding, ZeroRedundancyOptimizer

NUMEL = 64 * 64


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 64),
        torch.nn.Sequential(torch.nn.Linear(64, 64)),
        torch.nn.Linear(64, 1),
    )


def trained(*, attach=True, gradients=True):
    """A model whose parameters lie in one bucket."""
    model = make_model()
    zero = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        parameters_as_bucket_view=True,
        sharding=Sharding(granularity="element", gradients=gradients),
    )
    if attach:
        zero.attach(model)
    for _ in range(2):
        zero.zero_grad()
        model(torch.randn(2, 64)).sum().backward()
        zero.step()
    return model, zero


def saved_nbytes(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return len(buffer.getvalue())


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize(
    "pick",
    [
        lambda model: model.state_dict(),
        lambda model: model[1].state_dict(),
        lambda model: model[0].bias,
        lambda model: list(model.parameters()),
    ],
    ids=["state dict", "of a submodule", "one parameter", "parameters"],
)
def test_what_is_saved_takes_no_more_than_without_the_optimizer(attach, pick):
    model, zero = trained(attach=attach)
    assert saved_nbytes(pick(model)) == pytest.approx(saved_nbytes(pick(make_model())), abs=512)
    del zero


@pytest.mark.parametrize("attach", [False, True])
def test_a_whole_model_can_be_pickled_copied_and_used(attach):
    model, zero = trained(attach=attach)
    model(torch.randn(2, 64)).sum().backward()  # with placeholders in param.grad
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert len(buffer.getvalue()) < 4.2 * (2 * NUMEL + 3 * 64 + 1) + 8000
    buffer.seek(0)
    inputs = torch.randn(2, 64)
    expected = model(inputs)
    zero.zero_grad()
    for again in (torch.load(buffer, weights_only=False), copy.deepcopy(model)):
        torch.testing.assert_close(again(inputs), expected, rtol=0, atol=0)
        again(inputs).sum().backward()
        assert type(again[0].weight.grad) is torch.Tensor


def test_safetensors_saves_and_loads_it(tmp_path):
    model, zero = trained()
    save_file(model.state_dict(), tmp_path / "file.safetensors")
    save_model(model, str(tmp_path / "model.safetensors"))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for name in ("file", "model"):
        torch.testing.assert_close(load_file(tmp_path / f"{name}.safetensors"), expected)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load_model(model, str(tmp_path / "model.safetensors"))
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)
    model(torch.randn(2, 64)).sum().backward()
    zero.step()


def test_parameters_still_travel_from_where_they_lie():
    """Storages of their own, in the memory of one bucket."""
    model, zero = trained()
    [bucket] = zero.shards.buckets
    flat = bucket.flat_range(0, bucket.plan.numel)
    for index, param in enumerate(model.parameters()):
        place = bucket.plan.places[index]
        assert param.data_ptr() == flat.narrow(0, place.start, place.numel).data_ptr()
        assert param.untyped_storage().nbytes() == param.nbytes


def test_memory_of_a_bucket_outlives_the_optimizer():
    model, zero = trained(attach=False)
    expected = [param.detach().clone() for param in model.parameters()]
    del zero
    torch.testing.assert_close([p.detach() for p in model.parameters()], expected, rtol=0, atol=0)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
def test_hugging_face_saves_and_loads_it(tmp_path):
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    model = BertModel(config)
    zero = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        parameters_as_bucket_view=True,
        sharding=Sharding(granularity="element", gradients=True),
    )
    model(torch.arange(6).view(1, 6)).last_hidden_state.sum().backward()
    zero.step()
    model.save_pretrained(tmp_path)
    again = BertModel.from_pretrained(tmp_path)
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    nbytes = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert nbytes < 1.2 * sum(param.nbytes for param in model.parameters()) + 10_000
