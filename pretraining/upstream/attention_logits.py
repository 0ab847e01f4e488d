"""See the queries and keys of every attention layer, and know which weights make them; transformers 5.24.0.

Every class asks `AttentionInterface.get_interface` for its kernel in each forward pass, and calls it with (layer,
queries, keys, values, mask) and `scaling`. The method is wrapped: a kernel is called as before, and while the watch is
on, the largest logit of each head is computed beside it. So the kernel may be any, and needs to return no scores.
Classes that have their own attention are not seen. Held by test_activations.py and, for every type, by the abilities
"logits" and "clipped logits" (model/abilities.py). It may go once kernels return the largest logit.

The largest logits are kept on the layer's module: a number of the layer here would compile each block anew.
"""

from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import AttentionInterface, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pretraining.errors import UserError
from pretraining.upstream.deepspeed import tensor_part_and_degree

CHUNK_BYTES = 2**28
"""Of the logits that exist at one time."""


WATCH = SimpleNamespace(is_on=False)
"""Whether logits are computed: for a monitor in some steps, or in every step."""


def is_watched() -> bool:
    """Return whether `watch_attention` was called: compiled graphs may end at an attention."""
    return hasattr(AttentionInterface.get_interface, "__wrapped__")


def watch_attention() -> None:
    """Let every attention of this process be seen while the watch is on."""
    get = AttentionInterface.get_interface
    if is_watched():
        return

    @wraps(get)
    def get_watched(self: AttentionInterface, name: str, default: Callable) -> Callable:
        kernel = get(self, name, default)
        # attention of split sequences knows whole ones only inside
        return kernel if hasattr(kernel, "sees_logits") else partial(_call, kernel)

    AttentionInterface.get_interface = get_watched


def _call(kernel: Callable, module: Any, query: Any, key: Any, value: Any, *others: Any, **named: Any) -> Any:
    if WATCH.is_on and module.training:
        # the mask is the fifth argument, with or without its name
        see_logits(module, query, key, *others[:1], **named)
    return kernel(module, query, key, value, *others, **named)


@torch.compiler.disable
@torch.no_grad()
def see_logits(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sequence_part: tuple[int, int] = (0, 1),
    **named: Any,
) -> None:
    """Keep on a layer the largest logit of each of its heads, with those of earlier passes.

    sequence_part: (number of this rank, ranks) among those that share the heads of split sequences.
    """
    if named.get("is_causal") is None:
        named["is_causal"] = getattr(module, "is_causal", True)
    largest = largest_logits(query, key, attention_mask, scaling, **named)
    before = getattr(module, "largest_logits", None)
    module.largest_logits = largest if before is None else torch.maximum(before, largest)
    part, (own, ranks) = tensor_part_and_degree()[0], sequence_part
    module.first_head = (part * ranks + own) * len(largest)


