"""You know before you pay: the plan's numbers are those of the built model and of the recipe."""

import json
import re
from fractions import Fraction
from types import SimpleNamespace

import pytest

from pretraining.ds_config import ds_config_names, load_ds_config, zero_stage
from pretraining.planning.costs import CostVerb
from pretraining.planning.gate import judge_plan
from pretraining.planning.gpus import find_gpu
from pretraining.planning.memory.states import model_state, state_of
from pretraining.planning.quantities import dollars, duration, hours, num_bytes
from pretraining.planning.run_plan import Machine, build_run_plan, checkpoints_written
from pretraining.planning.screen import as_text, full_plan, plan_line, world_sizes
from pretraining.planning.setup import Family, Setup
from pretraining.planning.shapes import HIDDEN, Tensor
from pretraining.planning.sizes import model_size
from pretraining.recipe import load_recipe, model_with_defaults, recipe_names
from pretraining.recipe.model import value_of
from pretraining.recipe.refusals import load_recipe_and_ds_config
from tests.gear.runs import REPOSITORY, answer_of, execute

GPT2 = {"model_type": "gpt2", "vocab_size": 640, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 4}
GROUPED = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 176}
GROUPED |= {"max_position_embeddings": 128, "num_hidden_layers": 3, "num_attention_heads": 8}
GROUPED |= {"num_key_value_heads": 2}
MIXTRAL = {"model_type": "mixtral", **GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = {"model_type": "qwen3_moe", **GROUPED, "num_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE["moe_intermediate_size"] = 24
BIASES = {"attention_bias": True, "mlp_bias": True, "head_dim": 16}
MIXED = {"mlp_only_layers": [1], "head_dim": 16, "attention_bias": True}
DENSE_MODELS = {
    "gpt2 n_inner": {**GPT2, "n_inner": 100},
    "gpt2 untied": {**GPT2, "tie_word_embeddings": False},
    "llama": {"model_type": "llama", **GROUPED},
    "llama biases": {"model_type": "llama", **GROUPED, **BIASES},
    "llama tied": {"model_type": "llama", **GROUPED, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **GROUPED},
    "qwen3 biases": {"model_type": "qwen3", **GROUPED, "attention_bias": True, "head_dim": 8},
}
MOE_MODELS = {
    "mixtral": MIXTRAL,
    "mixtral head_dim": {**MIXTRAL, "head_dim": 32},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe mixed": {**QWEN3_MOE, **MIXED},
    "qwen3_moe sparse step": {**QWEN3_MOE, "decoder_sparse_step": 2},
}
MODELS = {**DENSE_MODELS, **MOE_MODELS}
# `tiny` has a class of its own, which no formula describes; it was GPT-2's shape once.
OF_TYPES = ["features/gpt2", *(name for name in recipe_names() if name != "tiny")]
SHIPPED = {name: load_recipe(name).model for name in OF_TYPES}
H200 = find_gpu("H200")


def setup(name: str, ranks: int = 1, *settings: str, way: str | None = None) -> Setup:
    """As a command reads a recipe for so many ranks. way: in place of its own ds_config."""
    return Setup(*load_recipe_and_ds_config(name, settings, way), ranks)


def build(model, device="meta"):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**model))


RECIPES_PAGE = (REPOSITORY / "recipes" / "README.md").read_text(encoding="utf-8")


def scientific(rate: float) -> str:
    """0.00025 as 2.5e-4."""
    digits, _, power = f"{rate:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def table_row(recipe) -> str:
    """The recipe's row in the table of recipes/README.md, up to where its values are from."""
    full, rates = model_with_defaults(recipe.model), [scientific(recipe.training.learning_rate)]
    if recipe.optimizer.matrix_learning_rate:
        rates.append(f"Muon {scientific(recipe.optimizer.matrix_learning_rate)}")
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    width, layers, heads, positions = (value_of(full, key) for key in keys)
    of_keys = full.get("num_key_value_heads", heads)
    experts = full.get("num_local_experts") or full.get("num_experts")
    tokens = recipe.num_tokens
    cells = [f"`{recipe.name}`", f"{model_size(recipe.model).total:,}", full["model_type"], f"{width:,}"]
    cells += [f"{layers}", f"{heads}" if of_keys == heads else f"{heads} ({of_keys})"]
    cells += [f"{experts} ({full['num_experts_per_tok']})" if experts else "", f"{positions:,}"]
    cells += [f"{tokens / 1e9:,.1f} B" if tokens >= 1e9 else f"{tokens / 1e6:.3f} M"]
    cells += [f"{recipe.tokens_per_step:,}", ", ".join(rates), recipe.deepspeed]
    return f"| {' | '.join(cells)} | ".replace("|  |", "| |")


