"""Weights that exist (model.initial_weights) and frozen ones: every kind of folder, every check, and a run of them."""

import json
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pretraining.data.tokenizer import train_tokenizer
from pretraining.ds_config import load_ds_config
from pretraining.errors import UserError
from pretraining.model.counting import build_on_meta
from pretraining.model.given_weights import (
    GivenWeights,
    check_config,
    check_shapes,
    check_tokenizer,
    find_folder,
    revision_of,
)
from pretraining.model.weight_files import open_weights, translated
from pretraining.planning.gpus import find_gpu
from pretraining.planning.memory.states import state_of
from pretraining.planning.screen import full_plan
from pretraining.planning.setup import ParametersVerb, Setup
from pretraining.planning.sizes import frozen_tensors, trained_tensors
from pretraining.recipe import load_recipe
from pretraining.recipe.model import Model
from tests.gear.finished_data import refusal
from tests.gear.quality_texts import PROSE
from tests.gear.runs import EXPERTS, LLAMA, SMALL_RECIPE, execute

UNTIED = {**LLAMA, "use_cache": False, "tie_word_embeddings": False}
TIED = {**UNTIED, "tie_word_embeddings": True}


def drawn(model: dict) -> PreTrainedModel:
    """A model of this section, drawn by transformers."""
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(build_on_meta(model)[0].config).eval()


def opened(folder: Path, model: dict) -> GivenWeights:
    """The weights of a folder for this section, checked."""
    meta, _ = build_on_meta(model)
    given = GivenWeights(folder.name, open_weights(folder), meta)
    check_shapes(given, meta, "r.json")
    return given


def filled(folder: Path, model: dict) -> PreTrainedModel:
    """A model with the weights of a folder."""
    built = AutoModelForCausalLM.from_config(build_on_meta(model)[0].config).eval()
    opened(folder, model).fill(built)
    return built


def logits(model: PreTrainedModel, rows: int = 512) -> torch.Tensor:
    """The logits of some ids, of the first `rows` of the vocabulary."""
    ids = torch.arange(48).view(2, 24) * 7 % 300
    with torch.no_grad():
        return model(ids).logits[..., :rows]


