"""llm.to_torch() beside transformers: logits, loss, gradients, hidden states and attention weights of padded texts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peers import hugging_face
from tiny import CONFIGS, in_memory, random_weights, tiny_config
from torch import Tensor

from pronk.config import ModelConfig
from pronk.cpu_engine.backend import CpuBackend
from pronk.errors import BadRequest
from pronk.llm import LLM
from pronk.torch_engine.backend import load_module
from pronk.torch_engine.causal_lm import CausalLM, CausalLMOutput

# A logit is about 4 and a sum in float32 off by some parts in 2^24 of it, over two blocks (test_torch_model's bound).
CLOSE = {"rtol": 0.0, "atol": 1e-5}


def both(config: ModelConfig) -> tuple[CausalLM, torch.nn.Module]:
    weights = random_weights(config)
    checkpoint = in_memory(config, weights)
    engine = CpuBackend.from_checkpoint(checkpoint, quantize="f32", threads=1)
    return LLM("tiny", checkpoint, None, engine).to_torch(), hugging_face(config, weights)


def some_ids(config: ModelConfig, texts: int = 3, length: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (texts, length), generator=generator)


def padded(ids: Tensor, where: Callable[[Tensor, int], Tensor]) -> Tensor:
    """A mask that leaves 12, 7 and 1 tokens of three texts: `where` says of each column whether it is there."""
    columns = torch.arange(ids.shape[1])
    return torch.stack([where(columns, length) for length in (12, 7, 1)]).long()


MASKS = {
    "right": lambda columns, length: columns < length,
    "left": lambda columns, length: columns >= 12 - length,
    "holes": lambda columns, length: (columns == 0) | (columns * length % 12 < length),
}


@pytest.mark.parametrize("name", [n for n in CONFIGS if n not in ("factors", "dynamic")])
def test_logits_loss_and_gradients_equal_transformers(name: str) -> None:
    config = tiny_config(**CONFIGS[name])
    ours, theirs = both(config)
    ids = some_ids(config)
    found, expected = ours(ids, labels=ids), theirs(ids, labels=ids)
    assert isinstance(found, CausalLMOutput)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    torch.testing.assert_close(found.logits, expected.logits, **CLOSE)
    assert torch.equal(ours(ids), found.logits)
    found.loss.backward()
    expected.loss.backward()
    gradients = dict(ours.named_parameters())
    assert gradients.keys() == dict(theirs.named_parameters()).keys()
    for parameter, theirs_of in theirs.named_parameters():
        largest = theirs_of.grad.abs().max()
        assert (gradients[parameter].grad - theirs_of.grad).abs().max() < 1e-5 * largest, parameter


@pytest.mark.parametrize("side", MASKS)
def test_padding_on_either_side_and_in_between(side: str) -> None:
    """Logits, hidden states, attention and the loss of what is there; labels that are -100 count nothing."""
    config = tiny_config()
    ours, theirs = both(config)
    ids = some_ids(config)
    mask = padded(ids, MASKS[side])
    there = mask.bool()
    labels = torch.where(there, ids, -100)
    labels[0, 4] = -100
    labels[:, 1:] = torch.where(there[:, :-1], labels[:, 1:], -100)  # transformers would ask padding what comes next
    wants = {"output_hidden_states": True, "output_attentions": True}
    found = ours(ids, mask, labels, **wants)
    expected = theirs(ids, attention_mask=mask, labels=labels, **wants)
    if side == "holes":  # over which ours foretells the next token that is there
        rows = found.logits[there].log_softmax(-1)
        texts, given = there.nonzero()[:, 0], labels[there]
        wanted = [(n, int(given[n + 1])) for n in range(len(given) - 1) if texts[n] == texts[n + 1]]
        costs = [-rows[n, label] for n, label in wanted if label != -100]
        assert found.loss.item() == pytest.approx(torch.stack(costs).mean().item(), rel=1e-6)
    else:
        assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert len(found.hidden_states) == len(expected.hidden_states) == config.num_hidden_layers + 1
    for x, y in zip((found.logits, *found.hidden_states), (expected.logits, *expected.hidden_states), strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x[there], y[there], **CLOSE)
        assert not x[~there].any()
    assert len(found.attentions) == len(expected.attentions) == config.num_hidden_layers
    for x, y in zip(found.attentions, expected.attentions, strict=True):
        assert x.shape == y.shape == (3, config.num_attention_heads, 12, 12)
        torch.testing.assert_close(x.transpose(1, 2)[there], y.transpose(1, 2)[there], **CLOSE)
        torch.testing.assert_close(x.sum(-1).transpose(1, 2)[there], torch.ones(int(there.sum()), 8), **CLOSE)


def test_a_text_in_a_batch_is_the_text_alone() -> None:
    """The inverse of padding done wrong: were padding looked at, the short texts' logits would move."""
    config = tiny_config()
    ours, _ = both(config)
    ids = some_ids(config)
    mask = padded(ids, MASKS["left"])
    together = ours(ids, mask)
    for text, length in enumerate((12, 7, 1)):
        alone = ours(ids[text : text + 1, 12 - length :])[0]
        torch.testing.assert_close(together[text, 12 - length :], alone, **CLOSE)
    assert (ours(ids)[1, 5:] - together[1, 5:]).abs().max() > 1000 * CLOSE["atol"]


