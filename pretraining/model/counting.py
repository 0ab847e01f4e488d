"""Count a model by building it on the meta device, which takes no memory: for types that no formula describes.

This is a separate program, which planning/shapes.py starts. It reads a recipe's `model` section on stdin and prints one
JSON object, the facts or {"error": one line}. Its argument is the module of a model of the user's own. It imports
neither DeepSpeed nor the Trainer, so that it answers sooner.

It also sees which parameters the rule of each module draws (`traced`); initial_weights.py draws by that.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__" and len(sys.argv) == 1:
    # transformers imports these where they are installed, in a second, and no class of its own is built with them
    sys.modules.update(dict.fromkeys(("datasets", "scipy", "torchao")))

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from pretraining.errors import UserError
from pretraining.extend import check_model_keys, load_extensions, model_extension, read_extensions
from pretraining.recipe.model import EXPERTS, without_padding
from pretraining.upstream.saved_tensors import PRECISIONS, Walk
from pretraining.upstream.transformers import RuleTrace, StandIn, draw_module, forget_drawn

CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def main() -> None:
    # their kernels run on a GPU alone: a layer that can use them has a path of torch's operators too
    sys.modules.update(dict.fromkeys(KERNELS))
    answer_on_stdin(describe)


KERNELS = ("fla", "mamba_ssm", "causal_conv1d")
OWN_KERNELS = ("use_kernel_func_from_hub_with_fallback", "is_fast_path_available")
"""What a file of transformers imports or has if its layers can use them."""


def answer_on_stdin(measure: Callable[[dict], dict]) -> None:
    """Print what `measure` finds of the model section on stdin; the arguments are modules of the user's own."""
    print(json.dumps(counted(json.load(sys.stdin), sys.argv[1:], measure)))


def counted(
    model: dict, extensions: Sequence[str] = (), measure: Callable[[dict], dict] | None = None
) -> dict:
    """Return the facts of `describe`, or of another measure, or {"error": one line}.

    extensions: modules of the user's own.
    """
    try:
        load_extensions(read_extensions(extensions, Path(), "extensions"))
        return (measure or describe)(model)
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
    config = AutoConfig.for_model(**{"use_cache": False, **without_padding(model), **model})
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
    """Name one of shapes.PARTS; biases of linear layers are marked, since no token is multiplied with them."""
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


LENGTHS_OF_LOOPS = (128, 192, 256)
"""Tokens of the sequences that are counted if Python goes from token to token, or from one chunk of 64 to the next;
of a single chunk less is kept."""


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
    config = built.config.get_text_config()
    longest = max(4, getattr(config, "max_position_embeddings", None) or LENGTHS_OF_LOOPS[-1])
    walk = Walk(built, model.get("attn_implementation"))
    saves = [walk.measure("fp32", 1, min(longest, length))[1] for length in LENGTHS_OF_LOOPS[::2]]
    lengths = (longest // 4, longest // 2, longest)
    if saves[0] != saves[1]:
        lengths = min(lengths, LENGTHS_OF_LOOPS)
    short, half, full = lengths
    found = {}
    for precision in PRECISIONS:
        cases = ((1, short), (1, half), (2, half), (1, full), (2, full))
        counts = [walk.measure(precision, *case)[0] for case in cases]
        keys = dict.fromkeys(key for count in counts for key in count)
        found[precision] = {key: [count[key] for count in counts] for key in keys}
    return {"lengths": list(lengths), "kinds": walk.kinds, "bytes": found}


def _first(config: PreTrainedConfig, names: tuple[str, ...]) -> int:
    """Read the first of these keys that is a number; 0 if there is none."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value), 0)


@torch.no_grad()
def drawing_faults(built: PreTrainedModel) -> list[str]:
    """Find parameters that `initialise_weights` would not draw, or would draw from too far; one sentence each.

    A matrix that no module draws would keep the bytes that its memory had before.

    built: on the meta device.
    """
    faults, drawn, names = [], set(), {each: name for name, each in built.named_parameters()}
    for parameter in built.parameters():
        forget_drawn(parameter)
    for _, module, _, trace in traced(
        built, lambda each: torch.empty_like(each, dtype=torch.float32, device="meta")
    ):
        drawn |= trace.written
        # No other parameters have memory while the rule of a module runs.
        far = trace.written.difference(parameters_near(module))
        by = type(module).__name__
        faults += [
            f"{names[each]} is drawn from two levels above it, by {by}" for each in names if each in far
        ]
    # Biases and norms may be left to their constructors, which fill them with zeros and ones.
    matrices = ((key, parameter) for key, parameter in built.named_parameters() if parameter.ndim >= 2)
    return faults + [f"{key} is drawn by no module" for key, parameter in matrices if parameter not in drawn]


def traced(
    model: PreTrainedModel, on_meta: Callable[[nn.Parameter], torch.Tensor]
) -> Iterator[tuple[str, nn.Module, PreTrainedModel, RuleTrace]]:
    """Yield (name, module, the model whose rule it is, what the rule does to the parameters), every child first.

    on_meta: returns a tensor of the meta device of a parameter's whole shape.
    """
    with torch.random.fork_rng(devices=[]):  # a rule may draw into tensors of its own
        for name, module, owner in children_first(model):
            everything = {parameter: parameter for parameter in module.parameters()}
            with standing_in(module, on_meta) as stand_ins, RuleTrace({**everything, **stand_ins}) as trace:
                draw_module(owner, module)
            yield name, module, owner, trace


def children_first(
    module: nn.Module, name: str = "", owner: PreTrainedModel | None = None
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yield (name, module, the PreTrainedModel whose rule initialises it), every child before its parent."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child_name, child in module.named_children():
        yield from children_first(child, f"{name}.{child_name}" if name else child_name, owner)
    yield name, module, owner


def parameters_near(module: nn.Module) -> list[nn.Parameter]:
    """List what a module's rule may draw: its own parameters and its children's."""
    return list(dict.fromkeys(parameter for _, _, parameter in _places_near(module)))


def _places_near(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    modules = (module, *module.children())
    return [(each, *named) for each in modules for named in each.named_parameters(recurse=False)]


@contextmanager
def standing_in(
    module: nn.Module, tensor_for: Callable[[nn.Parameter], torch.Tensor]
) -> Iterator[dict[nn.Parameter, StandIn]]:
    """Put {parameter: another one, of the tensor given} in the place of all that the module's rule may draw."""
    places = _places_near(module)
    stand_ins = {parameter: StandIn(tensor_for(parameter)) for _, _, parameter in places}
    for place, name, parameter in places:
        setattr(place, name, stand_ins[parameter])
    try:
        yield stand_ins
    finally:
        for place, name, parameter in places:
            setattr(place, name, parameter)


if __name__ == "__main__":
    main()