def write(kind: str, model: PreTrainedModel, folder: Path) -> None:
    """Write a folder as some program would."""
    folder.mkdir()
    weights = model.state_dict()
    if kind == "safetensors":
        model.save_pretrained(folder)
    elif kind == "several files":
        model.save_pretrained(folder, max_shard_size="60KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
    elif kind == "torchtune":  # an epoch's folder, with the recipe's state and an adapter beside the weights
        model.save_pretrained(folder, max_shard_size="60KB")
        torch.save({"epochs_run": 1}, folder / "recipe_state.pt")
        shutil.copyfile(sorted(folder.glob("*.safetensors"))[0], folder / "adapter_model.safetensors")
    elif kind == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    elif kind == "bin of an old torch":
        torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    elif kind == "pt":
        wrapped = {f"_orig_mod.{key}": value for key, value in weights.items()}
        torch.save({"model": wrapped, "step": 5}, folder / "last.pt")
    elif kind == "dcp":
        dcp.save(weights, checkpoint_id=folder, no_dist=True)
    elif kind == "dcp with states":
        states = {"optimizer": {"exp_avg": torch.ones(3)}, "model": weights}
        dcp.save(states, checkpoint_id=folder, no_dist=True)


KINDS = [
    "safetensors",
    "several files",
    "torchtune",
    "bin",
    "bin of an old torch",
    "pt",
    "dcp",
    "dcp with states",
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_folder_gives_the_same_model(tmp_path, kind):
    model = drawn(UNTIED)
    write(kind, model, tmp_path / "source")
    assert torch.equal(logits(filled(tmp_path / "source", UNTIED)), logits(model))


META = {
    **{f"self_attn.{each}_proj": f"attention.w{each}" for each in "qkvo"},
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "model.": "",
}
TORCHTUNE = {
    **META,
    "self_attn.o_proj": "attn.output_proj",
    "self_attn": "attn",
    "mlp.gate_proj": "mlp.w1",
    "mlp.down_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w3",
    "input_layernorm.weight": "sa_norm.scale",
    "post_attention_layernorm.weight": "mlp_norm.scale",
    "model.norm.weight": "norm.scale",
}
for _name in "qkv":
    del TORCHTUNE[f"self_attn.{_name}_proj"]
PARAMS = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-6, "vocab_size": 512}


def native(model: PreTrainedModel, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """The weights under another library's names, with the two halves of each head's rows in turns."""
    found = {}
    for name, weight in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            weight = weight.view(-1, 2, 8, 64).transpose(1, 2).reshape(-1, 64)
        for theirs, its in sorted(names.items(), key=lambda each: -len(each[0])):
            name = name.replace(theirs, its)
        found[name] = weight
    return found


def of_library(folder: Path, model: dict) -> PreTrainedModel:
    """A model with the weights of a folder with names of another library."""
    built = AutoModelForCausalLM.from_config(build_on_meta(model)[0].config).eval()
    files = translated(open_weights(folder), Model(model), "source", "r.json")
    given = GivenWeights("source", files, build_on_meta(model)[0])
    check_shapes(given, built, "r.json")
    assert not given.unused
    given.fill(built)
    # as under ZeRO-3, where a rank reads a part of a weight that begins and ends anywhere
    name = "model.layers.1.self_attn.q_proj.weight"
    whole = torch.cat([part for _, part in given._chunks(name, 100, 3001)])
    assert torch.equal(whole, built.get_parameter(name).flatten()[100:3001])
    return built


def test_a_llama_with_the_names_of_other_libraries_is_translated(tmp_path):
    """Meta's file with its params.json, torchtune's names, and torchtitan's in a distributed checkpoint."""
    model = drawn(UNTIED)
    for name in ("meta", "tune", "titan"):
        (tmp_path / name).mkdir()
    of_meta = {**native(model, META), "rope.freqs": torch.ones(8)}
    torch.save(of_meta, tmp_path / "meta" / "consolidated.00.pth")
    (tmp_path / "meta" / "params.json").write_text(json.dumps(PARAMS))
    torch.save({"model": native(model, TORCHTUNE)}, tmp_path / "tune" / "last.pt")
    dcp.save({"model": native(model, META)}, checkpoint_id=tmp_path / "titan", no_dist=True)
    assert "layers.0.attn.q_proj.weight" in native(model, TORCHTUNE)
    for name in ("meta", "tune", "titan"):
        assert torch.equal(logits(of_library(tmp_path / name, UNTIED)), logits(model)), name

    for params, message in (
        ({"n_heads": 8}, "model.num_attention_heads: is 4, and the weights of source were trained with 8"),
        ({"rope_theta": 500000.0}, "--set model.rope_parameters.rope_theta=500000.0"),
        ({"use_scaled_rope": True}, "--set 'model.rope_parameters.rope_type=\"llama3\"'"),
    ):
        (tmp_path / "meta" / "params.json").write_text(json.dumps({**PARAMS, **params}))
        assert message in refusal(of_library, tmp_path / "meta", UNTIED)
    (tmp_path / "meta" / "params.json").unlink()
    torch.save(of_meta, tmp_path / "meta" / "consolidated.01.pth")
    assert "is cut for several GPUs" in refusal(of_library, tmp_path / "meta", UNTIED)


def test_the_rows_are_those_that_meta_rotates(tmp_path):
    """Pairs of neighbours, turned as complex numbers as in the paper, have the scores of transformers' halves."""
    model = drawn(UNTIED)
    weight, hidden = model.model.layers[0].self_attn.q_proj.weight.detach(), torch.randn(1, 9, 64)
    places = torch.arange(9)[None]
    cosines, sines = model.model.rotary_emb(hidden, places)
    queries = (hidden @ weight.T).view(1, 9, 4, 16).transpose(1, 2)
    turned, _ = apply_rotary_pos_emb(queries, queries, cosines, sines)
    theirs = native(model, META)["layers.0.attention.wq.weight"]
    pairs = torch.view_as_complex((hidden @ theirs.T).view(9, 4, 8, 2))
    rates = 10_000.0 ** (-torch.arange(8) / 8)
    angles = torch.outer(torch.arange(9.0), rates)
    pairs = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(2)
    scores = torch.einsum("qhd,khd->hqk", pairs, pairs)
    assert torch.allclose(turned[0] @ turned[0].transpose(1, 2), scores, atol=1e-4)


def test_the_digest_is_that_of_the_tensors(tmp_path):
    """Not of the files; another byte gives another one."""
    model = drawn(UNTIED)
    write("safetensors", model, tmp_path / "one")
    write("several files", model, tmp_path / "several")
    digests = {opened(tmp_path / name, UNTIED).digest() for name in ("one", "several")}
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    write("safetensors", model, tmp_path / "other")
    assert len(digests) == 1 and opened(tmp_path / "other", UNTIED).digest() not in digests


@pytest.mark.parametrize("model", [UNTIED, TIED], ids=["untied", "tied"])
def test_new_rows_of_a_vocabulary_are_the_mean_of_the_others(tmp_path, model):
    """The others stay, and so do their logits; fewer rows leave out the last."""
    source = drawn(model)
    write("safetensors", source, tmp_path / "source")
    wider = filled(tmp_path / "source", {**model, "vocab_size": 640})
    for table in {wider.get_input_embeddings().weight, wider.get_output_embeddings().weight}:
        assert torch.allclose(table[512:], table[:512].mean(0).expand(128, -1), atol=1e-7)
    assert torch.allclose(logits(wider), logits(source), atol=1e-6)
    narrower = filled(tmp_path / "source", {**model, "vocab_size": 384})
    assert torch.equal(logits(narrower, 384), logits(source, 384))


@pytest.mark.parametrize("model", [EXPERTS, TIED], ids=["experts", "tied"])
def test_a_mapped_weight_is_private(tmp_path, model):
    """Training on the pages of a file does not change the file."""
    source = drawn({**model, "use_cache": False})
    write("safetensors", source, tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    before = file.read_bytes()
    with torch.no_grad():
        for parameter in filled(tmp_path / "source", {**model, "use_cache": False}).parameters():
            parameter.add_(1)
    assert file.read_bytes() == before


def test_shapes_and_tying_are_checked(tmp_path):
    write("safetensors", drawn(TIED), tmp_path / "tied")
    message = refusal(opened, tmp_path / "tied", UNTIED)
    assert "no weights for 1 of" in message and "--set model.tie_word_embeddings=true" in message
    for layers, said in ((1, "has more layers or experts"), (3, "no weights for 9 of")):
        assert said in refusal(opened, tmp_path / "tied", {**TIED, "num_hidden_layers": layers})
    message = refusal(opened, tmp_path / "tied", {**TIED, "intermediate_size": 64})
    assert "mlp.down_proj.weight is [64, 96] in tied and [64, 64] here" in message
    (tmp_path / "native").mkdir()
    torch.save({"tok_embeddings.weight": torch.ones(512, 64)}, tmp_path / "native" / "consolidated.00.pth")
    assert "save it in Hugging Face's format" in refusal(opened, tmp_path / "native", TIED)
    shifted = drawn(TIED).state_dict() | {"model.norm.weight": torch.ones(64, dtype=torch.int8)}
    (tmp_path / "int8").mkdir()
    torch.save(shifted, tmp_path / "int8" / "pytorch_model.bin")
    assert "model.norm.weight of int8 is quantized" in refusal(opened, tmp_path / "int8", TIED)


EPSILON = "model.rms_norm_eps: is 1e-05, and the weights of it were trained with 1e-06; --set"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": 1e-5}, EPSILON),
        ({"num_attention_heads": 8, "num_key_value_heads": 4}, "--set model.num_key_value_heads=2"),
        ({"hidden_act": "gelu"}, "--set 'model.hidden_act=\"silu\"'"),
        ({"tie_word_embeddings": True}, "--set model.tie_word_embeddings=false"),
        ({"model_type": "qwen3"}, "model.model_type: is qwen3, and the weights of it are of a llama"),
    ],
)
def test_what_a_shape_does_not_show_is_compared_by_config(changes, message):
    config = build_on_meta(UNTIED)[0].config
    assert message in refusal(check_config, config, Model({**UNTIED, **changes}), "it", "r.json")


def test_what_may_differ_is_not_refused():
    """A vocabulary, dropout, a longer context whose rotations the recipe gives; an activation under another name."""
    config = build_on_meta(UNTIED)[0].config
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}
    longer = {"vocab_size": 640, "attention_dropout": 0.1, "max_position_embeddings": 128}
    check_config(config, Model({**UNTIED, **longer, "rope_parameters": rope}), "it", "r.json")
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
    assert "--set 'model.rope_parameters=" in refusal(check_config, config, Model(UNTIED), "it", "r.json")
    config = build_on_meta({**SMALL_RECIPE["model"], "activation_function": "gelu_new"})[0].config
    same = Model({**SMALL_RECIPE["model"], "activation_function": "gelu_pytorch_tanh"})
    check_config(config, same, "it", "r")


