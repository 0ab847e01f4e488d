"""The `model` section: which types a recipe may name, what their keys are called, and what fits together."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, update_wrapper
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pretraining.errors import UserError, did_you_mean, nearest
from pretraining.extend import MODEL_KEYS, model_extension
from pretraining.outside.schema import Wrong, check, display_path, problem
from pretraining.recipe.section import schema_file
from pretraining.runtime.answers import answered, ask
from pretraining.runtime.installation import PACKAGE

EXACT = ("gpt2", "llama", "mixtral", "qwen3", "qwen3_moe")
"""Types that are counted by formula; what holds for them is tested for each. One more needs its keys in SHAPE_KEYS
(recipes/generate_schema.py), its parameters and widths in planning/shapes.py, what its layers keep in
planning/memory/activations.py, its kernels in planning/constants.py and tables/kernels.json (measured by
benchmarks/kernel_factors.py), and if it can have them, muP (FAMILIES in recipe/optimizer.py) and Megatron's layouts
(planning/parallelism.py)."""
FILE = Path(__file__).with_name("model_types.json")
MEASURED = Path(__file__).with_name("abilities.json")
MEASURING = (
    "model/abilities.py",
    "model/attention.py",
    "model/build.py",
    "model/cross_entropy.py",
    "model/loss.py",
    "upstream/transformers.py",
)
"""Files of the package by which the answer about a class of the user's own is measured."""
GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
ATTENTIONS = ("eager", "sdpa", "sdpa_causal", "torch_varlen", *FLASH, "flex_attention")
"""What `model.attn_implementation` names, beside a kernel of the hub (kernels-community/...)."""
CROSSES_DOCUMENTS = ("sdpa_causal",)
"""Those of them that cannot keep documents apart."""
YARN = ("attention_factor", "beta_fast", "beta_slow")
ROPE = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (("factor",), (*YARN, "mscale", "mscale_all_dim", "truncate")),
    "longrope": (("short_factor", "long_factor"), ("attention_factor", "factor")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "proportional": (("rope_theta",), ()),
}
"""{model.rope_parameters.rope_type: (keys it needs, keys it may have beside them)}, as transformers checks them."""
OLD_ROPE = ("rope_scaling", "rope_theta", "partial_rotary_factor")
"""What config.json had in place of `rope_parameters` before transformers 5."""
ROPE_ALWAYS = ("rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configuration classes call a layer's number of experts."""

LOGIT_CAP = "final_logit_softcapping"
"""What configuration classes call the bound that the logits of Gemma 2 and others stay under."""
ROUTER_COEFFICIENT = "router_aux_loss_coef"
"""What configuration classes call the weight of the loss that balances experts."""
BY_MICRO_BATCH = ("aria_text", "cohere2_moe", "deepseek_v2", "hunyuan_v1_moe", "zaya")
"""Mixtures without it whose routers have no correction bias either: the loss of `loss.balance_weight` balances them."""


Answer = TypeVar("Answer")


class OnceASection(Generic[Answer]):
    """Keep what a function says of a model section, which a search asks thousands of times."""

    def __init__(self, function: Callable[[dict], Answer]):
        update_wrapper(self, function)
        # a dict cannot be a key; the function gets a copy of the section
        self.kept = cache(lambda text: function(json.loads(text)))
        self.cache_clear = self.kept.cache_clear

    def __call__(self, model: dict) -> Answer:
        # sorted: equal sections are equal texts
        return self.kept(json.dumps(model, sort_keys=True))


def is_exact(model: dict) -> bool:
    """Whether the model section is of a type that planning counts by formula."""
    return model["model_type"] in EXACT


def has_experts(model: dict) -> bool:
    """Return whether routers of this model of transformers send each token to some of several experts."""
    return _has_experts(model_with_defaults(model))


def _has_experts(values: dict) -> bool:
    key = experts_key(values)
    if key is None or model_extension(values["model_type"]) is not None:
        return False
    return values[key] > 1 and values.get("is_moe", True)  # Doge is a mixture only where it says so


def experts_key(values: dict) -> str | None:
    """Return the key that holds a layer's number of experts; None if a section, over its defaults, has none."""
    return next((key for key in EXPERTS if values.get(key)), None)


def why_not(model: dict, ability: str) -> str | None:
    """Return why a model of this type lacks an ability; None if it has it.

    model/abilities.py measures what each ability is, on a small model of the type; for a class of the user's own at
    its first use, with this section's other keys.
    """
    kind = model["model_type"]
    if own := model_extension(kind):
        # abilities.json has it for the classes of the recipes here, as long as their modules stay as they are
        found = _json_of(MEASURED)["own"].get(own.digest) or measured_by_itself(model)
    else:
        found = _json_of(MEASURED)["types"].get(kind, {})
    if ability not in found:
        return f"was not measured for {kind}"
    # measured without: the type may do so with them
    values = model_with_defaults(model)
    if ability == "fused" and (cap := values.get(LOGIT_CAP)):
        return f"{LOGIT_CAP} is {cap:g}, and a fused loss never has the logits"
    if ability == "fused" and values.get("lm_head_bias"):
        return "lm_head_bias is true, and a fused loss multiplies with the head's weight alone"
    # transformers 5.24 gives its kernels no window
    if ability == "apart torch_varlen" and kind == "qwen2_moe" and values.get("use_sliding_window"):
        return "use_sliding_window is true, and its layers have no window in this kernel"
    return found[ability] and f"does not hold for {kind} ({found[ability]})"


def why_not_apart(model: dict, attention: str | None) -> str | None:
    """Return why an attention does not keep the documents of a block apart; None: why no attention of transformers."""
    if attention is None:
        reasons = [why_not(model, f"apart {name}") for name in ("sdpa", "eager")]
        return None if None in reasons else reasons[0]
    # flash-attn's kernels get the same borders, and flex_attention the same mask
    alike = {**dict.fromkeys(FLASH, "torch_varlen"), "flex_attention": "sdpa"}
    return why_not(model, f"apart {alike.get(attention, attention)}")


def measured_by_itself(model: dict) -> dict[str, str | None]:
    """Measure a class of the user's own, with few layers, words and positions, in a process; keep the answer here.

    `UserError` if its module does not run.
    """
    sizes = {"vocab_size": 96, "max_position_embeddings": 32}
    if not any(isinstance(value, list) for value in model.values()):  # which may have an entry for each layer
        sizes["num_hidden_layers"] = 2
    section = {**model, **{key: min(size, model[key]) for key, size in sizes.items()}}
    section.pop("attn_implementation", None)
    return _measured_section(section)


@OnceASection
def _measured_section(model: dict) -> dict[str, str | None]:
    own, section = model_extension(model["model_type"]), json.dumps(model, sort_keys=True)
    code = [(PACKAGE / name).read_text(encoding="utf-8") for name in MEASURING]
    versions = [version(name) for name in ("torch", "transformers")]
    depends_on, module = (*versions, own.digest, *code, section), "pretraining.model.abilities"
    answer = answered("abilities-", depends_on, "abilities", lambda: ask_of_model(module, section))
    if "error" in answer:
        raise UserError(f"model: {display_path(own.path)}: {answer['error']}")
    return answer["abilities"]


def ask_of_model(module: str, section: str) -> dict:
    """Ask a module of this package about a model section, in a process that loads the module of its class first."""
    own = model_extension(json.loads(section)["model_type"])
    # a small model needs no threads
    program, variables = ["-m", module], {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE.parent)}
    if own:
        program += [str(own.path.absolute()) if own.is_file else own.module]
        variables["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), *filter(None, sys.path)])
    return ask(program, section, **variables)


def dropouts(model: dict) -> list[str]:
    """Return the keys of a section, over its defaults, that drop out something."""
    return [key for key, value in model.items() if "drop" in key and isinstance(value, float) and value]


@cache
def _json_of(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def other_model_types() -> dict:
    """model_types.json, generated from the installed transformers: {"types": ..., "refused": ...}."""
    return _json_of(FILE)


@cache
def known_types() -> dict[str, dict]:
    """Return {type of transformers that a recipe may name: {"properties", "required", "names"}}, the exact ones first.

    names: what the type calls `hidden_size`, `num_hidden_layers` and so on, where it differs.
    """
    exact = {name: {"names": {}, **entry} for name, entry in schema_file()["$defs"].items()}
    exact["gpt2"]["names"] = GPT2_NAMES
    return exact | other_model_types()["types"]


def type_entry(model_type: str) -> dict | None:
    """What is known of a type: {"properties", "required", "names"}; None if there is no such type.

    Of a model of the user's own it is what every recipe must say of it; its class has the other keys.
    """
    if model_extension(model_type) is None:
        return known_types().get(model_type)
    properties = {name: {"type": "integer", "minimum": 1} for name in MODEL_KEYS}
    return {"properties": properties, "required": list(MODEL_KEYS), "names": {}, "of_user": True}


def own_key(model: dict, name: str) -> str:
    """What the model's type calls `hidden_size`, `num_hidden_layers` and so on."""
    return type_entry(model["model_type"])["names"].get(name, name)


def value_of(model: dict, name: str) -> Any:
    return model.get(own_key(model, name))


def refuse_names_of_others(model: object, where: str) -> None:
    """Raise `UserError` for a key that another type of model has, with this type's own name for the same.

    `n_layer` of a Llama is `num_hidden_layers`. A section without a known type is left to the checks that follow.
    """
    if not isinstance(model, dict) or model.get("model_type") not in list(known_types()):
        return  # a type of the user's own has no other names
    # GPT-2 alone has names of its own among the exact types
    common = {name: key for key, name in GPT2_NAMES.items()}
    for key in model if is_exact(model) else model.keys() - properties_of(model).keys():
        if (own := own_key(model, common.get(key, key))) != key:
            raise problem(where, f"model.{key}", f"unknown key{did_you_mean([f'model.{own}'])}")


def read_config(model: Any) -> tuple[Any, str]:
    """Read a published config.json in the place of a model section: as it is today, and a sentence about the changes.

    What shapes no model is left out, and rotary positions get the names of today.
    """
    types, known = known_types(), other_model_types()
    if not isinstance(model, dict) or model.get("model_type") not in list(types):
        return model, ""
    own, nothing = types[model["model_type"]]["properties"], known["left_out"]
    others = {key: value for key, value in model.items() if key not in own}
    gone = [key for key, value in others.items() if key[:1] == "_" or nothing.get(key, ...) in (None, value)]
    section, said = {key: value for key, value in model.items() if key not in gone}, []
    if gone:
        said.append(f"{', '.join(gone)} left out, which shape no model")
    # of any other kind it is refused by its name
    readable = all(isinstance(section.get(key) or {}, dict) for key in ("rope_scaling", "rope_parameters"))
    old = [key for key in OLD_ROPE if key in others]
    if old and readable and model["model_type"] in known["old_rope"]:
        section = with_rope_parameters(section, old)
        said.append(f"{', '.join(old)} read as rope_parameters {json.dumps(section['rope_parameters'])}")
    return section, "; ".join(said)


def with_rope_parameters(section: dict, old: Sequence[str]) -> dict:
    """Put the keys `old` of rotary positions into `rope_parameters`.

    As `PreTrainedConfig.convert_rope_params_to_dict` of transformers 5.24 does, for the types that leave it to that.
    """
    beside = {key: section[key] for key in old if key != "rope_scaling" and section.get(key) is not None}
    inside = dict(section.get("rope_scaling") or section.get("rope_parameters") or {})
    kind = inside.pop("type", "default")
    rest = {key: value for key, value in section.items() if key not in old}
    return {**rest, "rope_parameters": {"rope_type": kind, **beside, **inside}}


def properties_of(model: dict) -> dict:
    """Return {key: schema} of what a section of this type may have."""
    return type_entry(model["model_type"])["properties"]


def model_with_defaults(model: dict) -> dict:
    """A model section over its configuration class's own defaults, as the schemas record them.

    But for two: a mixture returns its routers' scores, by which it is balanced and its load is counted; and no text is
    padded here (`without_padding`).
    """
    defaults = {key: value["default"] for key, value in properties_of(model).items() if "default" in value}
    if "pad_token_id" in defaults:
        defaults |= without_padding(model)
    values = {**defaults, **model}
    if "output_router_logits" not in model and _has_experts(values):
        values["output_router_logits"] = True
    return values


def checked_model(model: dict, where: str) -> dict:
    """The model section, its type known and every key one of its class's.

    `UserError` for an unknown type or key, with the nearest; for a type that does not train here, with the reason.
    """
    if is_exact(model):
        return model  # the recipe's own schema has checked it
    kind, others = model["model_type"], other_model_types()
    if model_extension(kind) is None:
        if kind in others["refused"]:
            what = f"is {kind!r}, which does not train here: {others['refused'][kind]}"
            raise problem(where, "model.model_type", what)
        known = list(known_types())
        if kind not in known:
            near = f"; known are {', '.join(EXACT)}, others of transformers, and your own, from a module in extensions"
            what = f"is {kind!r}, which is no model type{nearest(kind, known, 3) or near}"
            raise problem(where, "model.model_type", what)
    # Its configuration class would take any key without a word.
    entry = type_entry(kind)
    schema = {"type": "object", "properties": entry["properties"], "required": entry["required"]}
    # a class of the user's own is asked for its keys when it is counted
    return check(model, {**schema, "additionalProperties": "of_user" in entry}, where, "model", schema_file())


class Model(dict):
    """`model_type` and that configuration class's keyword arguments, verbatim: a dict of what the recipe gives.

    Attributes are what every type has, under the names that most of them use.
    """

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    vocab_size: int
    """Rows of the embedding."""

    if not TYPE_CHECKING:  # which takes no other names than these

        def __getattr__(self, name: str) -> Any:
            if name not in Model.__annotations__:
                raise AttributeError(name)
            return self[name] if name in self else value_of(self, name)

    @property
    def is_exact(self) -> bool:
        return is_exact(self)

    def with_defaults(self) -> "Model":
        return Model(model_with_defaults(self))

    def check(self) -> Wrong:
        """Yield the first key that does not fit another one, or that no model can be built with."""
        model = self.with_defaults()
        yield from _check_heads_and_experts(model)
        if self.is_exact and "rope_parameters" in model:
            yield from _check_rope(model)
        yield from _check_layer_types(model)
        # ids that the recipe names are rows of the embedding; others are the tokenizer's, and padding has none
        for key in SPECIAL_IDS:
            # eos_token_id may be a list
            for number in self[key] if isinstance(self.get(key), list) else [self.get(key)]:
                if number is not None and number >= self.vocab_size:
                    what = f"is {number}, beyond model.vocab_size {self.vocab_size}"
                    yield f"model.{key}", f"{what}; leave it out: the tokenizer has it"
        classes = model.get("unpadded_vocab_size")
        if classes is not None and classes != self.vocab_size:
            what = f"is {classes}, and the loss and samples are of all {self.vocab_size} ids; set it to that number"
            yield "model.unpadded_vocab_size", what
        if model.get("use_bidirectional_attention"):
            what = "is not false, and a token would see those that follow it, which it is to predict"
            yield "model.use_bidirectional_attention", f"{what}; leave it out, or set it to false"
        if self.get("num_mtp_layers"):
            what = f"is {self['num_mtp_layers']}, and nothing here trains layers that predict further tokens"
            yield "model.num_mtp_layers", f"{what}; leave it out, or set it to 0"
        name, key = model.get("attn_implementation"), "model.attn_implementation"
        # a name with a slash is a kernel of the hub
        if name is not None and name not in ATTENTIONS and "/" not in name:
            what = f"is {json.dumps(name)}, which is no attention{nearest(name, ATTENTIONS)}; known are"
            yield key, f"{what} {', '.join(ATTENTIONS)}, or leave it out"
        for key in ("attn_pdrop", "attention_dropout"):
            if name == "flex_attention" and model.get(key):
                yield f"model.{key}", "is not 0, and flex_attention has no dropout: set it to 0"


def without_padding(model: Mapping[str, Any]) -> dict[str, None]:
    """Return the keyword with which the type's class has no padding token; empty for a class that insists on one.

    The id that classes have of themselves is of their published tokenizer: here it is a token as others are, whose row
    of the embedding would stay at zero.
    """
    own = known_types().get(model["model_type"], {}).get("properties", {}).get("pad_token_id", {})
    return {} if own.get("type") == "integer" else {"pad_token_id": None}


def _check_heads_and_experts(model: dict) -> Wrong:
    """Sizes that divide each other; a token's experts are among those there are, whose groups are of one size (as
    DeepSeek-V3 routes)."""
    width_key, heads_key = own_key(model, "hidden_size"), own_key(model, "num_attention_heads")
    width, heads = model[width_key], model[heads_key]
    # Only some classes take a head_dim that the width does not follow from.
    must_divide = model["model_type"] in ("gpt2", "llama") or model.get("head_dim") is None
    if must_divide and width % heads:
        yield f"model.{heads_key}", f"is {heads}, which does not divide model.{width_key} {width}"
    key_value_heads = value_of(model, "num_key_value_heads") or heads
    if heads % key_value_heads:
        key = own_key(model, "num_key_value_heads")
        yield f"model.{key}", f"is {key_value_heads}, which does not divide model.{heads_key} {heads}"
    key = experts_key(model)
    if key is None:
        return
    experts, chosen, groups = model[key], model.get("num_experts_per_tok") or 1, model.get("n_group") or 1
    if chosen > experts:
        yield "model.num_experts_per_tok", f"is {chosen}, more than model.{key} {experts}"
    if experts % groups:
        yield "model.n_group", f"is {groups}, which does not divide model.{key} {experts}"
    if (chosen := model.get("topk_group") or 1) > groups:
        yield "model.topk_group", f"is {chosen}, more than model.n_group {groups}"
    if model["model_type"] == "qwen3_moe":
        keys = ("num_hidden_layers", "decoder_sparse_step", "mlp_only_layers")
        layers, step, dense = (model[key] for key in keys)
        # a mixture is every `decoder_sparse_step`th layer that is not in `mlp_only_layers`
        if not any((layer + 1) % step == 0 and layer not in (dense or ()) for layer in range(layers)):
            key = "mlp_only_layers" if step <= layers else "decoder_sparse_step"
            what = f"is {model[key]}, which leaves none of {layers} layers with experts"
            yield f"model.{key}", f"{what}; change it, or take model_type qwen3"


def _check_rope(model: dict) -> Wrong:
    """Rotary positions of a known kind, with the keys that it needs, on heads of an even size."""
    # as transformers derives it
    head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    if head_dim % 2:
        what = f"makes heads of {head_dim}, and rotary positions turn pairs: choose an even size of a head"
        yield "model.head_dim" if model.get("head_dim") else "model.num_attention_heads", what
    given, key = model.get("rope_parameters") or {}, "model.rope_parameters"
    for name, value in given.items():
        if value is None:
            yield f"{key}.{name}", "is null; leave it out"
    kind = given.get("rope_type", "default")
    if kind not in ROPE:
        yield f"{key}.rope_type", f"is {json.dumps(kind)}, not one of {', '.join(ROPE)}{nearest(kind, ROPE)}"
    needed, optional = ROPE[kind]
    for name in needed:
        if given.get(name) is None:
            yield f"{key}.{name}", f"is missing; rope_type {kind} needs it"
    for name in given:
        if name not in (*needed, *optional, *ROPE_ALWAYS):
            yield f"{key}.{name}", f"is no key of rope_type {kind}; leave it out"
    for name in needed if kind == "longrope" else ():
        # one factor for each pair that is turned
        if len(given[name]) != head_dim // 2:
            yield f"{key}.{name}", f"has {len(given[name])} numbers; half of a head needs {head_dim // 2}"
    if kind == "llama3" and (high := given["high_freq_factor"]) <= (low := given["low_freq_factor"]):
        yield f"{key}.high_freq_factor", f"is {high:g}; it must be greater than low_freq_factor {low:g}"


def _check_layer_types(model: dict) -> Wrong:
    """One kind of attention for every layer, a window where there is one to look back over."""
    given, key = model.get("layer_types"), "model.layer_types"
    if given is None:
        return
    layers = value_of(model, "num_hidden_layers")
    if len(given) != layers:
        what = f"has {len(given)} entries, and model.{own_key(model, 'num_hidden_layers')} is {layers}"
        yield key, f"{what}: name every layer's"
    if model["model_type"] != "qwen3":
        return
    for number, kind in enumerate(given):
        if kind not in ("full_attention", "sliding_attention"):
            yield f"{key}.{number}", f"is {json.dumps(kind)}; it must be full_attention or sliding_attention"
    if "sliding_attention" in given and not (model.get("use_sliding_window") and model.get("sliding_window")):
        yield key, "has sliding_attention, which needs model.use_sliding_window true and sliding_window"
