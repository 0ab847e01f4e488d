"""Translate the names and the layout in which Meta, torchtitan and torchtune keep a Llama's weights.

They rotate the pairs (0, 1), (2, 3), ... of a head's dimensions; transformers rotates dimension i together with i +
half of the head. So the rows of queries and keys are in another order, and everything else differs in its name alone.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from pretraining.errors import UserError
from pretraining.model.weight_files import Entry, WeightFiles
from pretraining.outside.files import COUNT, read_json_value
from pretraining.recipe.model import Model
from pretraining.schema import check, problem

KEY = "model.initial_weights"
TYPES = ("llama", "mistral")
"""Model types that are saved so, and whose parameters are called like Llama's in transformers."""
_MARKS = re.compile(r"(^|\.)tok_embeddings\.weight$")
_WRAPPED = re.compile(r"^((model|module|state_dict|_orig_mod)\.)*")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "norm.scale": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Meta's and torchtitan's names, then torchtune's.
_INSIDE = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attn.q_proj.weight": "self_attn.q_proj.weight",
    "attn.k_proj.weight": "self_attn.k_proj.weight",
    "attn.v_proj.weight": "self_attn.v_proj.weight",
    "attn.output_proj.weight": "self_attn.o_proj.weight",
    "sa_norm.scale": "input_layernorm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "mlp.w1.weight": "mlp.gate_proj.weight",
    "mlp.w2.weight": "mlp.down_proj.weight",
    "mlp.w3.weight": "mlp.up_proj.weight",
}
_COMPUTED = ("rope.freqs", "freqs_cis")
"""How names end of tables that Meta and torchtitan save and transformers computes."""


class TranslatedFiles(WeightFiles):
    """Weights of another library under transformers' names, and in its order of rows.

    files: as they were saved. head_size: of queries and keys.
    """

    def __init__(self, files: WeightFiles, head_size: int) -> None:
        self.folder, self.is_mapped = files.folder, files.is_mapped
        self._files, self._head_size = files, head_size
        self._saved = {
            transformers_name(name): name for name in files.entries if not name.endswith(_COMPUTED)
        }
        self.entries: dict[str, Entry] = {ours: files.entries[saved] for ours, saved in self._saved.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Return the whole tensor, with transformers' order of rows."""
        whole = self._files.tensor(self._saved[name])
        return whole[self._rows(name)] if _is_rotated(name) else whole

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return the elements [start, stop) of the flattened tensor."""
        if not _is_rotated(name):
            return self._files.read(self._saved[name], start, stop)
        width = self.entries[name].shape[1]
        first, last = start // width, -(-stop // width)
        # rows that follow each other here are every second one there: all of the heads they belong to are read
        size = self._head_size
        low, high = first // size * size, -(-last // size) * size
        heads = self._files.read(self._saved[name], low * width, high * width).view(-1, width)
        rows = heads[self._rows(name)[first:last] - low]
        return rows.reshape(-1)[start - first * width : stop - first * width]

    def _rows(self, name: str) -> torch.Tensor:
        """Return the saved row of each row of transformers'."""
        of_head = torch.arange(self._head_size).view(-1, 2).T.reshape(-1)
        firsts = torch.arange(0, self.entries[name].shape[0], self._head_size)
        return (firsts[:, None] + of_head).reshape(-1)

    def release(self) -> None:
        self._files.release()


def transformers_name(saved: str) -> str:
    """Translate the name of a weight; one that is not a Llama's stays."""
    name = _WRAPPED.sub("", saved)
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    layer = _LAYER.fullmatch(name)
    if layer is None or layer[2] not in _INSIDE:
        return saved
    return f"model.layers.{layer[1]}.{_INSIDE[layer[2]]}"


def _is_rotated(name: str) -> bool:
    return name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight"))


def translated(files: WeightFiles, model: Model, name: str, where: str) -> WeightFiles:
    """Return the files under transformers' names if another library has named them; else return them as they are.

    Raises:
        UserError: they are in parts, or their params.json describes another model.
    """
    if model.model_type not in TYPES or not any(map(_MARKS.search, files.entries)):
        return files
    if len(list(files.folder.glob("consolidated.*.pth"))) > 1:
        what = (
            f"{name} is cut for several GPUs (consolidated.00.pth and others), of which each file has slices"
        )
        raise problem(where, KEY, f"{what}; name the same model in Hugging Face's format")
    check_params(files.folder, model, name, where)
    ours = AutoConfig.for_model(**model)
    head_size = getattr(ours, "head_dim", None) or ours.hidden_size // ours.num_attention_heads
    return TranslatedFiles(files, head_size)


_PARAMS = {
    "type": "object",
    "required": ["n_heads"],
    "properties": {
        "n_heads": COUNT,
        "n_kv_heads": {"anyOf": [COUNT, {"type": "null"}]},
        **{key: {"type": "number"} for key in ("norm_eps", "rope_theta")},
    },
}


def check_params(folder: Path, model: Model, name: str, where: str) -> None:
    """Raise `UserError` for the first value of Meta's params.json by which the weights are of another model.

    Sizes are left to the weights' shapes, from which heads cannot be seen.
    """
    path = folder / "params.json"
    if not path.is_file():
        return
    try:
        params = check(read_json_value(path), _PARAMS, str(path))
    except (OSError, ValueError, UserError) as error:
        raise problem(where, KEY, f"{path}: cannot be read ({error})") from error
    heads = params["n_heads"]
    ours = AutoConfig.for_model(**model).to_dict()
    rope = ours.get("rope_parameters") or {}
    # Meta's own defaults, for keys that the first Llamas do not have
    theta = float(params.get("rope_theta", 10_000.0))
    pairs: list[tuple[str, Any, Any]] = [
        ("num_attention_heads", ours["num_attention_heads"], heads),
        ("num_key_value_heads", ours["num_key_value_heads"], params.get("n_kv_heads") or heads),
        ("rms_norm_eps", ours["rms_norm_eps"], params.get("norm_eps", 1e-5)),
        ("rope_parameters.rope_theta", float(rope.get("rope_theta", 10_000.0)), theta),
    ]
    if params.get("use_scaled_rope"):
        pairs.append(("rope_parameters.rope_type", rope.get("rope_type"), "llama3"))
    differing = [pair for pair in pairs if pair[1] != pair[2]]
    if differing:
        key, mine, its = differing[0]
        what = f"is {json.dumps(mine)}, and the weights of {name} were trained with {json.dumps(its)}"
        remedy = " ".join(f"--set {shlex.quote(f'model.{k}={json.dumps(v)}')}" for k, _, v in differing)
        raise problem(where, f"model.{key}", f"{what}; {remedy}")