def test_the_tokenizer_is_the_sources(tmp_path):
    for name, ids in (("own", 280), ("other", 300)):
        train_tokenizer([PROSE if name == "own" else PROSE[::-1]], ids, tmp_path / name)
    own, other = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("own", "other"))
    check_tokenizer(tmp_path / "own", own, "it", "r.json")
    message = refusal(check_tokenizer, tmp_path / "own", other, "it", "r.json")
    assert message.startswith("r.json: data.tokenizer: gives ") and "--set data.tokenizer=it" in message
    own.add_tokens(["<new>"])  # its row is a new one
    check_tokenizer(tmp_path / "own", own, "it", "r.json")
    check_tokenizer(tmp_path, other, "it", "r.json")  # none there to compare


def cut_data(folder: Path) -> None:
    """Leave the metadata of a distributed checkpoint alone."""
    write("dcp", drawn(UNTIED), folder)
    for path in folder.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:500])


def write_nan(folder: Path) -> None:
    """One weight has lost its number."""
    model = drawn(UNTIED)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    write("bin", model, folder)


def write_half_an_index(folder: Path) -> None:
    """As a download that was cut off leaves it."""
    write("several files", drawn(UNTIED), folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_data, r"damaged: cannot be read as weights \(.+\); fetch it again"),
        (write_nan, r"model.norm.weight of damaged holds a NaN"),
        (write_half_an_index, r"index.json: is no index of weights; fetch it again"),
    ],
)
def test_damaged_weights_are_one_line(tmp_path, damage, message):
    damage(tmp_path / "damaged")
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "damaged", UNTIED).digest()


