"""Read tensors by name, slice by slice, from a folder that some program wrote: safetensors, torch files, or DCP.

- safetensors: what transformers, torchtune and our own exports write, in one file or several with an index.
- torch files (`pytorch_model.bin`, `*.pt`, `*.pth`): read as data alone (`weights_only`), mapped and not copied.
- torch.distributed.checkpoint (`.metadata` and `*.distcp`): what torchtitan and others write; one tensor at a time.

`translated` turns the names and the layout of a Llama's weights as Meta, torchtitan and torchtune keep them into those
of transformers.
"""

import io
import json
import pickle
import re
import shlex
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from pretraining.errors import UserError, reason_of
from pretraining.outside.files import COUNT, NUMBER, inside, object_of, read_bytes, read_json_value
from pretraining.outside.schema import check, problem
from pretraining.recipe.model import Model
from pretraining.runtime.heartbeat import work_done

CHUNK = 1 << 20
"""Elements that are read at once."""
_MAPPED_BYTES = 1 << 24  # resident pages of mapped files stay below this, while tensors are read in chunks
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_NO_WEIGHTS = ("adapter_", "training_args", "optimizer", "scheduler", "rng_state", "recipe_state")
"""How files begin that lie beside weights and hold none: adapters, and the states of a trainer."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of types; weights of another one (fp8) have scales beside them, and cannot be read here."""


_UNREADABLE = (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError)
"""What the libraries raise at a damaged file."""


