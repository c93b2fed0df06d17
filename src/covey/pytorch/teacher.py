"""Another network as the teacher: frozen, of any width, with the policy's vocabulary."""

from __future__ import annotations

from covey.errors import ModelError
from covey.pytorch.models.loading import load_model
from covey.pytorch.packed_model import PackedModel
from covey.pytorch.policy import Policy
from covey.pytorch.reference import Reference


def load_network(source: str, policy: Policy, dtype: str, trust_remote_code: bool) -> Policy:
    """The model at `source` beside the policy, without anything to train it; arguments are those of `load_model`.

    It is scored over the ids that both have, since embeddings of one vocabulary may be padded differently. Raises
    `ModelError`: there is no such model, or its tokenizer gives one of these ids another token.
    """
    try:
        loaded = load_model(source, device=str(policy.device), dtype=dtype, trust_remote_code=trust_remote_code)
    except ModelError as error:
        raise ModelError(f"algorithm.teacher.weights: {error}") from error
    loaded.model.requires_grad_(False)
    network = Policy(PackedModel(loaded, fused_layers=False, trains=False), Reference(loaded.model, needed=False))
    network.held.ids = shared = min(network.vocabulary, policy.vocabulary)
    tokenizers = (policy.tokenizer, loaded.tokenizer)
    mine, theirs = ({number: token for token, number in each.get_vocab().items()} for each in tokenizers)
    if found := [number for number in range(shared) if mine.get(number) != theirs.get(number)]:
        shown = ", ".join(f"{n}: {mine.get(n)!r} and {theirs.get(n)!r}" for n in found[:5])
        raise ModelError(
            f"algorithm.teacher.weights={source}: its tokenizer is another: {len(found)} of {shared} ids stand "
            f"for other tokens than the policy's ({shown}); use a teacher with the policy's tokenizer"
        )
    return network