class Command:
    """What runs a command of the shell when it is unpickled."""

    def __init__(self, victim: Path):
        self.victim = victim

    def __reduce__(self):
        return os.system, (f"touch {self.victim}",)


@pytest.mark.parametrize("place", ["the whole", "a value", "the data"])
def test_weights_run_no_code(tmp_path, place):
    """A pickle names only classes that weights need, in `.metadata` of torch.distributed.checkpoint and in its data."""
    folder, victim = tmp_path / "weights", tmp_path / "was-run"
    write("dcp", drawn(UNTIED), folder)
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    if place == "the data":
        for file in folder.glob("*.distcp"):
            torch.save({"x": Command(victim)}, file)
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, file.stat().st_size
    else:
        metadata.planner_data = Command(victim)
    path.write_bytes(pickle.dumps(Command(victim) if place == "the whole" else metadata))
    with pytest.raises(UserError, match=r"weights: cannot be read as weights \(.+\); fetch it again"):
        opened(folder, UNTIED).digest()
    assert not victim.exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04N.", pickle.dumps({"a": 1}), pickle.dumps(torch.float32), b"[" * 100_000]
)
def test_another_kind_of_metadata_is_one_line(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    assert "cannot be read as weights" in refusal(open_weights, tmp_path)


def test_weights_are_read_from_their_own_folder_alone(tmp_path):
    """Neither an index nor the metadata of torch.distributed.checkpoint may name a file elsewhere."""
    (tmp_path / "index").mkdir()
    index = {"weight_map": {"a": "../elsewhere/model.safetensors"}}
    (tmp_path / "index" / "model.safetensors.index.json").write_text(json.dumps(index))
    write("safetensors", drawn(UNTIED), tmp_path / "elsewhere")
    assert "is no index of weights" in refusal(open_weights, tmp_path / "index")
    write("dcp", drawn(UNTIED), tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"../dcp/{info.relative_path}"
    path.write_bytes(pickle.dumps(metadata))
    assert "is no name of a file below" in refusal(open_weights, tmp_path / "dcp")


def test_a_folder_without_weights_is_named_for_what_it_is(tmp_path, workshop):
    run = workshop.plain()
    for folder, words in (
        (run.folder, f"it is a run: name its export, {run.folder}/export"),
        (run.folder / "checkpoint-8", "it is a checkpoint: python -m pretraining.checkpoints export"),
        (tmp_path, "holds no weights (safetensors"),
    ):
        assert words in refusal(open_weights, folder)
    (tmp_path / "epoch_1").mkdir()
    (tmp_path / "epoch_1" / "config.json").touch()
    assert f"name {tmp_path}/epoch_1" in refusal(open_weights, tmp_path)
    assert "did you mean 'epoch_1'?" in refusal(find_folder, f"{tmp_path}/epoch1", "r.json")
    for damaged in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / damaged).write_bytes(b"half a file")
        assert f"{damaged}: cannot be read as weights" in refusal(open_weights, tmp_path)
        (tmp_path / damaged).unlink()


def test_the_plan_counts_frozen_weights_as_weights_alone():
    """Masters, moments, gradients and most of a checkpoint go; a pattern that matches nothing is refused."""
    settings = ['model.frozen=["transformer.wte.*", "transformer.h.[01].*"]']
    plain, recipe = load_recipe("features/gpt2"), load_recipe("features/gpt2", settings)
    frozen, trained = (sum(t.numel for t in each(recipe)) for each in (frozen_tensors, trained_tensors))
    assert frozen + trained == 940_800 and frozen > 131_072
    assert recipe.to_dict()["model"]["frozen"] == json.loads(settings[0].partition("=")[2])
    for stage in ("zero0", "zero3"):
        before, after = (state_of(Setup(each, load_ds_config(stage), 2)) for each in (plain, recipe))
        assert after.parameters == pytest.approx(before.parameters, rel=1e-3)
        assert after.moments == pytest.approx(before.moments * trained / 940_800, rel=1e-3)
    # Time and FLOPs too, also of a mixture of experts.
    for name, pattern in (("124m", "transformer.h.[0-7].*"), ("moe-1.5b", "model.layers.*.mlp.*")):
        plain, recipe = load_recipe(name), load_recipe(name, [f"model.frozen={json.dumps([pattern])}"])
        gpu, zero1 = find_gpu("H200"), load_ds_config("zero1")
        before, after = (full_plan(Setup(each, zero1), gpu) for each in (plain, recipe))
        assert 0.3 < after["training_flops"] / before["training_flops"] < 0.95
        assert 0.3 < after["forecast"]["seconds"] / before["forecast"]["seconds"] < 0.95
        assert after["forecast"]["mfu"] < 0.8
    options = SimpleNamespace(recipe="features/gpt2", model=None, set=settings)
    listed = ParametersVerb().answer(options)["parameters"]
    assert sum(each["elements"] for each in listed if each["frozen"]) == frozen and len(listed) == 52
    message = refusal(frozen_tensors, load_recipe("features/gpt2", ['model.frozen=["transformer.wte"]']))
    assert 'model.frozen.0: is "transformer.wte", which matches none' in message
    assert "transformer.wte.weight" in message


@pytest.fixture(scope="module")
def source(shared, workshop) -> Path:
    """The export of a run, as weights to begin from."""
    folder = shared / "given-source"
    if not folder.exists():
        shutil.copytree(workshop.plain().folder / "export", folder)
    return folder


def test_a_run_begins_from_them_and_a_resumed_one_does_not_need_them(workshop, source, tmp_path):
    """Two ranks under ZeRO-3 have the curve of a plain process; frozen weights stay; ZeRO-2 resumes alone."""
    settings = [f"model.initial_weights={source}", 'model.frozen=["transformer.wte.*", "transformer.h.0.*"]']
    sharded, plain = workshop.run("zero3", 2, settings=settings), workshop.run("null", 1, "plain", settings)
    assert max(abs(a - b) for a, b in zip(sharded.losses, plain.losses, strict=True)) < 2e-6
    assert plain.losses[0] < workshop.plain().losses[0] - 0.5
    began = next(event for event in sharded.events if event["event"] == "initial_weights")
    assert began["source"] == str(source) and began["tokenizer"] == "the same" and not began["added_rows"]
    trained = json.loads((sharded.folder / "checkpoint-8" / "committed.json").read_text())
    assert trained["initial_weights"]["digest"] == began["digest"]
    assert f"began with the weights of `{source}`" in (plain.folder / "export" / "README.md").read_text()
    for run in (sharded, plain):
        folders = (source, run.folder / "export")
        before, after = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in folders)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == {name for name in before if ".h.1." in name or ".wpe." in name or ".ln_f." in name}

    gone = source.rename(tmp_path / "gone")
    try:
        resumed = workshop.continued(sharded, tmp_path / "resumed", "zero2", 2, "forked", settings)
    finally:
        gone.rename(source)
    assert "continued from checkpoint-8" in resumed.finished.stdout
    assert resumed.losses[-2:] == pytest.approx(sharded.losses[-2:], abs=2e-6)


