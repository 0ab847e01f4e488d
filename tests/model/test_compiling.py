"""torch.compile by recipe: one graph for all blocks, compiled once; the same curve, and nothing of it in an export."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from pretraining.ds_config import load_ds_config
from pretraining.errors import UserError
from pretraining.model.attention import TORCH_VARLEN, register_kernels
from pretraining.model.build import (
    FirstPass,
    blocks_of,
    build_config,
    build_from_recipe,
    build_model,
    check_speed,
    compile_model,
    describe_compilation,
)
from pretraining.model.loss import build_loss, watch_routing
from pretraining.planning.memory.need import memory_need
from pretraining.planning.setup import Setup
from pretraining.planning.shapes import layer_numel, parameter_tensors
from pretraining.recipe import load_recipe
from pretraining.recipe.refusals import compiled_part, load_recipe_and_ds_config, why_not_compiled
from pretraining.recipe.sections import Speed
from pretraining.recipe.training import TRAINING_KEYS
from pretraining.training import arguments as run_arguments
from pretraining.training.arguments import build_arguments, engine_config
from pretraining.training.trainer import PretrainingTrainer
from pretraining.upstream.torch import missing_compiler
from tests.gear.compiled_ranks import CASES, trained_in_all_ways
from tests.gear.finished_data import refusal
from tests.gear.on_ranks import on_ranks
from tests.gear.runs import MODELS, OTHER_MODELS, TOKENIZER
from tests.gear.small_models import measurable

IDS = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))
NONE = Speed(compile="none")
BLOCKS = ("speed.compile=blocks", "speed.compile_backend=aot_eager")
pytestmark = pytest.mark.usefixtures("nothing_compiled")


def losses(arguments, **speed) -> list[float]:
    """Of two training steps of a model of three layers, each with a short validation after it."""
    section = {**MODELS["gpt2"], "n_layer": 3}
    model = build_model(section, TOKENIZER, arguments, speed=replace(NONE, **speed)).train()
    loss, found = build_loss(model, load_recipe("features/gpt2").loss), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        here = loss(model(input_ids=IDS), IDS.roll(-1, 1))
        here.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(here.item())
        with torch.no_grad():
            model.eval()
            model(input_ids=IDS[:1, :9])
            model.train()
    return found


def test_a_whole_model_is_one_graph(arguments):
    """Two steps, another shape validated between them: one graph without a break, compiled once, as blocks below."""
    losses(arguments, compile="whole", compile_backend="eager")
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_watched_experts_are_compiled_once_for_all_layers(arguments):
    """What notes the routers' choices has nothing of a layer's own in it: else a ninth layer would run uncompiled.

    Graphs are counted where they are traced, so that no backend need work on them.
    """
    graphs = []
    for watched in (False, True):
        torch._dynamo.reset()
        counters.clear()
        section = measurable("deepseek_v3")
        model = build_model(
            section, TOKENIZER, arguments, speed=Speed(compile="blocks", compile_backend="eager")
        )
        if watched:
            watch_routing(model)
        model.train()(input_ids=IDS % 96).logits.sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0


def test_batches_of_any_number_of_documents_share_a_graph(monkeypatch):
    """Kept apart by torch's kernel for GPUs, which is traced on tensors without values."""
    monkeypatch.setattr("torch.is_autocast_enabled", lambda device: False)
    register_kernels()
    config = build_config({**MODELS["llama"], "attn_implementation": TORCH_VARLEN}, TOKENIZER)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    compile_model(model, Speed(compile_backend="aot_eager"))
    ids = torch.empty(2, 64, dtype=torch.int64, device="meta")
    for num_documents in (3, 5, 2):
        borders = torch.empty(num_documents + 1, dtype=torch.int32, device="meta")
        lengths = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 64, "max_length_k": 64}
        model(input_ids=ids, position_ids=ids, use_cache=False, **lengths).logits.float().sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, dict]:
    """What `tests.gear.compiled_ranks` found of each of its cases.

    It takes a minute: two cases run inductor's C++, on both ranks, and no other backend shows what that code does.
    """
    (found, _), (_, said) = on_ranks(2, trained_in_all_ways)
    assert said.count("as rank 1 cannot compile them (BackendCompilerFailed") == 4, said
    return found


