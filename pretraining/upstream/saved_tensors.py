"""What a forward pass keeps for the backward pass: on fake tensors, which need neither memory nor a GPU.

What torch 2.15 and transformers 5.24 keep private:

- Fake tensors (`FakeTensor`, `FakeTensorMode`): torch's `_subclasses`. Plain meta tensors know no autocast.
- Weights and buffers of a module (`_parameters`, `_buffers`): fake ones take their place, as no public way sets a
  parameter of another type of tensor.
- Which memory a tensor lies in (`_cdata` of its storage): meta tensors have no address.
- Arguments in nested tuples and dicts (`_pytree`): `tree_leaves`.
- Which modules are layers (`_no_split_modules`): what transformers keeps on one device; beside it, its
  `GradientCheckpointingLayer`.
- Whether a batch has padding or several documents (`_ignore_causal_mask_sdpa`, `find_packed_sequence_indices` of
  `masking_utils`): it is read from the tokens, which fake tensors do not have.

- The product of a mixture's experts (`_grouped_mm`): on fake tensors it takes no fp32. A function of autograd in its
  place, as for attention (torch gives each a `_backward_cls`), keeps the same.

Held by test_other_models.py, against torch's memory tracker. May go once torch says in public what a pass will keep.
"""

import contextlib
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from math import prod
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer

PRECISIONS = {
    "16 bit": (torch.bfloat16, False),
    "autocast": (torch.float32, True),
    "fp32": (torch.float32, False),
}
"""Name -> (type of the weights, whether products cast their inputs to 16 bit)."""
IN_FP32 = {"softmax", "log_softmax", "layer_norm", "pow", "rsqrt", "exp"}
IN_FP32 |= {"softplus", "cumsum", "prod", "norm"}
"""What autocast computes in fp32 on a GPU, and not on a processor."""
OUTSIDE, LOGITS = "outside", "logits"


class Saved:
    """A tensor as autograd saves it; it is gone as soon as nothing needs its gradient."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Walk:
    """Forward passes of a model on fake tensors; of layers that are alike, only the first computes."""

    def __init__(self, built: PreTrainedModel, attention: str | None) -> None:
        self.built, self.mode = built.train(), FakeTensorMode(allow_non_fake_inputs=True)
        # all other kernels are given no mask
        self.keeps_mask = attention in (None, "eager", "sdpa")
        built.config.get_text_config().output_router_logits = False
        layers = layers_of(built)
        marks = [_mark(built, name, layer) for name, layer in layers]
        self.kinds = [list(dict.fromkeys(marks)).index(mark) for mark in marks]
        for (_, layer), kind in zip(layers, self.kinds, strict=True):
            layer.forward = self._first_of(str(kind), layer.forward)
        if (head := built.get_output_embeddings()) is not None:
            head.register_forward_hook(lambda *_: setattr(self, "place", LOGITS))
        self.fakes: dict[str, dict[int, torch.Tensor]] = {}
        self.held = [
            (held, name, tensor)
            for module in built.modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]

    def measure(self, precision: str, rows: int, length: int) -> tuple[Counter, int]:
        """Return what `rows` sequences of `length` tokens keep, and how many tensors were saved.

        The first is bytes by place (`outside`, `logits`, the number of a kind of layers) and what they are.
        """
        casts, fakes = PRECISIONS[precision][1], self._weights_in(precision)
        self.place, self.done, self.inputs, self.saved = OUTSIDE, {}, {}, []
        self.shared, self.given, sizes = {}, [], Counter()
        with self.mode:
            ids = torch.zeros(rows, length, dtype=torch.long)
            self.known = {_storage(tensor) for tensor in (*fakes, ids)}
            with (
                torch.autocast("cpu", torch.bfloat16, enabled=casts),
                torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved.tensor),
                AsOnGpu(casts, self.keeps_mask),
                without_padding(),
            ):
                given = self.built(input_ids=ids)
        seen = set(self.known)
        for reference, place in self.saved:
            saved = reference()
            if saved is None or (key := _storage(saved.tensor)) in seen:
                continue
            seen.add(key)
            tensor, place = saved.tensor, OUTSIDE if key in self.shared else place
            size = tensor.untyped_storage().nbytes()
            sizes[place] += size
            if place in (OUTSIDE, LOGITS):
                continue
            sizes[f"{place} largest"] = max(sizes[f"{place} largest"], size)
            *lines, width = self.inputs[place].shape
            is_dense = tensor.ndim > 2 or (tensor.ndim == 2 and len(tensor) == prod(lines))
            # heads and inner values; experts have rows of their own
            if tensor.ndim > 3 or (is_dense and tensor.shape[-1] not in (1, width)):
                sizes[f"{place} split"] += size
        del given
        for key, size in self.shared.items():
            sizes["arguments"] += size * (key not in seen)
        for kind, hidden in self.inputs.items():
            sizes[f"{kind} input"] = hidden.untyped_storage().nbytes()
        return sizes, len(self.saved)

    def _weights_in(self, precision: str) -> list[torch.Tensor]:
        if precision not in self.fakes:
            self.fakes[precision] = {}
            for _, _, tensor in self.held:
                # DeepSpeed casts buffers with the weights
                dtype = PRECISIONS[precision][0] if tensor.is_floating_point() else tensor.dtype
                on_meta = torch.empty_like(tensor, dtype=dtype, device="meta")
                fake = FakeTensor(self.mode, on_meta, torch.device("cpu"))
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, tensor.requires_grad)
                self.fakes[precision][id(tensor)] = fake
        for held, name, tensor in self.held:
            held[name] = self.fakes[precision][id(tensor)]
        return list(self.fakes[precision].values())

    def _save(self, tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor)
        self.saved.append((weakref.ref(saved), self.place))
        return saved

    def _first_of(self, kind: str, forward: Callable) -> Callable:
        def run(*args, **kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            if self.done.get(kind):
                return self.done[kind](hidden)
            for leaf in tree_leaves((args, kwargs)):
                # what all layers are given: positions, masks
                if isinstance(leaf, torch.Tensor) and leaf is not hidden and _storage(leaf) not in self.known:
                    self.shared[_storage(leaf)] = leaf.untyped_storage().nbytes()
                    self.given.append(leaf.detach())
            before, self.place = self.place, kind
            self.inputs[kind] = hidden.detach()
            out = forward(*args, **kwargs)
            self.place = before
            self.done[kind] = _passing(hidden, out)
            return out

        return run


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _passing(hidden: torch.Tensor, out: Any) -> Callable | None:
    """Return a layer in the place of another that gave `out`: it gives on what it gets. None: it cannot be replaced."""
    first = out[0] if isinstance(out, tuple | list) and out else out
    if not isinstance(first, torch.Tensor) or first.shape != hidden.shape:
        return None
    if first is out:
        return lambda hidden: hidden
    kind, others = type(out), out[1:]
    return lambda hidden: kind([hidden, *others])


def layers_of(built: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return name and module of the layers, those inside another one left out."""
    named, found = set(built._no_split_modules or ()), []
    for name, module in built.named_modules():
        is_layer = isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in named
        if is_layer and not any(name.startswith(f"{other}.") for other, _ in found):
            found.append((name, module))
    return found