def test_mistakes_are_one_line_and_nothing_is_written(workshop, source, tmp_path):
    for settings, message in (
        ([f"model.initial_weights={tmp_path}/sourc"], "model.initial_weights: "),
        ([f"model.initial_weights={source}", "model.n_head=8"], "--set model.n_head=4"),
        (["optimizer.qk_clip=1", 'model.frozen=["*attn.c_attn*"]'], "c_attn.weight is frozen (model.frozen)"),
    ):
        finished = execute(workshop.command(tmp_path / "run", "null", 1, "plain", settings))
        assert finished.code == 2 and len(finished.stderr.splitlines()) == 1, finished.output
        assert message in finished.stderr and not (tmp_path / "run").exists(), finished.output


def test_a_name_of_the_hub_is_found_in_its_cache(tmp_path, monkeypatch):
    """With its commit, which the run keeps; one that is not there, without a network, is one line with the remedy."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit, repository = "0" * 39 + "7", tmp_path / "models--someone--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    write("safetensors", drawn(TIED), repository / "snapshots" / commit)
    for name in ("someone/small", f"someone/small@{commit}"):
        folder = find_folder(name, "r.json")
        assert revision_of(folder) == commit and opened(folder, TIED).origins
    message = refusal(find_folder, "someone/smal", "r.json")
    assert message.startswith("r.json: model.initial_weights: someone/smal: no such folder")
    assert message.endswith("hf download someone/smal")