ALONE = ("gpt2", "llama", "qwen3_moe", "gpt2 zero2", "llama tensor", "qwen3_moe expert")
SAME = {case: max(filter(case.startswith, ALONE), key=len) for case in CASES if case not in ALONE}
"""{case: the one whose numbers it must have}."""


@pytest.mark.parametrize("case", SAME)
def test_compiled_blocks_are_the_eager_ones_under_zero(on_two_ranks, case):
    """Losses of four steps with a validation in between, and the first gradients, of two ranks at stages 2 and 3."""
    found, wanted = on_two_ranks[case], on_two_ranks[SAME[case]]
    assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
    for name, gradient in found.get("gradients", {}).items():
        torch.testing.assert_close(gradient, wanted["gradients"][name], atol=1e-6, rtol=1e-4)


ONE_GRAPH = ["gpt2 blocks", "gpt2 blocks recomputed", "llama blocks", "llama tensor blocks"]


@pytest.mark.parametrize("case", ONE_GRAPH)
def test_zero_3_gathers_a_block_around_its_one_graph(on_two_ranks, case):
    """No graph ends at a hook or is compiled again, though weights come and go; none is held when ZeRO lets it go.

    Split layers have their sums in it.
    """
    found = on_two_ranks[case]
    assert (found["graphs"], found["graph_break"]) == (1, {})
    assert "tensor" in case or found["held_too_long"] == 0


@pytest.mark.parametrize("recomputed", ["", " recomputed"])
def test_split_experts_are_a_graph_between_their_products(on_two_ranks, recomputed):
    """One for every number of tokens and layer. The exchange cuts the block in two, and within it the mixture."""
    found, whole = (on_two_ranks[f"qwen3_moe {each}blocks{recomputed}"] for each in ("expert ", ""))
    assert (found["graphs"], sum(found["graph_break"].values())) == (2 + 2 + 1, 2)
    # routers' logits leave a block without an end of its graph, the same for all layers
    assert (whole["graphs"], whole["graph_break"]) == (1, {})


def test_a_compiled_run_goes_on_without(workshop, tmp_path):
    """In a plain process, from the checkpoint of two ranks; an export has the usual names."""
    whole = workshop.run("zero3", settings=BLOCKS)
    with safe_open(whole.dir.export / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert names and not any("_orig_mod" in name for name in names)
    resumed = workshop.continued(whole, tmp_path / "run")
    assert resumed.losses == pytest.approx(whole.losses, abs=1e-5)


def test_deepcompile_is_started_by_its_switch(capsys):
    """The engine compiles once it is mended; what the log says is honest about it. Nothing of it runs on a CPU."""
    settings = ["speed.compile=deepcompile", "loss.kind=plain"]
    recipe, ds_config = load_recipe_and_ds_config("features/gpt2", settings, "zero3")
    assert engine_config(recipe, ds_config)["compile"] == {"deepcompile": True}
    assert "never tried" in describe_compilation(recipe.speed)
    started = []
    engine = SimpleNamespace(optimizer=object(), zero_optimization=lambda: True)
    engine.compile = lambda backend: started.append(backend)
    trainer = SimpleNamespace(recipe=recipe, model_wrapped=engine, is_deepspeed_enabled=True)
    trainer.gradient_norm_known = None
    PretrainingTrainer.prepared(trainer)
    assert started == ["inductor"]
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="needs a GPU"):
            check_speed(recipe.speed)


RECOMPUTED = ["training.activation_checkpointing=true"]
AUTO = {
    "at stage 1": ("124m", [], "zero1", None),
    "at stage 3, recomputed": ("7b", [], "zero3", None),
    "offloaded": ("65b", [], "zero3_offload", None),
    "a mixture": ("moe-1.5b", [], "zero1", None),
    "split experts": ("moe-1.5b", [], "zero1:expert=2", None),
    "split layers": ("7b", [], "zero1_tp2", None),
    "weights on a drive": ("30b", [], "zero3_nvme", "from NVMe"),
    "dropout": ("124m", ["model.resid_pdrop=0.1"], "zero1", "dropout"),
    "Liger's kernels": ("7b", ["training.use_liger_kernel=true"], "zero3", "Liger's kernels take its place"),
    "a recomputed mixture": ("moe-1.5b", RECOMPUTED, "zero1", None),
}