def test_the_table_of_recipes_is_what_their_files_say():
    """Every recipe has one row, and each number of it follows from the recipe."""
    rows = [line for line in RECIPES_PAGE.splitlines() if line.startswith("| `")]
    for name in recipe_names():
        (row,) = [line for line in rows if line.startswith(f"| `{name}` |")]
        assert row.startswith(table_row(load_recipe(name)))
    heads = [line.split("`")[1] for line in rows[: len(recipe_names())]]
    assert sorted(heads) == recipe_names()


def single(numel: int, config: dict | None, ranks: int, sixteen_bit: bool = True):
    """The states of a single matrix of so many elements."""
    matrix, precision = Tensor(numel, HIDDEN, 0, 100), SimpleNamespace(weights=2 if sixteen_bit else 4)
    case = {"recipe": load_recipe("7b"), "ds_config": config, "stage": zero_stage(config), "accumulation": 1}
    case = SimpleNamespace(**case, precision=precision, wide_of=lambda family: ())
    return model_state(case, Family((matrix,), (), numel, numel, ranks))


def test_model_state_bytes_per_parameter():
    """Weights 2, fp32 sums of gradients 4, master and moments 12 bytes under bf16, sharded by stage."""
    per_parameter = {
        name: single(8000, load_ds_config(name), 8).gpu / 8000
        for name in ds_config_names()
        if name != "zero1_tp2"  # some parameters are split, and others are whole
    }
    assert per_parameter == {
        "zero0": 16,
        "zero1": 2 + 4 + 12 / 8,
        "zero2": 2 + 16 / 8,
        "zero2_fp16": 2 + 16 / 8,
        "zero3": 18 / 8,
        "zero2_offload": 2,
        "zero3_offload": 2 / 8,
        "zero3_nvme": 0,
        "zero3_hpz": 18 / 8 + 2 / 8,
        "zero3_sp4": 18 / 8,
        "zero2_ep2": 2 + 16 / 8,
    }
    assert single(1000, None, 8).gpu == 16000
    assert single(1000, load_ds_config("zero0"), 8, sixteen_bit=False).gpu == 16000
    assert single(1000, load_ds_config("zero3"), 1, sixteen_bit=False).gpu == 20000


@pytest.mark.parametrize("name", ["zero2_offload", "zero3_offload", "zero3_nvme"])
def test_offloading_moves_state_and_loses_none(name):
    """Off the GPU goes what the ds_config says; DeepSpeed keeps more on the host than it takes from the GPU."""
    base = name.partition("_")[0]
    here, there = (single(8000, load_ds_config(key), 8) for key in (base, name))
    assert there.gpu + there.host + there.nvme > here.gpu
    assert (there.host, there.nvme) == {
        "zero2_offload": (12000 + 4000 + 2000, 0),  # optimizer, a gradient for each master, weights in 16 bit
        "zero3_offload": (12000 + 4000 + 4000, 0),  # optimizer, sums, a gradient for each master
        # sums, a gradient for each master, and weights, which find room there (`max_in_cpu`)
        "zero3_nvme": (4000 + 4000 + 2000, 12000),
    }[name]


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_has_a_plan_on_one_screen(name):
    """Promise: parameters, steps, memory, FLOPs and disk from the recipe alone."""
    # on as many ranks as its layout needs
    case = setup(name, 8 if name in ("moe-30b-a3b", "llama-405b") else 2)
    plan = build_run_plan(case)
    values = plan.to_dict()
    assert values["steps"] * values["tokens_per_step"] == values["tokens"]
    groups = plan.world_size // case.degrees.ranks_per_sample
    batch = groups * values["micro_batch"] * values["sequence_length"]
    assert plan.accumulation_steps * batch == values["tokens_per_step"]
    for gpu in (None, H200):
        answer = full_plan(case, gpu)
        text = as_text(answer)
        assert f"{plan.parameters:,}" in text and f"{values['steps']:,}" in text
        # split work has rows of its own: the layout and the messages of three kinds
        most = 44 if case.degrees.ranks_per_sample > 1 or case.degrees.expert > 1 else 40
        # how a class of one's own is counted, rates that no table has, and what to expect of them
        most += 3 if case.recipe.extensions else 0
        assert len(text.splitlines()) <= most and max(map(len, text.splitlines())) <= 120
        assert json.loads(json.dumps(answer))["parameters"] == plan.parameters
        assert len(world_sizes(case, gpu).splitlines()) > 2


