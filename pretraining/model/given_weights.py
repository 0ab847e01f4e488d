"""Begin from weights that exist: find them, check that they are this model's, and fill a model with them.

`open_given` looks before anything is built: config, names, shapes, tying, vocabulary and tokenizer. `GivenWeights.fill`
reads. At stages 0, 1 and 2 a weight is the file's own pages where the types agree, which the ranks of a node share;
else it is converted, a piece at a time. Under ZeRO-3 every rank reads its own part of each weight and no other.
"""

import os
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
import xxhash
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from pretraining.data.checksums import checksum_of
from pretraining.errors import UserError, nearest, reason_of
from pretraining.extend import load_pretrained
from pretraining.model.counting import build_on_meta
from pretraining.model.initial_weights import fill
from pretraining.model.weight_files import CHUNK, KEY, WeightFiles, open_weights, refuse_differing, translated
from pretraining.outside.schema import listed, problem
from pretraining.recipe import Recipe
from pretraining.recipe.model import Model
from pretraining.runtime.heartbeat import long_work
from pretraining.runtime.process_group import gather_from_ranks, rank_and_world_size, together
from pretraining.upstream.deepspeed import copy_chunks, first_element, own_rows
from pretraining.upstream.transformers import Conversion, is_not_loaded, is_partitioned

_WRAPPERS = ("", "model.", "module.", "state_dict.", "model_state_dict.", "_orig_mod.", "module._orig_mod.")
"""What programs put before every name of a model."""
_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model")
_OLDER_FILES = ("*.json", "pytorch_model*.bin", "*.jinja", "tokenizer*", "*.model")
"""What is fetched from the hub; a repository without safetensors has the second."""
_SAME = {"gelu_new": "gelu_pytorch_tanh"}
"""Names of one function: GPT-2's activation as eight kernels and as one."""
_FREE = re.compile(
    r"vocab_size|.*_token_id|.*pdrop|.*dropout|initializer_range|use_cache|attn_implementation|experts_implementation"
    r"|output_router_logits|router_.*coef|router_jitter_noise|max_position_embeddings|n_inner"
)
"""Keys that may differ: the vocabulary, dropout, the longest context, how routers are balanced; shapes show n_inner."""
_ROPE = re.compile(r"rope_\w+")
"""Keys that may differ if the recipe itself gives them: a longer context is trained with others."""
_NATIVE = ("tok_embeddings.weight", "attention.wq.weight")
"""How names end that Meta, torchtune and torchtitan use within; `translated` is for a Llama's."""
_TRIAL = "def f(x):\n    return x**2 + 1  # Grüße, 123 4567"


@dataclass(frozen=True)
class Origin:
    """Where a parameter comes from."""

    shape: tuple[int, ...]
    """Of the parameter."""
    saved_shape: tuple[int, ...]
    """Of the source's; only the rows of a vocabulary may differ."""
    loaded_under: str
    saved: tuple[tuple[str, str | None], ...]
    """(saved name, pattern of its converter) of the tensors that it is made of; without a pattern it is one of them."""

    @property
    def is_converted(self) -> bool:
        """Whether it is made of several tensors, or is a part of one."""
        return self.saved[0][1] is not None

    @property
    def rows_added(self) -> int:
        """Rows that the source does not have; negative where it has more."""
        return self.shape[0] - self.saved_shape[0] if self.shape else 0