class Entry(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None: a type that cannot be trained."""


class WeightFiles:
    """The tensors of a folder.

    entries: {name: Entry}. is_mapped: whether `tensor` returns the pages of a file, which all ranks of a node share.

    Raises `UserError`: the folder has no weights, or a file that cannot be read.
    """

    is_mapped = True

    def __init__(self, folder: Path, paths: Iterable[Path]) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._served_bytes = 0
        self._opened: dict[Path, Any] = {}
        self._places: dict[str, Path] = {}
        for path in paths:
            try:
                for name, entry in self._list(path):
                    self.entries[name], self._places[name] = entry, path
            except FileNotFoundError:
                raise UserError(
                    f"{path}: is missing, and the index beside it names it; fetch it again"
                ) from None
            except _UNREADABLE as error:
                raise _unreadable(path, error) from error

    def _list(self, path: Path) -> Iterator[tuple[str, Entry]]:
        opened = self._open(path)
        for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
            part = opened.get_slice(name)
            yield name, Entry(tuple(part.get_shape()), _DTYPES.get(part.get_dtype()))

    def _open(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = self._opener(path)
        return self._opened[path]

    def _opener(self, path: Path) -> Any:
        return safe_open(path, framework="pt")

    def tensor(self, name: str) -> torch.Tensor:
        """Return the whole tensor. Pages of a mapped file are private: writing to them does not change the file."""
        return self._open(self._places[name]).get_tensor(name)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return the elements [start, stop) of the flattened tensor; the caller copies them before the next read."""
        if self.is_mapped and self._served_bytes > _MAPPED_BYTES:
            self.release()  # pages that were read stay in memory until the file is unmapped
        part = self.tensor(name).reshape(-1)[start:stop]
        self._served_bytes += part.numel() * part.element_size()
        work_done(part.numel() * part.element_size())
        return part

    def chunks(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, elements) of a slice of the flattened tensor, a few at a time."""
        stop = prod(self.entries[name].shape) if stop is None else stop
        for at in range(start, stop, CHUNK):
            yield at, self.read(name, at, min(at + CHUNK, stop))

    def release(self) -> None:
        """Unmap what is open; tensors that are still in use stay mapped."""
        self._opened.clear()
        self._served_bytes = 0


class TorchFiles(WeightFiles):
    """Dicts of tensors that `torch.save` wrote."""

    def _opener(self, path: Path) -> dict[str, torch.Tensor]:
        # files from before torch 1.6 are no zip archives, and cannot be mapped
        can_map = zipfile.is_zipfile(path)
        try:
            content = torch.load(path, map_location="cpu", mmap=can_map, weights_only=True)
        except _UNREADABLE:
            raise
        except Exception as error:  # an unpickler raises whatever damaged bytes lead it to
            raise ValueError(f"{type(error).__name__} while it was unpickled") from error
        # the saved dict, or the one that it keeps as its model
        for key in ("model", "state_dict", "model_state_dict", "module"):
            if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
                content = content[key]
        if not isinstance(content, Mapping):
            raise ValueError("it holds no dict of tensors")
        return {name: value for name, value in content.items() if torch.is_tensor(value)}

    def _list(self, path: Path) -> Iterator[tuple[str, Entry]]:
        for name, tensor in self._open(path).items():
            if tensor.layout is not torch.strided:
                raise ValueError(f"{name} is sparse")
            yield name, Entry(tuple(tensor.shape), tensor.dtype)

    def tensor(self, name: str) -> torch.Tensor:
        return self._open(self._places[name])[name]


def _unreadable(path: Path, error: BaseException) -> UserError:
    reason = reason_of(error)
    return UserError(f"{path}: cannot be read as weights ({reason}); fetch it again")


class _Metadata(pickle.Unpickler):
    """Unpickles `.metadata` of torch.distributed.checkpoint: its own classes, types of tensors, and plain values."""

    _CLASSES: ClassVar[dict[str, str]] = {
        "torch.distributed.checkpoint.metadata": """Metadata MetadataIndex StorageMeta TensorStorageMetadata
            TensorProperties ChunkStorageMetadata BytesStorageMetadata _MEM_FORMAT_ENCODING""",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "torch.serialization": "_get_layout",  # a look-up by name
        "torch": "Size",
        "collections": "OrderedDict",
        "pathlib": "PosixPath",  # the place of the checkpoint, which nobody reads
        "pathlib._local": "PosixPath",  # the same of Python 3.13
    }

    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_type and name not in self._CLASSES.get(module, "").split():
            raise pickle.UnpicklingError(f"it names {module}.{name}, and no such file needs that")
        return super().find_class(module.removesuffix("._local"), name)


class DistributedFiles(WeightFiles):
    """A folder of torch.distributed.checkpoint, whichever number of ranks wrote it."""

    is_mapped = False

    def _list(self, path: Path) -> Iterator[tuple[str, Entry]]:
        self._kept: tuple[str, torch.Tensor | None] = ("", None)
        from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

        content = read_bytes(path / ".metadata")
        try:
            self._metadata = _Metadata(io.BytesIO(content)).load()
            if not isinstance(self._metadata, Metadata):
                raise ValueError("its .metadata is that of something else")
            for stored in self._metadata.storage_data.values():
                inside(path, stored.relative_path)
            tensors = {
                name: Entry(tuple(torch.Size(stored.size)), stored.properties.dtype)
                for name, stored in self._metadata.state_dict_metadata.items()
                if isinstance(stored, TensorStorageMetadata)
            }
            if not all(isinstance(entry.dtype, torch.dtype) for entry in tensors.values()):
                raise ValueError("a tensor has no type")
        except Exception as error:  # whatever damaged bytes lead an unpickler to
            raise ValueError(f"{type(error).__name__} in its .metadata: {error}") from error
        yield from tensors.items()

    def tensor(self, name: str) -> torch.Tensor:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.api import CheckpointException

        # Slices of a tensor are read one after another: the tensor stays until another one is asked for.
        if self._kept[0] != name:
            self._kept = ("", None)
            whole = torch.empty(self.entries[name].shape, dtype=self.entries[name].dtype)
            # torch's reader would unpickle any class: it gets what `_list` has read
            reader = FileSystemReader(self.folder)
            reader.read_metadata = lambda *_, **__: self._metadata  # type: ignore[method-assign]
            with warnings.catch_warnings(action="ignore"):  # that no group is asked, as is meant
                try:
                    dcp.load({name: whole}, storage_reader=reader, no_dist=True)
                except CheckpointException as error:  # no Exception, as torch has it
                    cause = next((each for each, _ in error.failures.values()), error)
                    raise _unreadable(self.folder, cause) from None
            self._kept = (name, whole)
        return self._kept[1]

    def release(self) -> None:
        super().release()
        self._kept = ("", None)


def open_weights(folder: Path) -> WeightFiles:
    """Open the weights of a folder, of whichever kind it holds; `UserError` if none, with what it is instead."""
    for index in _INDEXES:
        if (folder / index).is_file():
            try:
                content = read_json_value(folder / index)
                paths = sorted({inside(folder, name) for name in content["weight_map"].values()})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{folder / index}: is no index of weights; fetch it again") from error
            return (WeightFiles if "safetensors" in index else TorchFiles)(folder, paths)
    files = sorted(path for path in folder.iterdir() if not path.name.startswith(_NO_WEIGHTS))
    if found := [
        path for path in files if path.suffix == ".safetensors" and not path.name.startswith("rank-")
    ]:
        return WeightFiles(folder, [path for path in found if path.name == "model.safetensors"] or found)
    if (folder / ".metadata").is_file():
        return DistributedFiles(folder, [folder])
    if found := [path for path in files if path.suffix in _TORCH_SUFFIXES]:
        return TorchFiles(folder, found)
    # what it is, and what to name in its place
    what = " (safetensors, pytorch_model.bin, *.pt, or torch.distributed.checkpoint)"
    if (folder / "committed.json").is_file():
        command = f"python -m pretraining.checkpoints export {folder.parent}"
        what = f"; it is a checkpoint: {command} and name the folder it writes"
    elif (folder / "export" / "config.json").is_file():
        what = f"; it is a run: name its export, {folder / 'export'}"
    elif list(folder.glob("adapter_*")):
        what = "; it holds an adapter: merge it into its model, and name the folder of the merged one"
    elif models := sorted(path.parent for path in folder.glob("*/config.json")):
        what = f"; name {models[-1]}"
    raise UserError(f"{folder}: holds no weights{what}")


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

    The others rotate the pairs (0, 1), (2, 3), ... of a head's dimensions; transformers rotates dimension i together
    with i + half of the head. So rows of queries and keys are in another order; all else differs in its name alone.

    files: as they were saved. head_size: of queries and keys.
    """

    def __init__(self, files: WeightFiles, head_size: int) -> None:
        self.folder, self.is_mapped = files.folder, files.is_mapped
        self._files, self._head_size = files, head_size
        self._saved: dict[str, str] = {}
        for saved in (each for each in files.entries if not each.endswith(_COMPUTED)):
            name = _WRAPPED.sub("", saved)
            layer = _LAYER.fullmatch(name)
            if layer is not None and layer[2] in _INSIDE:
                self._saved[f"model.layers.{layer[1]}.{_INSIDE[layer[2]]}"] = saved
            else:  # one that is not a Llama's stays
                self._saved[_OUTSIDE.get(name, saved)] = saved
        self.entries: dict[str, Entry] = {ours: files.entries[saved] for ours, saved in self._saved.items()}

    def tensor(self, name: str) -> torch.Tensor:
        whole = self._files.tensor(self._saved[name])
        return whole[self._rows(name)] if _is_rotated(name) else whole

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
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


def _is_rotated(name: str) -> bool:
    return name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight"))


def translated(files: WeightFiles, model: Model, name: str, where: str) -> WeightFiles:
    """Return the files under transformers' names if another library has named them; else return them as they are.

    Raises `UserError`: they are in parts, or their params.json describes another model.
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


_OR_NULL = {"anyOf": [COUNT, {"type": "null"}]}
_PARAMS = object_of({"n_heads": COUNT}, {"n_kv_heads": _OR_NULL, "norm_eps": NUMBER, "rope_theta": NUMBER})


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
    refuse_differing([pair for pair in pairs if pair[1] != pair[2]], name, where)


def refuse_differing(differing: list[tuple[str, Any, Any]], name: str, where: str) -> None:
    """Raise `UserError` for the first of (key of the model, its value here, that of the weights `name`), if any."""
    if not differing:
        return

    def written(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), default=str)

    remedy = " ".join(f"--set {shlex.quote(f'model.{key}={written(its)}')}" for key, _, its in differing[:6])
    key, mine, its = differing[0]
    what = f"is {written(mine)}, and the weights of {name} were trained with {written(its)}"
    raise problem(where, f"model.{key}", f"{what}; {remedy}")