@pytest.mark.parametrize("name", AUTO)
def test_auto_compiles_blocks_on_a_gpu_where_it_can(name):
    """The plan knows it from recipe and ds_config; on a machine without a GPU nothing is compiled unless asked for."""
    recipe_name, settings, stage, why = AUTO[name]
    recipe, ds_config = load_recipe_and_ds_config(recipe_name, settings, stage)
    assert recipe.speed.compile == "auto"
    assert compiled_part(recipe, ds_config) == ("none" if why else "blocks")
    assert (why or "None") in str(why_not_compiled(recipe, ds_config))
    assert compiled_part(recipe, ds_config, on_gpu=False) == "none"
    by_name = replace(recipe, speed=replace(recipe.speed, compile="blocks"))
    assert compiled_part(by_name, ds_config, on_gpu=False) == "blocks"


def test_the_next_block_is_gathered_while_one_computes():
    """As transformers fills `"auto"`, most of it would be waited for; a number of the ds_config's own stays."""
    recipe, ds_config = load_recipe_and_ds_config("30b", ["speed.compile=blocks"], "zero3")
    block = layer_numel(parameter_tensors(recipe.model))
    zero = engine_config(recipe, ds_config)["zero_optimization"]
    assert zero["stage3_prefetch_bucket_size"] == block and zero["stage3_max_live_parameters"] >= 2 * block
    given = {**ds_config, "zero_optimization": {**zero, "stage3_prefetch_bucket_size": 5}}
    assert engine_config(recipe, given)["zero_optimization"]["stage3_prefetch_bucket_size"] == 5
    plain = replace(recipe, speed=replace(recipe.speed, compile="none"))
    assert engine_config(plain, ds_config)["zero_optimization"] == ds_config["zero_optimization"]
    needs = [memory_need(Setup(each, ds_config, 8)).parts["gathered weights"] for each in (recipe, plain)]
    assert needs[0] - needs[1] == pytest.approx(2 * (block - 0.9 * 6656**2))


def test_liger_fuses_what_no_compiler_does(monkeypatch):
    """On a GPU, if it is installed and no block is compiled; a recipe that says so decides for itself."""
    offloads = "training.activation_checkpointing_kwargs.offload=true"
    mixture, compiled = load_recipe("moe-1.5b", [*RECOMPUTED, offloads]), load_recipe("7b")
    uncompiled = load_recipe("7b", ["speed.compile=none"])

    def fuses(recipe, stage: str, on_gpu: bool = True, is_installed: bool = True) -> bool:
        monkeypatch.setattr(run_arguments, "is_liger_kernel_available", lambda: is_installed)
        return run_arguments.fuses_with_liger(recipe, load_ds_config(stage), on_gpu=on_gpu)

    assert fuses(mixture, "zero1")
    assert not fuses(mixture, "zero1", on_gpu=False) and not fuses(mixture, "zero1", is_installed=False)
    assert not fuses(compiled, "zero3") and not fuses(uncompiled, "zero3")


def test_liger_is_one_line_if_missing_and_leaves_the_loss_alone(monkeypatch, tmp_path):
    """It would replace the model's forward by one with its own loss."""
    recipe = load_recipe("7b", ["training.use_liger_kernel=true", "training.bf16=false"])
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(UserError, match=r"training\.use_liger_kernel needs the package 'liger_kernel'"):
        build_arguments(recipe, None, tmp_path, 1)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    config = build_arguments(recipe, None, tmp_path, 1).liger_kernel_config
    assert config == {"cross_entropy": False, "fused_linear_cross_entropy": False}


@pytest.mark.usefixtures("counts_anew")
@pytest.mark.parametrize("name", ["moe-1.5b", "moe-30b-a3b", "qwen2_moe"])
def test_a_mixture_keeps_its_own_experts_beside_liger(name, monkeypatch, tmp_path):
    """Promise: no micro-batch waits. Liger's experts stop the host in every layer; a recipe may still ask for them."""
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    other = OTHER_MODELS.get(name)
    for asked, expected in (([], False), (["training.liger_kernel_config.swiglu=true"], True)):
        changes = ["training.use_liger_kernel=true", "training.bf16=false", *asked]
        recipe = load_recipe("7b" if other else name, changes)
        recipe = replace(recipe, model=other) if other else recipe
        assert build_arguments(recipe, None, tmp_path, 1).liger_kernel_config["swiglu"] is expected