def test_the_screen_says_what_it_takes_and_what_is_tight():
    """Memory by part and in all, time, money, disk, data; without a GPU's name, what needs one is asked for."""
    answer = full_plan(setup("30b", 8), H200)
    text = as_text(answer)
    assert sum(answer["memory"]["parts"].values()) + answer["memory"]["reserve"] == answer["memory"]["total"]
    assert all(f"  {part} " in text for part in answer["memory"]["parts"])
    labels = "largest,host memory,time,MFU,expected,step,money,energy,disk,data,tight"
    for label in labels.split(","):
        assert any(line.startswith(f"{label} ") for line in text.splitlines()), label
    paid = answer["forecast"]["cost"]["gpu_hours"]
    assert paid == pytest.approx(8 * answer["forecast"]["expected_seconds"] / 3600)
    # one line below the shares of kernels, of words that anybody knows
    lines = text.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("kernels"))
    assert "matrix products" in lines[place + 1] and lines[place + 2].startswith("step")
    # rates of kernels are assumed, some GPUs and shapes exceed them, so that nothing is a bound
    words = " ".join(text.split())
    assert "a GPU), estimated, without validation" in words
    assert words.count("(estimated from assumed rates)") == 2
    assert not re.search(r"at least \d|or more|ceiling|stays below", words)
    assert "estimated from assumed rates" in (REPOSITORY / "README.md").read_text(encoding="utf-8")
    bare = as_text(full_plan(setup("30b", 8), None))
    assert "give --gpu NAME" in bare and "H200" in bare and "A100-40GB" not in bare


def test_one_plan_has_one_price():
    """The first line, `expected`, `money`, the table of GPUs and the cost verb count the same hours."""
    case, gpu = setup("124m", 8), find_gpu("H100")
    answer = full_plan(case, gpu)
    speed, text = answer["forecast"], as_text(answer)
    assert speed["expected_seconds"] > 1.2 * speed["seconds"], "the test tests nothing"
    price, paid = dollars(speed["cost"]["prices"][0]["dollars"]), hours(speed["cost"]["gpu_hours"])
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert all(price in rows[label] for label in ("in short", "expected", "money"))
    assert f"{paid} GPU-hours expected" in rows["money"]
    lasts = duration(speed["expected_seconds"])
    assert all(lasts in rows[label] for label in ("in short", "expected"))
    of_eight = world_sizes(case, gpu).splitlines()[4]
    assert of_eight.split()[0] == "8" and lasts in of_eight and of_eight.endswith(paid)
    of_verb = dict(line.split("  ", 1) for line in CostVerb().as_text(speed).splitlines())
    assert of_verb["GPU-hours"].strip() == f"{paid} expected" and price in of_verb["at Nebius"]
    verdict = judge_plan(build_run_plan(case), Machine(gpu.memory_bytes, gpu, True))
    assert f"{price} for the {lasts} expected" in plan_line(verdict)


def test_a_plan_says_what_a_ramp_leaves_over_and_how_few_tokens_a_parameter_gets():
    ramped = setup("features/batch-ramp")
    left = ramped.recipe.budget.tokens - ramped.tokens
    text = " ".join(as_text(full_plan(ramped, None)).split())
    said = f"{ramped.tokens:,} ({left:,} less than the budget: the ramp leaves them over)"
    assert left > 0 and said in text
    few = setup("124m", 1, "budget.tokens=6291456", "training.warmup_steps=1")
    assert "0.0505 per parameter" in as_text(full_plan(few, None))


def test_a_plan_of_several_nodes_has_the_disk_and_the_links_of_one():
    """--nodes: their GPUs are fewer than sold with this kind, so that more messages leave them."""
    words = ["train.py", "--recipe", "30b", "--plan", "--world_size", "16", "--gpu", "H200"]
    asked = (["python", *words, *more, "--json"] for more in ([], ["--nodes", "4"]))
    full, half = (answer_of(execute(command).stdout) for command in asked)
    plan = build_run_plan(setup("30b", 16))
    for answer, nodes in ((full, 2), (half, 4)):
        shared = plan.data_bytes + plan.export_bytes
        assert answer["disk_bytes_of_node"] == shared + plan.checkpoint_disk_bytes / nodes
        assert answer["memory"]["gpus_of_node"] == 16 / nodes
        assert answer["forecast"]["scaling"]["nodes"] == nodes
    words = f"on disks of their own at most {num_bytes(half['disk_bytes_of_node'])} each"
    assert words in " ".join(as_text(half).split())


def test_the_screen_offers_what_fits():
    """A plan that does not fit is an answer, not an error: it says what would."""
    answer = full_plan(setup("30b", 8, "training.per_device_train_batch_size=64"), H200)
    (refusal,) = answer["refusals"]
    assert refusal["remedy"].endswith("--set training.per_device_train_batch_size=2")
    text = as_text(answer)
    assert "does not fit" in text and refusal["remedy"] in " ".join(text.split())


NOTHING_SAVED = "training.save_strategy=no"


