"""Count a model by building it on the meta device, which takes no memory: for types that no formula describes.

This is a separate program, which planning/shapes.py starts. It reads a recipe's `model` section on stdin and prints one
JSON object, the facts or {"error": one line}. Its argument is the module of a model of the user's own. It imports
neither DeepSpeed nor the Trainer, so that it answers sooner.
"""

import json
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from pretraining.errors import UserError
from pretraining.extend import check_model_keys, load_extensions, model_extension, read_extensions
from pretraining.model.drawing_rules import drawing_faults
from pretraining.recipe.model import EXPERTS
from pretraining.upstream.transformers import without_padding

CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def main() -> None:
    # their kernels run on a GPU alone: a layer that can use them has a path of torch's operators too
    sys.modules.update(dict.fromkeys(KERNELS))
    print(json.dumps(counted(json.load(sys.stdin), sys.argv[1:])))


KERNELS = ("fla", "mamba_ssm", "causal_conv1d")
OWN_KERNELS = ("use_kernel_func_from_hub_with_fallback", "is_fast_path_available")
"""What a file of transformers imports or has if its layers can use them."""


def counted(model: dict, extensions: Sequence[str] = ()) -> dict:
    """Return the facts of `describe`, or {"error": one line}. extensions: modules of the user's own."""
    try:
        load_extensions(read_extensions(extensions, Path(), "extensions"))
        return describe(model)
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:  # each class of transformers raises its own for a shape it cannot take
        while error.__cause__ is not None:  # strict configurations wrap what their own checks raise
            error = error.__cause__
        return {"error": _line(error)}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def describe(model: dict) -> dict:
    """Count what planning needs of a model section: parameters by part, widths, experts, and how weights are drawn."""
    built, config = build_on_meta(model)
    tensors, head = list(parameters_by_part(built)), _head(built)
    experts = any(part == "experts" for part, *_ in tensors)
    # the number of heads, times the mean width of a head's keys and values
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parts = [getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    # Latent attention: keys have the first two sizes, values the last, and a mean is taken of the two.
    latent = config.num_attention_heads * sum(parts) // 2 if all(parts) else None
    return {
        "tensors": tensors,
        "layers": config.num_hidden_layers,
        "attention_width": latent or config.num_attention_heads * size,
        "tied": head is built.get_input_embeddings().weight,
        "head": 0 if head is None else head.numel(),
        "normed_heads": any(
            re.search(r"[._][qk]_(layer)?norm", name) for name, _ in built.named_parameters()
        ),
        "experts": _first(config, EXPERTS) if experts else 0,
        "chosen_experts": _first(config, CHOSEN) if experts else 0,
        "faults": drawing_faults(built),
        "kept": kept_or_why_not(built, model),
    }


def build_on_meta(model: dict) -> tuple[PreTrainedModel, PreTrainedConfig]:
    """Build the model without storage, and find the config of its text part."""
    config = AutoConfig.for_model(**{"use_cache": False, **model})
    if model_extension(model["model_type"]):
        check_model_keys(model, type(config))
    with torch.device("meta"), no_init_weights():
        built = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    # So that tied weights count once.
    built.tie_weights()
    return built, built.config.get_text_config()


def parameters_by_part(built: PreTrainedModel) -> Iterator[tuple[str, int, int | None, int | None, str]]:
    """Yield (part, elements, layer or None, rows and columns, name) of every parameter once.

    They come in the order of the modules. Rows and columns are added up over all its matrices; None if it is no matrix.
    """
    head, seen = _head(built), set()
    has_experts = any(".experts." in f"{name}." for name, _ in built.named_parameters())
    for module_name, module in built.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:  # tied ones have two names
                seen.add(id(parameter))
                is_head = parameter is head and not isinstance(module, nn.Embedding)
                part = "head" if is_head else _part(module_name, name, module, has_experts)
                layer = re.search(r"\.(\d+)(\.|$)", module_name)
                place = int(layer[1]) if layer else None
                full_name, sides = f"{module_name}.{name}" if module_name else name, None
                if parameter.ndim >= 2:
                    rows, columns = parameter.shape[-2:]
                    # Experts may be stacked: [experts, rows, columns].
                    sides = parameter.numel() // (rows * columns) * (rows + columns)
                yield part, parameter.numel(), place, sides, full_name


def _part(module_name: str, name: str, module: nn.Module, has_experts: bool) -> str:
    """Name one of sizes.PartSizes; biases of linear layers are marked, since no token is multiplied with them."""
    kind, path = type(module).__name__.lower(), f"{module_name}.{name}".lower()
    if isinstance(module, nn.Embedding):
        return "embedding"
    if "norm" in kind or re.search(r"(^|[._])(ln|norm)(_|\.|\d|$)", path):
        return "norms"
    if ".experts." in path:
        return "experts"
    last = module_name.rpartition(".")[2]
    # Without experts a module of such a name is a part of the MLP.
    if has_experts and last in ("gate", "router", "classifier"):
        return "router"
    part = "attention" if "attn" in path or "attention" in path else "mlp"
    return f"{part} bias" if name.endswith("bias") else part


def _head(built: PreTrainedModel) -> torch.Tensor | None:
    module = built.get_output_embeddings()
    return getattr(module, "weight", None)


LENGTHS_OF_LOOPS = (64, 128, 192)
"""Tokens of the sequences that are counted if Python goes from token to token, or needs many steps for each."""
MANY_SAVES = 600
PRECISIONS = {
    "16 bit": (torch.bfloat16, False),
    "autocast": (torch.float32, True),
    "fp32": (torch.float32, False),
}
"""Name -> (type of the weights, whether products cast their inputs to 16 bit)."""
IN_FP32 = {
    "softmax",
    "log_softmax",
    "layer_norm",
    "pow",
    "rsqrt",
    "exp",
    "softplus",
    "cumsum",
    "prod",
    "norm",
}
"""What autocast computes in fp32 on a GPU, and not on a processor."""
OUTSIDE, LOGITS = "outside", "logits"


def kept_or_why_not(built: PreTrainedModel, model: dict) -> dict:
    """Return `kept_for_backward`, and under `estimated` why planning can only estimate it, if so."""
    files = {sys.modules[type(module).__module__] for module in built.modules()}
    why = None
    if any(hasattr(file, name) for file in files for name in OWN_KERNELS):
        why = "counted without the kernels that its linear layers have on a GPU"
    try:
        return {**kept_for_backward(built, model), "estimated": why}
    # whatever a class of the user's own raises if its tensors hold no numbers
    except Exception as error:
        return {
            "estimated": f"its matrices' inputs and results, as it does not run on fake tensors ({_line(error)})"
        }


def kept_for_backward(built: PreTrainedModel, model: dict) -> dict:
    """Measure what a training forward pass keeps for the backward pass: bytes of each kind of layer, and outside.

    Nothing is computed: weights and tokens are fake tensors. Each number is measured for one sequence of a quarter, of
    half and of the full length, and for two of the latter two (planning/memory/activations.py, `_at`).
    """
    walk, longest = Walk(built, model.get("attn_implementation")), max(4, _longest(built))
    saves = [walk.measure("fp32", 1, min(longest, length)).saves for length in (8, 16)]
    lengths = (longest // 4, longest // 2, longest)
    if saves[0] != saves[1] or saves[0] > MANY_SAVES:
        lengths = min(lengths, LENGTHS_OF_LOOPS)
    short, half, full = lengths
    found = {}
    for precision in PRECISIONS:
        cases = ((1, short), (1, half), (2, half), (1, full), (2, full))
        counts = [walk.measure(precision, *case).sizes for case in cases]
        keys = dict.fromkeys(key for count in counts for key in count)
        found[precision] = {key: [count[key] for count in counts] for key in keys}
    return {"lengths": list(lengths), "kinds": walk.kinds, "bytes": found}


def _longest(built: PreTrainedModel) -> int:
    return getattr(built.config.get_text_config(), "max_position_embeddings", None) or LENGTHS_OF_LOOPS[-1]


class Count:
    """What one forward pass keeps."""

    def __init__(self) -> None:
        self.sizes: Counter = Counter()
        """Bytes by place (`outside`, `logits`, the number of a kind of layers) and what they are."""
        self.saves = 0
        """Tensors that were saved."""


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
            head.register_forward_hook(self._after_head)
        self.fakes: dict[str, dict[int, torch.Tensor]] = {}
        self.held = [
            (held, name, tensor)
            for module in built.modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]

    def measure(self, precision: str, rows: int, length: int) -> Count:
        """Return what `rows` sequences of `length` tokens keep."""
        casts, fakes = PRECISIONS[precision][1], self._weights_in(precision)
        self.place, self.done, self.inputs, self.saved = OUTSIDE, {}, {}, []
        self.shared, self.given, count = {}, [], Count()
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
        count.saves, seen = len(self.saved), set(self.known)
        for reference, place in self.saved:
            saved = reference()
            if saved is not None and (key := _storage(saved.tensor)) not in seen:
                seen.add(key)
                self._add(count.sizes, OUTSIDE if key in self.shared else place, saved.tensor)
        del given
        for key, size in self.shared.items():
            count.sizes["arguments"] += size * (key not in seen)
        for kind, hidden in self.inputs.items():
            count.sizes[f"{kind} input"] = hidden.untyped_storage().nbytes()
        return count

    def _weights_in(self, precision: str) -> list[torch.Tensor]:
        """Put fake weights and buffers of a precision into the model."""
        if precision not in self.fakes:
            self.fakes[precision] = {
                id(tensor): self._fake(tensor, PRECISIONS[precision][0]) for _, _, tensor in self.held
            }
        for held, name, tensor in self.held:
            held[name] = self.fakes[precision][id(tensor)]
        return list(self.fakes[precision].values())

    def _fake(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # DeepSpeed casts buffers with the weights
        dtype = dtype if tensor.is_floating_point() else tensor.dtype
        fake = FakeTensor(
            self.mode, torch.empty_like(tensor, dtype=dtype, device="meta"), torch.device("cpu")
        )
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def _save(self, tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor)
        self.saved.append((weakref.ref(saved), self.place))
        return saved

    def _add(self, sizes: Counter, place: str, tensor: torch.Tensor) -> None:
        size = tensor.untyped_storage().nbytes()
        sizes[place] += size
        if place in (OUTSIDE, LOGITS):
            return
        sizes[f"{place} largest"] = max(sizes[f"{place} largest"], size)
        *rows, width = self.inputs[place].shape
        is_dense = tensor.ndim > 2 or (tensor.ndim == 2 and len(tensor) == prod(rows))
        # heads and inner values; experts have rows of their own
        if tensor.ndim > 3 or (is_dense and tensor.shape[-1] not in (1, width)):
            sizes[f"{place} split"] += size

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

    def _after_head(self, *_) -> None:
        self.place = LOGITS


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
            return Grouped.apply(*args)
        if function is nn.functional.dropout:
            return self._dropout(*args, **kwargs)
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
        return Attention.apply(query, key, value, mask)

    def _dropout(self, input, p=0.5, training=True, inplace=False):
        return torch.native_dropout(input, p, training)[0] if training and p else input


def _wide(value):
    is_narrow = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.float() if is_narrow else value


class Attention(torch.autograd.Function):
    """Keeps what flash and memory-efficient kernels keep: an fp32 number for each head and token, and no pairs."""

    @staticmethod
    def forward(ctx, query, key, value, mask):
        *rows, heads, length, _ = query.shape
        given = query.new_empty(*rows, length, heads, value.shape[-1]).transpose(-2, -3)
        sums = query.new_empty(*rows, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, given, sums, *([] if mask is None else [mask]))
        return given

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


class Grouped(torch.autograd.Function):
    """A product of tokens with the weights of their experts, of any type; it keeps both."""

    @staticmethod
    def forward(ctx, tokens, weights, *_):
        ctx.save_for_backward(tokens, weights)
        return tokens.new_empty(len(tokens), weights.shape[-1])

    backward = Attention.backward


def _first(config: PreTrainedConfig, names: tuple[str, ...]) -> int:
    """Read the first of these keys that is a number; 0 if there is none."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value), 0)


if __name__ == "__main__":
    main()