def _mark(built: PreTrainedModel, name: str, layer: nn.Module) -> str:
    """Describe a layer, so that equal texts mean that equal tensors are kept."""
    said, place = [], name.rpartition(".")[2]
    for part, module in layer.named_modules():
        said += [part, type(module).__name__]
        said += [(key, each.shape) for key, each in module._parameters.items() if each is not None]
        said += [
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, bool | int | str) and not re.search("idx|index|layer_id|layer_num", key)
        ]
    config = built.config.get_text_config()
    for key, value in vars(config).items():
        # one for each layer, which the model may read in the place of the layer
        if isinstance(value, list | tuple) and place.isdigit() and len(value) == config.num_hidden_layers:
            said.append((key, value[int(place)]))
    return str(said)


class AsOnGpu(TorchFunctionMode):
    """Keeps what CUDA's kernels keep where those of a processor differ: attention, dropout, autocast's list."""

    def __init__(self, casts: bool, keeps_mask: bool = True) -> None:
        self.casts, self.keeps_mask = casts, keeps_mask
        super().__init__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "scaled_dot_product_attention":
            return self._attention(*args, **kwargs)
        if name == "_grouped_mm":
            return _Grouped.apply(*args)
        if function is nn.functional.dropout:
            return _dropped(*args, **kwargs)
        if self.casts and name in IN_FP32:
            args = [_wide(each) for each in args]
            kwargs = {key: _wide(each) for key, each in kwargs.items()}
        return function(*args, **kwargs)

    def _attention(self, query, key, value, attn_mask=None, dropout_p=0.0, *_, **__):
        if self.casts:
            query, key, value = (each.to(torch.bfloat16) for each in (query, key, value))
        mask = attn_mask if self.keeps_mask else None
        if mask is not None and mask.dtype == torch.bool:
            # the kernel adds it to the scores
            mask = mask.new_empty(mask.shape, dtype=query.dtype)
        return _Attention.apply(query, key, value, mask)


def _dropped(input, p=0.5, training=True, inplace=False):
    return torch.native_dropout(input, p, training)[0] if training and p else input


def _wide(value):
    is_narrow = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.float() if is_narrow else value


class _Attention(torch.autograd.Function):
    """Keeps what flash and memory-efficient kernels keep: an fp32 number for each head and token, and no pairs."""

    @staticmethod
    def forward(ctx, query, key, value, mask):
        """Return what attention gives: [batch, heads, length, width], rows of one token together."""
        *rows, heads, length, _ = query.shape
        given = query.new_empty(*rows, length, heads, value.shape[-1]).transpose(-2, -3)
        sums = query.new_empty(*rows, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, given, sums, *([] if mask is None else [mask]))
        return given

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError  # nothing goes backward here


class _Grouped(torch.autograd.Function):
    """A product of tokens with the weights of their experts, of any type; it keeps both."""

    @staticmethod
    def forward(ctx, tokens, weights, *_):
        """Return [tokens, columns] for [tokens, rows] and [experts, rows, columns]."""
        ctx.save_for_backward(tokens, weights)
        return tokens.new_empty(len(tokens), weights.shape[-1])

    backward = _Attention.backward


@contextlib.contextmanager
def without_padding() -> Iterator[None]:
    """Have masks built as for whole sequences, and none where a kernel knows of the causal one."""
    ignores = masking_utils._ignore_causal_mask_sdpa
    whole = {
        "find_packed_sequence_indices": lambda *_: None,
        "_ignore_causal_mask_sdpa": lambda padding_mask, *others, **named: ignores(None, *others, **named),
    }
    with mock.patch.multiple(masking_utils, **whole):
        yield
