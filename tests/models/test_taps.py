"""Hidden states handed out beside scores: right on every way, free where nobody asks."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import InvalidConfig, UnsupportedModel
from outrider.models.base import Rows, Target
from outrider.models.hf import HuggingFaceTarget
from outrider.models.plan import chain_ancestors
from outrider.models.protocol import ProtocolTarget
from tests.engine.toys import markov
from tests.models.families import one_thread, random_model, random_tokens

single = pytest.fixture(scope="module", autouse=True)(one_thread)
LAYERS = (1, 3)
NOTHING = torch.empty(0, dtype=torch.int64)


def plain_states(model, tokens: torch.Tensor) -> torch.Tensor:
    """What the model's own forward says, by hooks of torch's."""
    found: dict[int, torch.Tensor] = {}

    def keep(i: int):
        def hook(_, __, out) -> None:
            found[i] = (out[0] if isinstance(out, tuple) else out).detach()

        return hook

    depth = model.config.num_hidden_layers
    layers = next(
        m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth
    )
    hooks = [layers[layer - 1].register_forward_hook(keep(layer)) for layer in LAYERS]
    model(tokens[None])
    for hook in hooks:
        hook.remove()
    return torch.cat([found[layer][0] for layer in LAYERS], -1)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon"])
def test_states_are_the_models_own_on_every_way(family: str, strict: bool) -> None:
    """A prompt without logits, a chain, a tree whose branch parts, two sequences at once."""
    if strict and family == "falcon":
        pytest.skip("no strict arithmetic over the slab")
    target = HuggingFaceTarget(random_model(family), strict=strict)
    main, other = random_tokens(14, 1), random_tokens(9, 2)
    branch = torch.tensor([int(main[12]) ^ 1])
    seqs = target.open(20), target.open(20)
    with target.tapping(LAYERS) as taps:
        target.score(Rows(seqs, (7, 4), torch.cat((main[:7], other[:4])), None, NOTHING))
        for seq, count in zip(seqs, (7, 4), strict=True):
            target.commit(seq, count)
        # The tree of the first parts behind its fifth row, the second goes on as a chain.
        tree = chain_ancestors(7)
        ancestors = torch.cat((tree, tree[4:5] | 1 << 7, chain_ancestors(5)))
        rows = torch.cat((main[7:], branch, other[4:]))
        logits = target.score(Rows(seqs, (8, 5), rows, ancestors))
    own, others = taps.of(seqs[0]), taps.of(seqs[1])
    wanted = plain_states(target.model, main)
    torch.testing.assert_close(own[:14], wanted, rtol=1e-4, atol=1e-4)
    parted = plain_states(target.model, torch.cat((main[:12], branch)))
    torch.testing.assert_close(own[14], parted[-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(others, plain_states(target.model, other), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(own[14], wanted[12], atol=1e-3), "the branch has states of its own"
    # Whoever looks changes nothing.
    for seq in seqs:
        target.discard(seq)
    assert torch.equal(target.score(Rows(seqs, (8, 5), rows, ancestors)), logits)


def test_nothing_is_noted_where_nobody_asks() -> None:
    target = HuggingFaceTarget(random_model("llama"))
    seq = target.open(4)
    with target.tapping(()) as taps:
        target.score(Rows((seq,), (2,), torch.tensor([1, 2])))
    assert taps.parts == {} and target._gate is None
    with target.tapping(LAYERS) as asked:
        pass
    target.score(Rows((seq,), (1,), torch.tensor([3])))
    assert asked.parts == {}
    layers = target.model.model.layers
    assert not any("forward" in vars(layer) for layer in layers), "layers are as they were"


def test_layers_that_are_not_there_are_refused() -> None:
    target: Target = HuggingFaceTarget(random_model("llama"))
    for wrong in ((0, 1), (1, 4), (2, 1), (1, 1)):
        with pytest.raises(InvalidConfig, match="with 3 layers; give numbers from 1 to 3"):
            target.tapping(wrong)
    with pytest.raises(UnsupportedModel, match="a ProtocolTarget hands out none"):
        ProtocolTarget(markov(6, 2, seed=5)).tapping((1,))