def test_the_log_says_what_is_compiled(arguments, capsys):
    """At the start; on a processor nothing is said of what nobody asked for."""
    build_from_recipe(load_recipe("features/gpt2"), TOKENIZER, arguments, draw_weights=False)
    assert capsys.readouterr().out == ""
    build_from_recipe(load_recipe("features/gpt2", BLOCKS), TOKENIZER, arguments, draw_weights=False)
    assert "compiled: every block, by aot_eager" in capsys.readouterr().out
    assert describe_compilation(NONE) == "compiled: nothing"
    assert describe_compilation(NONE, "no GPU") == "compiled: nothing (no GPU)"


def broken(graph, inputs):
    """A backend that fails in the way of one that runs out of room."""
    raise OSError("No space left on device")


def breaks_backward(graph, inputs):
    """A backend that cannot compile backward passes."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=broken)(graph, inputs)


@pytest.mark.parametrize("backend", [broken, breaks_backward, "inductor"])
def test_a_compiler_that_fails_is_one_line_and_the_run_goes_on(backend, arguments, monkeypatch, capsys):
    """`auto`, a backend that raises forward or backward, or no C++ compiler: the losses of eager blocks."""
    if backend == "inductor":
        monkeypatch.setattr("pretraining.upstream.toolchain.shutil.which", lambda name: None)
    eager = losses(arguments)
    capsys.readouterr()
    assert losses(arguments, compile="auto", compile_backend=backend) == eager
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: blocks")]
    assert len(said) == 1 and "run uncompiled on all ranks, as rank 0 cannot compile them" in said[0]
    assert ("C++ compiler" if backend == "inductor" else "No space left on device") in said[0]


def test_where_another_rank_cannot_compile_routers_say_once_what_they_chose(arguments, monkeypatch):
    """The rank that could has run a block twice: compiled, and as all ranks do."""
    section = measurable("deepseek_v3")
    together = FirstPass._together

    def fails_elsewhere(self, *call, **keywords):
        result = together(self, *call, **keywords)
        self.has_failed = True
        return result

    monkeypatch.setattr(FirstPass, "_together", fails_elsewhere)
    found = []
    for speed in (NONE, Speed(compile="auto", compile_backend="eager")):
        model = build_model(section, TOKENIZER, arguments, speed=speed).train()
        watch_routing(model)
        found.append(model(input_ids=IDS % 96).router_logits)
    for plain, compiled in zip(*found, strict=True):
        assert torch.equal(plain, compiled)


TOOLCHAIN = "pretraining.upstream.toolchain"
GPU_NEEDS = {"triton": "package triton", "gcc": "a C compiler", "headers": "Python.h"}


@pytest.mark.parametrize("missing", GPU_NEEDS)
def test_what_triton_needs_is_looked_for_before_the_run(missing, monkeypatch, tmp_path):
    """It builds a C extension of Python at its first kernel; containers often lack gcc or the headers."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: missing != "triton")
    monkeypatch.delenv("CC", raising=False)
    which, paths = f"{TOOLCHAIN}.shutil.which", f"{TOOLCHAIN}.sysconfig.get_paths"
    monkeypatch.setattr(which, lambda name: None if missing == "gcc" else name)
    (tmp_path / "Python.h").touch()
    folder = tmp_path / "nowhere" if missing == "headers" else tmp_path
    monkeypatch.setattr(paths, lambda: {"include": str(folder)})
    assert GPU_NEEDS[missing] in missing_compiler()
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(which, lambda name: name)
    monkeypatch.setattr(paths, lambda: {"include": str(tmp_path)})
    assert missing_compiler() is None


def test_a_compiler_that_is_asked_for_by_name_must_be_there(monkeypatch):
    monkeypatch.setattr("pretraining.upstream.toolchain.shutil.which", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=r"inductor needs a C\+\+ compiler"):
        check_speed(Speed(compile="blocks"))
    check_speed(Speed())


def test_the_trainer_s_own_switch_names_its_place():
    """It would compile validation and samples too, and put `_orig_mod` into names."""
    assert all("speed" in TRAINING_KEYS[f"torch_compile{rest}"] for rest in ("", "_backend", "_mode"))
    said = refusal(load_recipe, "features/gpt2", ["training.torch_compile=true"])
    assert "training.torch_compile: does not belong here: the recipe's speed section" in said


def test_every_block_is_found(arguments):
    for name, section in MODELS.items():
        assert len(list(blocks_of(build_model(section, TOKENIZER, arguments)))) == 2, name
