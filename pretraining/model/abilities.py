"""Measure what a type of model can do here: the same on a small model as plain PyTorch and transformers do.

recipe/abilities.json keeps the answers, recipes are checked by them (`recipe.model.why_not`), docs/model_types.md shows
them. benchmarks/model_types.py measures every type, and adds what takes several ranks.

As a program it reads a model section on stdin and prints one JSON object, {"abilities": ...} or {"error": one line}.
Its argument is the module of a model of the user's own.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pretraining.data.documents import stack_blocks
from pretraining.errors import UserError
from pretraining.model.attention import TORCH_VARLEN, register_kernels
from pretraining.model.build import blocks_of, compile_model, keep_products
from pretraining.model.counting import answer_on_stdin
from pretraining.model.loss import balance_of, build_loss
from pretraining.recipe.model import has_experts, without_padding
from pretraining.recipe.sections import Loss, Speed
from pretraining.upstream import attention_logits
from pretraining.upstream.transformers import mask_by_positions

TOLERANCE = 1e-5
"""Of the largest number, or of 1; all is computed in fp32."""
VISIBLE = 1e-3
"""What the text before a document changes in its logits if nothing keeps them apart; less would measure nothing."""
LENGTH = 24
BEGINS = ((0, 9, 14), (0, 13))
"""Where documents begin in the two rows of a batch."""


def main() -> None:
    answer_on_stdin(lambda section: {"abilities": measured(section)})


def measured(model: dict) -> dict[str, str | None]:
    """Return {ability: None, or why the model lacks it} of a model section, which should be small."""
    found: dict[str, str | None] = {}
    for ability, measure in ABILITIES.items():
        try:
            measure(model)
            found[ability] = None
        except UserError as difference:
            found[ability] = str(difference)
        except Exception as error:  # each class has its own for what it cannot do
            found[ability] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return found


def built(model: dict, attention: str | None = None) -> PreTrainedModel:
    """Build the model in fp32, with weights of gain 1: a difference anywhere reaches the logits."""
    register_kernels()
    torch.manual_seed(0)
    special = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": attention}
    config = AutoConfig.for_model(**special | without_padding(model) | model)
    network = AutoModelForCausalLM.from_config(config, trust_remote_code=False).train()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                nn.init.normal_(parameter, std=0.1)
    network.loss_type = None
    return network


def compare(what: str, here: torch.Tensor, there: torch.Tensor) -> None:
    """Raise `UserError` unless the two are equal within the tolerance."""
    difference = (here - there).abs().max().item()
    if not difference <= TOLERANCE * max(1.0, there.abs().max().item()):
        raise UserError(f"{what} differs by {difference:.0e}")


def trains_alike(model: dict, change: Callable[[PreTrainedModel], Callable | None]) -> None:
    """Compare loss and gradients of a changed model with those of the model as transformers builds it.

    change: returns the loss, a function (outputs, labels); None for torch's own.
    """
    tokens = _tokens(model)
    (expected, theirs), (value, ours) = (
        _trained(model, each, tokens) for each in (lambda network: None, change)
    )
    compare("the loss", value, expected)
    for name in theirs.keys() | ours.keys():
        if name not in ours or name not in theirs:
            raise UserError(f"{name} has a gradient in one of them")
        compare(f"the gradient of {name}", ours[name], theirs[name])


def _tokens(model: dict) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, model["vocab_size"], (len(BEGINS), LENGTH), generator=generator)


def _trained(model: dict, change: Callable, tokens: torch.Tensor) -> tuple[torch.Tensor, dict]:
    network = built(model)
    loss = change(network) or (
        lambda out, labels: F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
    )
    torch.manual_seed(2)  # of routers that draw
    value = loss(network(input_ids=tokens.roll(1, 1)), tokens)
    value.backward()
    return value.detach(), {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def has_loss(model: dict, kind: str) -> None:
    settings = Loss(kind=kind, balance="none", chunk_tokens=16)
    trains_alike(model, lambda network: build_loss(network, settings))


def compiles(model: dict) -> None:
    """Compare compiled blocks; their graphs, that is: not the code that inductor makes of them."""

    def change(network: PreTrainedModel) -> None:
        _require_blocks(network)
        compile_model(network, Speed(compile="blocks", compile_backend="aot_eager"))

    torch.compiler.reset()
    trains_alike(model, change)


def recomputes(model: dict, all_but_products: bool = False) -> None:
    def change(network: PreTrainedModel) -> None:
        if all_but_products:
            keep_products(network)
        _require_blocks(network)
        network.gradient_checkpointing_enable({"use_reentrant": False})

    trains_alike(model, change)


def _require_blocks(network: PreTrainedModel) -> None:
    if not any(blocks_of(network)):
        raise UserError("its layers are no blocks of transformers")


def keeps_apart(model: dict, attention: str) -> None:
    """Compare the logits of documents that share rows with those of the same documents, each in a row of its own."""
    tokens, whole, packed = _tokens(model), built(model, "eager"), built(model, attention)
    mask_by_positions(packed)
    spans = [list(pairwise((*row, LENGTH))) for row in BEGINS]
    positions = np.stack([np.concatenate([np.arange(stop - start) for start, stop in row]) for row in spans])
    blocks = zip(tokens.numpy(), positions, strict=True)
    batch = stack_blocks([{"input_ids": row, "position_ids": places} for row, places in blocks])
    given = {key: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for key, x in batch.items()}
    with torch.no_grad(), mock.patch("torch.nn.attention.varlen.varlen_attn", document_by_document):
        together = packed(**given).logits
        crossing = whole(input_ids=tokens).logits
        for row, documents in enumerate(spans):
            for start, stop in documents:
                alone = whole(input_ids=tokens[row : row + 1, start:stop]).logits[0]
                compare(f"a document's text behind {start} others", together[row, start:stop], alone)
                if start and (crossing[row, start:stop] - alone).abs().max() < VISIBLE:
                    raise UserError("nothing to be seen of the text before a document")


def document_by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    *_: Any,
    window_size: tuple[int, int],
    **settings: Any,
) -> torch.Tensor:
    """Compute on a processor what torch's kernel for sequences of different lengths does, [tokens, heads, width].

    settings: `scale` and `enable_gqa`, as torch's attention has them too.
    """
    attended = []
    for start, stop in pairwise(borders.tolist()):
        places = torch.arange(stop - start)
        behind = places[:, None] - places
        seen = (behind >= 0) & ((behind <= window_size[0]) | (window_size[0] < 0))
        heads = (each[start:stop].transpose(0, 1) for each in (query, key, value))
        part = F.scaled_dot_product_attention(*heads, attn_mask=seen, **settings)
        attended.append(part.transpose(0, 1))
    return torch.cat(attended)


def balances(model: dict) -> None:
    """See that a mixture has a balancing loss, or biases that can move, which reaches every router."""
    if not has_experts(model):
        return
    network, tokens = built({**model, "output_router_logits": True}), _tokens(model)
    found = balance_of(network)
    if found is None:
        raise UserError("it has no loss and no biases that balance its experts")
    weight, balance = found
    outputs = network(input_ids=tokens)
    value = balance(outputs)
    if not (weight > 0 and value.isfinite() and all(each.requires_grad for each in outputs.router_logits)):
        raise UserError("the loss that balances its experts does not reach its routers")


def logits_of(network: PreTrainedModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the largest logit of each head in a training pass."""
    attention_logits.watch_attention()
    attention_logits.WATCH.is_on = True
    try:
        network(input_ids=tokens)
        return attention_logits.read_logits(network)
    finally:
        attention_logits.WATCH.is_on = False
        attention_logits.forget_logits(network)