def test_gradients_flow_through_hidden_states_and_attention() -> None:
    ours, theirs = both(tiny_config())
    ids = some_ids(ours.config)
    for model in (ours, theirs):
        seen = model(ids, output_hidden_states=True, output_attentions=True)
        (seen.hidden_states[1].square().sum() + seen.attentions[1].square().sum()).backward()
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-4)


def test_it_is_an_ordinary_module() -> None:
    """Its state is transformers' state, it can be cast, and autocast works on it."""
    ours, theirs = both(tiny_config(tie_word_embeddings=True))
    theirs.load_state_dict(ours.state_dict())
    ids = some_ids(ours.config)
    exact = ours(ids)
    with torch.autocast("cpu", torch.bfloat16):
        assert (ours(ids) - exact).abs().max() < 0.2
    ours.to(torch.bfloat16)
    assert ours(ids).dtype == torch.bfloat16
    assert (ours(ids).float() - exact).abs().max() < 0.2


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"input_ids": torch.tensor([1, 2])}, r"input_ids must be \[texts, tokens\].* these are \[2\]"),
        ({"input_ids": [1, 2]}, r"input_ids must be a tensor \[texts, tokens\], not list; torch.tensor\(\[ids\]\) is"),
        ({"input_ids": torch.empty(1, 0, dtype=torch.long)}, r"these are \[1, 0\]"),
        ({"input_ids": torch.ones(1, 2, dtype=torch.long), "labels": torch.ones(1, 3)}, "labels must be"),
        ({"input_ids": torch.ones(1, 2, dtype=torch.long), "attention_mask": torch.ones(2, 2)}, "attention_mask must"),
        ({"input_ids": torch.ones(1, 2, dtype=torch.long), "attention_mask": torch.zeros(1, 2)}, "leaves no token"),
    ],
)
def test_other_shapes_are_refused(given: dict[str, Tensor], problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        both(tiny_config())[0](**given)


@pytest.mark.parametrize("labels", [[[0, 1, 10**6]], [[0, 1, -5]], [[0.0, 1.0, 2.0]]])
def test_labels_that_are_no_tokens_are_refused(labels: list[list[float]]) -> None:
    """torch's own words for them name neither the labels nor the way out."""
    config = tiny_config()
    module = CausalLM(load_module(in_memory(config, random_weights(config))))
    with pytest.raises(BadRequest, match="labels must be tokens from 0 to 95, or -100"):
        module(torch.tensor([[1, 2, 3]]), labels=torch.tensor(labels))