class GivenWeights:
    """Weights that a model begins with.

    facts: what events, markers and the model card say about them.
    """

    def __init__(self, name: str, files: WeightFiles, model: PreTrainedModel) -> None:
        """model: on the meta device."""
        self.name, self.files, self.facts = name, files, {}
        self._conversion = Conversion(model)
        self.origins, self.unused = _match(files, model, self._conversion)
        self._made: tuple[str, torch.Tensor | None] = ("", None)
        self._means: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def fill(self, model: PreTrainedModel, device: torch.device | str = "cpu") -> None:
        """Set every parameter. All ranks call it together.

        device: where a weight goes that is no page of the file.
        """
        with long_work():
            for name, parameter in model.named_parameters():
                if not is_partitioned(parameter):
                    parameter.data = self._tensor(name, parameter, device)
                else:
                    fill(parameter, partial(self._chunks, name))
        self._made, self._means = ("", None), {}
        self.files.release()

    def _tensor(self, name: str, parameter: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        origin = self.origins[name]
        if self.files.is_mapped and not origin.is_converted and not origin.rows_added:
            mapped = self.files.tensor(origin.saved[0][0])
            if mapped.dtype == parameter.dtype and mapped.is_contiguous():
                return own_rows(parameter, mapped)
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        start = first_element(parameter)
        copy_chunks(self._chunks(name, start, start + made.numel()), made.view(-1), start)
        return made

    def _chunks(self, name: str, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, elements) of a slice of the flattened parameter, in the source's type."""
        origin = self.origins[name]
        end_of_rows = min(stop, prod(origin.saved_shape))
        if origin.is_converted:
            # Slices of a parameter are read one after another: what was made stays until another one is asked for.
            if self._made[0] != name:
                self._made = ("", None)
                tensors = [(saved, pattern, self.files.tensor(saved)) for saved, pattern in origin.saved]
                self._made = (name, self._conversion.convert(origin.loaded_under, tensors)[name])
                self.files.release()
            yield start, self._made[1].reshape(-1)[start:end_of_rows]
        else:
            yield from self.files.chunks(origin.saved[0][0], start, end_of_rows)
        if stop > end_of_rows:
            # Every added row becomes the mean of the source's: a row of zeros, or a drawn one, could get a logit far
            # above those of the trained rows (Hewitt 2021).
            saved, rows, width = origin.saved[0][0], origin.saved_shape[0], prod(origin.shape[1:])
            if saved not in self._means:
                total, step = torch.zeros(width, dtype=torch.float64), max(1, CHUNK // width)
                for row in range(0, rows, step):
                    last = min(row + step, rows)
                    read = self.files.read(saved, row * width, last * width)
                    total += read.view(-1, width).double().sum(0)
                self._means[saved] = (total / rows).float()
            first = max(start, end_of_rows)
            yield first, self._means[saved][torch.arange(first, stop) % width]

    def digest(self) -> str:
        """Return `xxh128:<hex>` over names, types, shapes and bytes of the tensors in use; the ranks share the reading.

        It does not depend on how the tensors are spread over files, nor on the number of ranks.

        Raises `UserError`: a tensor cannot be read, or is not finite; the same on every rank.
        """
        rank, ranks = rank_and_world_size()
        entries = self.files.entries
        names = sorted({saved for origin in self.origins.values() for saved, _ in origin.saved})
        # the largest first, so that the ranks have equal work
        by_size = sorted(names, key=lambda name: (-prod(entries[name].shape), name))

        def digest_of(saved: str) -> str:
            digest = xxhash.xxh128()
            for _, part in self.files.chunks(saved):
                if not torch.isfinite(part).all():
                    what = f"{saved} of {self.name} holds a NaN or an infinity"
                    raise UserError(f"{what}: every loss would be one; name weights from before it")
                digest.update(memoryview(part.contiguous().view(torch.uint8).numpy()))
            return digest.hexdigest()

        with long_work():
            own = together(lambda: {name: digest_of(name) for name in by_size[rank::ranks]})
        found = {name: value for part in gather_from_ranks(own) for name, value in part.items()}
        self.files.release()
        lines = [f"{name} {entries[name].dtype} {list(entries[name].shape)} {found[name]}" for name in names]
        return checksum_of("|".join(lines).encode())


def open_given(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> GivenWeights | None:
    """Find the recipe's initial weights and check them; None if it draws its own. All ranks call it together.

    Raises `UserError`: there are none, or they are not this model's; the same on every rank.
    """
    name = recipe.weights.initial_weights
    if name is None:
        return None
    where = recipe.where
    folder = find_folder(name, where)

    def opened() -> GivenWeights:
        special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        section = Model({**special, **recipe.model})
        config = _config_of(folder, name, where)
        if config is not None:
            check_config(config, section, name, where)
        try:
            files = open_weights(folder)
        except UserError as error:
            raise problem(where, KEY, str(error)) from None
        files = translated(files, section, name, where)
        model, _ = build_on_meta(section)
        given = GivenWeights(name, files, model)
        check_shapes(given, model, where)
        check_tokenizer(folder, tokenizer, name, where)
        return given

    given = together(opened)
    grown = {key: each.rows_added for key, each in given.origins.items() if each.rows_added}
    try:
        digest = given.digest()
    except UserError as error:
        raise problem(where, KEY, str(error)) from None
    facts = {"source": name, "revision": revision_of(folder), "digest": digest}
    facts |= {"tokenizer": "the same" if _has_tokenizer(folder) else "none there to compare"}
    given.facts = facts | {"added_rows": grown, "unused": given.unused[:20]}
    return given


def find_folder(name: str, where: str) -> Path:
    """Return the folder of a name: a local one, or one fetched from the hub once on every node."""
    folder = Path(name).expanduser()
    if together(folder.is_dir):
        return folder
    if name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", name):
        raise problem(where, KEY, f"{name}: no such folder{_near(folder)}")
    is_first, fetch = os.environ.get("LOCAL_RANK", "0") == "0", partial(_fetch, name, where)
    fetched = together(fetch if is_first else lambda: None)
    # The others find in the cache what the first rank of their node has put there.
    found = together((lambda: None) if is_first else fetch)
    return fetched or found


def _fetch(name: str, where: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    repository, _, revision = name.partition("@")
    try:
        for patterns in (_FILES, _OLDER_FILES):
            found = Path(snapshot_download(repository, revision=revision or None, allow_patterns=patterns))
            if list(found.glob("*.safetensors")):
                break
        return found
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, ValueError) as error:
        reason = reason_of(error)
        what = f"{name}: no such folder{_near(Path(name))}, and the hub does not give it ({reason})"
        remedy = "name a folder, or fetch it where there is a network: hf download"
        raise problem(where, KEY, f"{what}; {remedy} {repository}") from error


def _near(folder: Path) -> str:
    parent = folder.parent
    names = [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    near = nearest(folder.name, names)
    return near or f" (looked in {Path.cwd()})"


def revision_of(folder: Path) -> str | None:
    """Return the commit of a repository of the hub, by the name of its folder in the cache."""
    return folder.name if re.fullmatch("[0-9a-f]{40}", folder.name) else None


def _config_of(folder: Path, name: str, where: str) -> PreTrainedConfig | None:
    if not (folder / "config.json").is_file():
        return None
    try:
        return load_pretrained("AutoConfig", folder)
    except Exception as error:  # whatever transformers stumbles over in a file of somebody else
        reason = " ".join(str(error).split())[:200]
        raise problem(where, KEY, f"{name}: transformers cannot read its config.json ({reason})") from error


def check_config(config: PreTrainedConfig, model: Model, name: str, where: str) -> None:
    """Raise `UserError` for the first key by which a source computes something else than the recipe's model."""
    if config.model_type != model.model_type:
        what = f"is {model.model_type}, and the weights of {name} are of a {config.model_type}"
        raise problem(where, "model.model_type", f"{what}; write that type and its keys")
    theirs, ours = config.to_dict(), AutoConfig.for_model(**deepcopy(model)).to_dict()
    differing = []
    for key in sorted(model.with_defaults().keys() & theirs.keys()):
        mine, its = ours.get(key), theirs[key]
        # equal, or two names of one function
        same = mine == its or (isinstance(mine, str) and _SAME.get(mine, mine) == _SAME.get(its, its))
        if not (same or _FREE.fullmatch(key) or (_ROPE.fullmatch(key) and key in model)):
            differing.append((key, mine, its))
    refuse_differing(differing, name, where)


def _match(
    files: WeightFiles, model: PreTrainedModel, conversion: Conversion
) -> tuple[dict[str, Origin], list[str]]:
    """Return {parameter: its origin} of those that the source has, and the saved names that none is made of."""
    shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}

    def hits(wrapper: str) -> int:
        # of saved names that are loaded as parameters if `wrapper` is taken from their beginning
        saved = (name.removeprefix(wrapper) for name in files.entries if name.startswith(wrapper))
        return sum(conversion.loaded_under(name).name in shapes for name in saved)

    wrapper = max(_WRAPPERS, key=hits)
    groups: dict[str, list[tuple[str, str | None]]] = {}
    for saved in files.entries:
        # Beside a wrapped model its optimizer's states may be saved.
        if saved.startswith(wrapper):
            under = conversion.loaded_under(saved.removeprefix(wrapper))
            groups.setdefault(under.name, []).append((saved, under.pattern))
    origins: dict[str, Origin] = {}
    unused = []
    for name, saved in groups.items():
        for key, shape in _made_of(name, saved, files, conversion).items():
            if key in shapes:
                origins[key] = Origin(shapes[key], shape, name, tuple(saved))
            elif key not in model.all_tied_weights_keys and not is_not_loaded(model, key):
                unused.append(key)
    return origins, sorted(unused)


def _made_of(
    name: str, saved: list[tuple[str, str | None]], files: WeightFiles, conversion: Conversion
) -> dict[str, tuple[int, ...]]:
    """Return {parameter: shape} of what is loaded under `name`."""
    if saved[0][1] is None:
        return {name: files.entries[saved[0][0]].shape}
    # on the meta device, so that only shapes are worked out
    tensors = [
        (each, pattern, torch.empty(files.entries[each].shape, device="meta")) for each, pattern in saved
    ]
    try:
        made = conversion.convert(name, tensors)
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"{files.folder}: {saved[0][0]} and others do not make {name} ({error})") from error
    return {key: tuple(tensor.shape) for key, tensor in made.items()}


def check_shapes(given: GivenWeights, model: PreTrainedModel, where: str) -> None:
    """Raise `UserError` unless every parameter has a source of its shape, but for the rows of a vocabulary.

    model: on the meta device.
    """
    name, parameters = given.name, dict(model.named_parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    missing = [key for key in parameters if key not in given.origins]
    if missing:
        is_head = head is not None and all(parameters[key] is head.weight for key in missing)
        remedy = "name the folder of a model like this one"
        if is_head:
            remedy = "--set model.tie_word_embeddings=true"
        elif any(saved.endswith(_NATIVE) for saved in given.files.entries):
            remedy = "its names are those of another library: save it in Hugging Face's format (torchtune: "
            remedy += "FullModelHFCheckpointer; torchtitan: last_save_in_hf)"
        what = f"{name} has no weights for {len(missing)} of {len(parameters)} parameters ({listed(missing)})"
        found = f"; it has {listed(given.unused)}" if given.unused and not is_head else ""
        raise problem(where, KEY, f"{what}{found}; {remedy}")
    tables = {id(each) for module in (embedding, head) if module is not None for each in module.parameters()}
    for key, origin in given.origins.items():
        same = origin.saved_shape[1:] == origin.shape[1:] and len(origin.saved_shape) == len(origin.shape)
        same = same and prod(origin.saved_shape) > 0
        if not same or (origin.rows_added and id(parameters[key]) not in tables):
            what = f"{key} is {list(origin.saved_shape)} in {name} and {list(origin.shape)} here"
            raise problem(where, KEY, f"{what}; give model the sizes of its config")
        for saved, _ in origin.saved:
            dtype = given.files.entries[saved].dtype
            if dtype is None or not dtype.is_floating_point:
                what = f"{saved} of {name} is quantized ({dtype or 'fp8'})"
                raise problem(where, KEY, f"{what}; name the model in bf16, fp16 or fp32")
    kinds = {re.sub(r"\d+", "0", key) for key in given.origins}
    if beyond := [key for key in given.unused if re.sub(r"\d+", "0", key) in kinds]:
        what = f"{name} has more layers or experts than this model ({listed(beyond)})"
        raise problem(where, KEY, f"{what}; give model the sizes of its config")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def check_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase, name: str, where: str) -> None:
    """Raise `UserError` if the data's tokenizer gives an id of the source's to another token; it may add tokens."""
    if not _has_tokenizer(folder):
        return
    try:
        other = load_pretrained("AutoTokenizer", folder)
    except Exception as error:  # whatever transformers stumbles over in a file of somebody else
        reason = reason_of(error)
        raise problem(where, KEY, f"the tokenizer of {name} cannot be loaded ({reason})") from error
    theirs, ours = other.get_vocab(), tokenizer.get_vocab()
    by_id = {number: token for token, number in theirs.items()}
    remedy = f"--set data.tokenizer={name} with a data.name of its own, and prepare the data"
    for token, number in sorted(ours.items(), key=lambda each: each[1]):
        if by_id.get(number, token) != token or theirs.get(token, number) != number:
            its = theirs.get(token, "none")
            what = f"gives {token!r} the id {number}, and the weights of {name} know it as {its}"
            raise problem(where, "data.tokenizer", f"{what}; {remedy}")
    if len(ours) == len(theirs) and tokenizer.encode(_TRIAL) != other.encode(_TRIAL):
        what = f"has the tokens of {name} and splits text in another way"
        raise problem(where, "data.tokenizer", f"{what}; {remedy}")