def sees_logits(model: dict) -> None:
    """Compare the largest logits of the class's own kernel and of eager attention, which has the scores."""
    tokens = _tokens(model)
    found, eager = (logits_of(built(model, kernel), tokens) for kernel in (None, "eager"))
    if not found:
        raise UserError("its attention is not one of transformers' kernels")
    for layer, largest in eager.items():
        compare(f"the largest logit of {layer}", found[layer], largest)


def clips_logits(model: dict) -> None:
    """Clip the first layer's heads at half of its largest logit, and measure them again."""
    sees_logits(model)
    network, tokens = built(model), _tokens(model)
    units = attention_logits.clipped_units(network)
    layer, before = next(iter(logits_of(network, tokens).items()))
    threshold = before.max().item() / 2
    for name in [name for name, each in units.items() if each.layer == layer]:
        factor = attention_logits.factors(units[name], before, threshold)
        parameter = network.get_parameter(name)
        is_plain = parameter.ndim == 2 and not units[name].transposed
        parameter.data.mul_(factor[:, None] if is_plain else factor)
    after, expected = logits_of(network, tokens)[layer], before.clamp(max=threshold)
    if not torch.allclose(after, expected, rtol=TOLERANCE, atol=TOLERANCE):
        raise UserError("its logits do not shrink with these weights, as where queries and keys are normed")


ABILITIES: dict[str, Callable[[dict], None]] = {
    "chunked": partial(has_loss, kind="chunked"),
    "fused": partial(has_loss, kind="fused"),
    "apart sdpa": partial(keeps_apart, attention="sdpa"),
    "apart eager": partial(keeps_apart, attention="eager"),
    f"apart {TORCH_VARLEN}": partial(keeps_apart, attention=TORCH_VARLEN),
    "compiled": compiles,
    "recomputed": recomputes,
    "operators": partial(recomputes, all_but_products=True),
    "balanced": balances,
    "logits": sees_logits,
    "clipped logits": clips_logits,
}
"""Ability -> what raises if the model lacks it."""


if __name__ == "__main__":
    main()
