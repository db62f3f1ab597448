"""A text that is written with a past is the text that full forwards write, token by token."""

import pytest
import torch
import torch.nn.functional as F
from test_model import TINY, random_ids, tiny

from memory import Past
from model import MiniGPT

LIMIT = TINY["max_position_embeddings"]


def trained(**changes) -> MiniGPT:
    """Weights so large that each token matters to those after it."""
    model = tiny(**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / parameter.size(-1) ** 0.5)
    return model.eval()


@torch.no_grad()
def written_plainly(model, ids, n_new, temperature=1.0, top_k=None, top_p=None):
    """All logits of all tokens that fit, for each new one; and each row sampled by itself."""
    for _ in range(n_new):
        rows = model(ids[:, -LIMIT:])[:, -1]
        if temperature == 0:
            ids = torch.hstack([ids, rows.max(dim=1, keepdim=True).indices])
            continue
        probabilities = torch.zeros_like(rows)
        for row, result in zip(rows / temperature, probabilities, strict=True):
            best = sorted(range(len(row)), key=lambda i, row=row: -row[i].item())[: top_k or None]
            among = F.softmax(row[best], dim=0).tolist()
            taken = [i for n, i in enumerate(best) if n == 0 or sum(among[:n]) < (top_p or 2)]
            result[taken] = F.softmax(row[taken], dim=0)
        ids = torch.hstack([ids, torch.multinomial(probabilities, 1)])
    return ids


@pytest.mark.parametrize(
    ("n_prompt", "batch_size", "how"),
    [
        (1, 3, dict(temperature=0.0)),
        (LIMIT - 1, 3, dict()),
        (5, 1, dict(temperature=0.8, top_k=7)),
        (LIMIT, 1, dict(temperature=1.5, top_p=0.7)),
        (LIMIT + 4, 3, dict(temperature=1.2, top_k=9, top_p=0.8)),
    ],
    ids=str,
)
def test_the_same_text_as_by_full_forwards(how, n_prompt, batch_size):
    """Up to the longest sequence and beyond; and as many random numbers are drawn."""
    model, prompt = trained(), random_ids(batch_size, n_prompt)
    torch.manual_seed(1)
    expected = written_plainly(model, prompt, 2 * LIMIT, **how)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(model.generate(prompt, 2 * LIMIT, **how), expected)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    streamed = list(model.stream(prompt, 2 * LIMIT, **how))
    assert {token.shape for token in streamed} == {(batch_size, 1)}
    assert torch.equal(torch.hstack([prompt, *streamed]), expected)


def test_nothing_is_computed_twice_until_the_window_slides(monkeypatch):
    model, lengths, rows = trained(), [], []
    model.blocks[1].register_forward_hook(lambda _block, inputs, _: lengths.append(inputs[0].shape))
    head = model.token_embedding.logits
    monkeypatch.setattr(model.token_embedding, "logits", lambda x: rows.append(x.shape) or head(x))
    model.generate(random_ids(2, 5), LIMIT)
    expected = [5, *[1] * (LIMIT - 5), *[LIMIT] * 4]
    assert lengths == [(2, T, 32) for T in expected]
    assert rows == [(2, 1, 32)] * LIMIT


def test_a_past_counts_as_positions():
    model, past = trained(), Past()
    with torch.no_grad(), past.before(model):
        model(random_ids(2, LIMIT - 1))
        model(random_ids(2, 1))
        assert past.n_tokens == LIMIT
        with pytest.raises(ValueError, match="sequence of 17 tokens, but max_position_embeddings"):
            model(random_ids(2, 1))
    model(random_ids(2, LIMIT))  # and outside of it there is none


def test_while_a_text_waits_the_model_is_free():
    """For another text, for a forward, with gradients or without."""
    model, prompts = trained(), [random_ids(2, 3), random_ids(1, 6)]
    alone = [model.generate(prompt, 20, temperature=0) for prompt in prompts]
    probe = random_ids(1, LIMIT)
    expected = model(probe)
    streams = [model.stream(prompt, 20, temperature=0) for prompt in prompts]
    for tokens in zip(*streams, strict=True):
        assert torch.is_grad_enabled()
        logits = model(probe)
        assert torch.equal(logits, expected) and logits.requires_grad
        prompts = [torch.hstack(pair) for pair in zip(prompts, tokens, strict=True)]
    assert all(map(torch.equal, prompts, alone))


def test_a_reader_may_stop_early():
    model = trained(dropout=0.5).train()
    stream = model.stream(random_ids(1, 3), 20)
    next(stream)
    assert not model.training
    stream.close()
    assert model.training

    def fail(*_):
        raise ZeroDivisionError

    hook = model.blocks[1].mlp.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model.generate(random_ids(1, 3), 20)
    hook.remove()
    assert model.training and model.past is None
    assert all(block.attn.past is None for block in model.blocks)


@pytest.mark.parametrize("stance", ["force_eager", "default"])
def test_compiled_blocks_write_too(stance):
    """As at the end of a run with --compile, eagerly; and training goes on with the code it has."""
    model, prompt, ids = trained(), random_ids(2, 3), random_ids(2, LIMIT)
    expected = model.generate(prompt, 20, temperature=0)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    model.train()(ids, ids).backward()
    with torch.compiler.set_stance(stance):
        assert torch.equal(model.generate(prompt, 20, temperature=0), expected)
    with torch._dynamo.config.patch(error_on_recompile=True):
        model(ids, ids).backward()