def largest_logits(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    is_causal: bool = True,
    cu_seq_lens_q: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return the largest query x key x scaling of each head, [heads] in fp32, where a token may look at another.

    Only some rows of the logits exist at one time. Caps and biases of the logits are left out.

    Args:
        query, key: [batch, heads, length, width]; the key may have fewer heads.
        mask: what may be seen, as a kernel of transformers takes it; None: every earlier token of the document.
        cu_seq_lens_q: borders of the documents in the batch written as one row.
    """
    batch, heads, length, width = query.shape
    scaling = width**-0.5 if scaling is None else scaling
    queries, keys = query.unflatten(1, (key.shape[1], -1)), key.float().unsqueeze(2).transpose(-1, -2)
    rows = max(1, CHUNK_BYTES // (4 * batch * heads * key.shape[2]))
    documents = None
    if mask is None and cu_seq_lens_q is not None:
        begins = torch.zeros(batch * length, dtype=torch.int32, device=query.device)
        begins[cu_seq_lens_q[:-1].long()] = 1
        documents = begins.cumsum(0).view(batch, length)
    largest = query.new_full((heads,), -torch.inf, dtype=torch.float32)
    places = torch.arange(max(length, key.shape[2]), device=query.device)
    with torch.autocast(query.device.type, enabled=False):
        for start in range(0, length, rows):
            part = slice(start, start + rows)
            stop = min(start + rows, length) if mask is None and is_causal else key.shape[2]
            logits = queries[:, :, :, part].float() @ keys[..., :stop] * scaling
            if mask is not None:
                seen = mask[..., part, :stop]
                # an added mask hides by the least number of its type
                seen = seen if seen.dtype == torch.bool else seen > torch.finfo(seen.dtype).min / 2
                seen = seen.unsqueeze(2) if seen.shape[1] == 1 else seen.unflatten(1, (key.shape[1], -1))
            else:
                behind = places[part, None][: logits.shape[-2]] - places[:stop]
                seen = (behind >= 0) | (not is_causal)
                if sliding_window is not None:
                    seen = seen & (behind < sliding_window)
                if documents is not None:
                    same = documents[:, part, None] == documents[:, None, :stop]
                    seen = seen & same[:, None, None]
            logits.masked_fill_(~seen, -torch.inf)
            largest = torch.maximum(largest, logits.amax((0, 3, 4)).flatten())
    return largest


def read_logits(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return {attention layer: the largest logit of every head, [heads]}, over all ranks. A collective."""
    heads, seen = model.config.get_text_config().num_attention_heads, {}
    for name, module in model.named_modules():
        if hasattr(module, "largest_logits"):
            own = module.largest_logits
            seen[name] = own.new_full((max(heads, len(own)),), -torch.inf)
            seen[name][module.first_head : module.first_head + len(own)] = own
    if seen and dist.is_initialized() and dist.get_world_size() > 1:
        together = torch.cat(list(seen.values()))
        dist.all_reduce(together, dist.ReduceOp.MAX)
        seen = dict(zip(seen, together.split([len(each) for each in seen.values()]), strict=True))
    return seen


def forget_logits(model: PreTrainedModel) -> None:
    for module in model.modules():
        if hasattr(module, "largest_logits"):
            del module.largest_logits


class ClippedUnits(NamedTuple):
    """How the outputs of a projection shrink with their head: by its factor to a power."""

    layer: str
    """The attention's."""
    heads: torch.Tensor
    """The head of each output, [outputs]."""
    powers: torch.Tensor
    """[outputs]; 0: it stays."""
    transposed: bool = False
    """Outputs are columns."""


def clipped_units(model: PreTrainedModel) -> dict[str, ClippedUnits]:
    """Return {parameter: how its outputs shrink} of all that queries and keys are made with.

    Queries and keys share a head's factor by its root, as in MuonClip (Kimi Team 2025, section 2.1). A key that several
    heads share stays, and the queries take the whole factor: so do heads of grouped queries, and the rotary part of
    latent attention.

    Raises `UserError`: an attention layer with projections of other names.
    """
    config = model.config.get_text_config()
    heads, found = config.num_attention_heads, {}
    for layer, attention in model.named_modules():
        for name, blocks in _blocks_of(attention, config).items():
            numbers, powers = [], []
            for block in blocks:
                powers += heads * [power for size, power in block for _ in range(size)]
                numbers += [head for head in range(heads) for size, _ in block for _ in range(size)]
            projection = getattr(attention, name)
            units = ClippedUnits(
                layer, torch.tensor(numbers), torch.tensor(powers), isinstance(projection, Conv1D)
            )
            found |= {f"{layer}.{name}.{key}": units for key, _ in projection.named_parameters(recurse=False)}
    if not found:
        raise UserError("no layer has projections named q_proj and k_proj, kv_b_proj or c_attn")
    return found


def _blocks_of(attention: Any, config: Any) -> dict[str, list[list[tuple[int, float]]]]:
    """Return {projection: its blocks side by side}, of each the (outputs, power) that every head has in it."""
    children, heads = dict(attention.named_children()), config.num_attention_heads
    width = getattr(attention, "head_dim", None) or config.hidden_size // heads
    if isinstance(children.get("c_attn"), Conv1D):
        # queries, keys and values
        return {"c_attn": [[(width, 0.5)], [(width, 0.5)], [(width, 0.0)]]}
    if "kv_b_proj" in children:
        plain, queries = config.qk_nope_head_dim, "q_b_proj" if "q_b_proj" in children else "q_proj"
        of_queries, of_keys = (config.qk_rope_head_dim, 1.0), (config.v_head_dim, 0.0)
        return {queries: [[(plain, 0.5), of_queries]], "kv_b_proj": [[(plain, 0.5), of_keys]]}
    if not {"q_proj", "k_proj"} <= children.keys():
        return {}
    if (getattr(config, "num_key_value_heads", None) or heads) != heads:
        return {"q_proj": [[(width, 1.0)]]}
    return {"q_proj": [[(width, 0.5)]], "k_proj": [[(width, 0.5)]]}


def factors(units: ClippedUnits, largest: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the factor of each output, [outputs]: a head's logits shrink to the threshold if `largest` is above it."""
    of_heads = torch.where(largest > threshold, threshold / largest, 1.0)
    return of_heads[units.heads.to(of_heads.device)] ** units.powers.to(of_heads.device)