def test_the_disk_of_a_plan_is_all_that_the_run_writes_and_reads():
    """One checkpoint every `save_steps`, as the Trainer counts, and one after the last step. Of them those that are
    kept and one being written, weights of earlier ones, token shards, the export: their sum, once."""
    every = ["training.save_steps=300", f"budget.tokens={2048 * 1000}"]
    assert checkpoints_written(load_recipe("features/gpt2", every)) == 4
    assert checkpoints_written(load_recipe("features/gpt2", [NOTHING_SAVED])) == 0
    assert checkpoints_written(load_recipe("features/gpt2", ["training.save_steps=0.25"])) == 4
    shares = ["training.save_steps=0.3", "training.eval_steps=0.1", "checkpoints.keep_best=1"]
    assert checkpoints_written(load_recipe("features/gpt2", [*shares, f"budget.tokens={2048 * 11}"])) == 3
    keep_all = ["checkpoints.keep_last=null", "training.save_steps=7", f"budget.tokens={2048 * 20}"]
    assert build_run_plan(setup("features/gpt2", 1, *keep_all)).checkpoints_kept == 3
    plan = build_run_plan(setup("features/gpt2", 2))
    weights = 4 * plan.parameters
    assert plan.checkpoints_kept == 2 and plan.checkpoint_bytes == 3 * weights
    assert plan.checkpoint_disk_bytes == 3 * plan.checkpoint_bytes
    assert plan.disk == {
        "checkpoints kept": 2 * plan.checkpoint_bytes,
        "one being written": plan.checkpoint_bytes,
        "token shards": 2 * plan.setup.tokens,
        "export": weights,
    }
    demoted = build_run_plan(setup("features/gpt2", 2, "checkpoints.demote_to_weights=true"))
    assert demoted.disk["weights of earlier checkpoints"] == 2 * weights
    none = build_run_plan(setup("features/gpt2", 2, NOTHING_SAVED))
    assert set(none.disk) == {"token shards", "export"} and none.checkpoint_disk_bytes == 0
    large = build_run_plan(setup("30b", 8))
    assert large.disk["export"] == 2 * large.parameters  # bf16
    for settings in ([], [NOTHING_SAVED]):
        answer = full_plan(setup("30b", 8, *settings), H200)
        total = sum(answer["disk"].values())
        assert as_text(answer).splitlines()[2].endswith(f"{num_bytes(total)} of disk")
        assert answer["disk_bytes"] == answer["forecast"]["step"]["disk_bytes"] == total


PLANS = [
    (path, block)
    for path in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
    for block in re.findall(r"```\n(plan of .*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
]


def test_the_plans_that_the_pages_show_are_those_that_are_printed():
    assert PLANS
    for path, block in PLANS:
        name, ranks, gpu = re.match(r"plan of (\S+) on ([\d,]+) x (\S+)", block).groups()
        said = as_text(full_plan(setup(name, int(ranks.replace(",", ""))), find_gpu(gpu)))
        assert block.strip() == said.strip(), path.name


SHARDED = (REPOSITORY / "ds_configs" / "README.md").read_text(encoding="utf-8")
FORMULAS = re.findall(r"^\| `(zero\w+)` \|.*\| ([^|]*\d[^|]*) \|$", SHARDED, re.MULTILINE)


@pytest.mark.parametrize(("name", "formula"), FORMULAS)
def test_the_bytes_per_parameter_of_a_ds_config_are_the_plan_s(name, formula):
    """The column of ds_configs/README.md against a plan's memory, but for the few weights that ZeRO-3 never shards."""
    for ranks in (8, 64):
        # zero2_ep2 is for mixtures, and of a dense model as zero2 is
        case = Setup(load_recipe("7b", (), name), load_ds_config(name), ranks)
        expected = sum(float(Fraction(term.strip().replace("N", str(ranks)))) for term in formula.split("+"))
        assert state_of(case).gpu / case.parameters == pytest.approx(expected, rel=5e-3)


def test_the_parts_of_those_bytes_are_the_plan_s():
    """What the page says the 18 bytes and the 16 are made of."""
    words = " ".join(SHARDED.split())

    def parts(name: str) -> list[float]:
        case = setup("7b", way=name)
        state = state_of(case)
        held = (state.parameters, state.gradients + state.gradient_accumulation, state.masters, state.moments)
        return [round(each / case.parameters, 2) for each in held]

    assert parts("zero3") == [2, 4, 4, 8] and parts("zero0") == [4, 4, 0, 8]
    assert "weights 2, fp32 gradient sums 4, fp32 masters 4, Adam's moments 8, together 18" in words
    assert "fp32 weights 4, their gradients 4 and the moments 8, together 16" in words
