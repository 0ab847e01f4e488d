"""The plan's utilization is a ceiling that was counted: products, attention and bytes of the real model's kernels."""

import json
import tempfile

import pytest

from pretraining.planning.constants import table
from pretraining.planning.costs import forecast
from pretraining.planning.gpus import FOLDER_VARIABLE, find_gpu, keep_rates
from pretraining.planning.memory.need import memory_need, skips_last_product
from pretraining.planning.messages import EXPERT
from pretraining.planning.sizes import model_size
from pretraining.planning.step_time import (
    ceiling,
    expected_rates,
    last_product,
    layer_mode,
    recipe_utilization,
    step_time,
    sustained_rates,
)
from pretraining.recipe import load_recipe, recipe_names
from tests.gear.runs import REPOSITORY, completed, execute
from tests.planning.test_planning import H200, setup


def planned(name: str, *changes: str, world_size: int = 8, way: str | None = None):
    case = setup(name, world_size, *changes, way=way)
    return ceiling(case, H200, case.recipe.training.product_precision)


@pytest.mark.parametrize(
    ("name", "least"), [("124m", 0.50), ("1.5b", 0.60), ("7b", 0.50), ("moe-1.5b", 0.35)]
)
def test_a_shipped_recipe_can_reach_this_share_of_an_h200(name, least):
    """As shipped, on eight GPUs, with whatever the step sends."""
    found, time = planned(name), step_time(setup(name, 8), H200)
    assert found.mfu >= least
    assert found.mfu * time.compute_seconds / time.seconds >= least


@pytest.mark.parametrize("way, share", [("zero0", 1), ("zero3", 1 / 8), ("zero3_offload", 0)])
def test_an_average_moves_twelve_bytes_of_each_weight_that_a_rank_steps(way, share):
    """In every step, or in one of so many; where the host steps the weights, it is the host's time."""
    average = "optimizer.average_decay=0.999"
    case = setup("124m", 8, way=way)
    expected = 12 * share * case.size.total / sustained_rates(H200, "bf16", 8).bytes / case.accumulation
    without, each, seldom = (
        planned("124m", *changes, way=way).seconds["optimizer"]
        for changes in ((), (average,), (average, "optimizer.average_steps=4"))
    )
    assert each - without == pytest.approx(expected) == pytest.approx(4 * (seldom - without))
    slower, faster = (step_time(setup("124m", 8, *changes, way=way), H200) for changes in ((average,), ()))
    # of the device or of the host; the step itself may be bound by the launches of its kernels
    assert slower.compute_seconds + slower.offload_seconds > faster.compute_seconds + faster.offload_seconds


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_has_a_ceiling_below_what_products_sustain(name):
    """No plan promises more than the share of the peak that products alone reach."""
    case = setup(name, 8 if name == "llama-405b" else 1)
    for gpu in (H200, find_gpu("A100-80GB")):
        found = recipe_utilization(case, gpu, ceiling(case, gpu, case.recipe.training.product_precision))
        assert found.assumed and "estimated from assumed rates" in found.source
        assert 0.02 < found.mfu < 1.1 * table("rates")["sustained"]["products"].get(gpu.architecture)["value"]


SLOWER = ["124m model.activation_function=gelu_new speed.compile=none", "124m loss.compile=false"]
SLOWER += ["124m loss.kind=plain", "124m training.per_device_train_batch_size=2", "7b speed.compile=none"]


@pytest.mark.parametrize("slower", SLOWER)
def test_what_costs_kernels_lowers_the_ceiling(slower):
    """The plan tells a user what a choice costs before he pays for it.

    Norms, rotary embedding and gate of a Llama are chains of small kernels; GPT-2's are single kernels as they are.
    """
    name, *changes = slower.split()
    assert planned(name).mfu > (1.1 if name == "7b" else 1) * planned(name, *changes).mfu


def test_recomputed_layers_lower_the_ceiling():
    """The forward pass that is done twice takes its products, its attention and its bytes once more."""
    once, twice = (planned("7b", f"training.activation_checkpointing={again}") for again in ("false", "true"))
    assert twice.mfu < once.mfu
    assert once.seconds["recomputation"] == 0 < twice.seconds["recomputation"]
    assert twice.mfu_without_recomputation == pytest.approx(once.mfu)


def test_the_ceiling_of_a_mixture_is_what_its_page_says():
    """Above what others measured on such GPUs, on which it fits; every number of the table is the plan's."""
    case, gpu, measured_by_others = setup("moe-30b-a3b", 8), find_gpu("H100"), 12_040
    assert memory_need(case, gpu.memory_bytes).total < gpu.memory_bytes
    seconds = ceiling(case, gpu, case.recipe.training.product_precision).seconds
    rate = case.recipe.tokens_per_step / 8 / step_time(case, gpu).seconds
    counted = [seconds[name] for name in ("products", "attention", "other kernels", "recomputation", EXPERT)]
    counted.append(sum(seconds[name] for name in ("loss", "gradients", "optimizer")))
    page = (REPOSITORY / "docs" / "speed.md").read_text(encoding="utf-8")
    table_of_page = page.partition("## The ceiling of a mixture")[2].partition("\n\n- ")[0]
    rows = [row.split("|") for row in table_of_page.splitlines() if row.startswith("| ")][1:]
    assert [row[3].strip() for row in rows] == [*(f"{1000 * each:.0f}" for each in counted), f"{rate:,.0f}"]
    assert rate > measured_by_others


def test_split_experts_are_computed_again_up_to_their_last_product():
    """Whole ones are weighted behind it, so that all of it is computed again."""
    for way, skips in (("zero1:expert=8", True), ("zero3:expert=8", True), ("zero1", False)):
        assert skips_last_product(setup("moe-30b-a3b", 8, way=way)) is skips


@pytest.mark.parametrize(("name", "all_again"), [("7b", True), ("124m", False)])
def test_zero_3_multiplies_the_last_product_of_a_recomputed_layer_again(name, all_again):
    """Its linear function keeps its input too late to stop before it; GPT-2's layers are no linear functions."""
    again = ("training.activation_checkpointing=true", "speed.compile=none")
    spent = {way: planned(name, *again, way=way).seconds["recomputation"] for way in ("zero2", "zero3")}
    recipe = load_recipe(name)
    tokens, peak = recipe.micro_batch * recipe.sequence_length, sustained_rates(H200, "bf16", 8).product_flops
    last = 2 * model_size(recipe.model).num_layers * last_product(recipe.model) * tokens / peak
    assert spent["zero3"] - spent["zero2"] == pytest.approx(last if all_again else 0)


def test_rates_measured_on_this_machine_take_the_place_of_assumed_ones(tmp_path, monkeypatch):
    """What the doctor kept counts for as many of the same GPUs, and the plan says so."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    case = setup("7b", 8)
    assumed = planned("7b"), step_time(case, H200)
    keep_rates({"product_flops": 3e14, "all_reduce_bytes_per_second": 1e9}, "here", "H200", 8)
    measured = planned("7b"), step_time(case, H200)
    assert measured[0].seconds["products"] > 2 * assumed[0].seconds["products"]
    assert measured[1].communication_seconds == pytest.approx(450 * assumed[1].communication_seconds)
    assert "measured here on" in recipe_utilization(case, H200, measured[0]).source
    assert planned("7b", world_size=16).seconds["products"] == assumed[0].seconds["products"]


EXPECTED = {"124m": (0.35, 0.40), "1.5b": (0.50, 0.56)}
"""MFU on H200s: what public runs of 124M reach on H100s (0.40), and the same count with each kernel's likely rate."""


def test_what_to_expect_is_less_than_the_estimate_most_of_all_of_small_models(tmp_path, monkeypatch):
    """Rates by width, head and length; what the doctor measured is of these shapes, and not lowered again."""
    for name, (low, high) in EXPECTED.items():
        speed = forecast(setup(name, 8), H200)
        assert low <= speed["expected"]["mfu"] <= high < speed["mfu"]
    assert forecast(setup("124m", 8), H200, mfu=0.4)["expected"] is None
    case = setup("124m", 8)
    rates = [expected_rates(case, H200, "bf16").attention_flops]
    longer = setup("124m", 8, "model.n_positions=4096", "data.sequence_length=4096")
    wider = setup("124m", 8, "model.n_head=6")
    rates += [expected_rates(each, H200, "bf16").attention_flops for each in (longer, wider)]
    assert rates[0] < min(rates[1:])
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    keep_rates({"product_flops": 3e14}, "here", "H200", 8)
    assert expected_rates(case, H200, "bf16").product_flops == 3e14


def test_rates_of_the_first_hour_are_what_plans_expect(tmp_path):
    """A line of benchmarks/rates.py, as it prints it, for this GPU alone, at full size alone, the newest."""
    line = json.loads(execute(["forked", "0", "benchmarks/rates.py", "--small"]).stdout.splitlines()[-1])
    line |= {"small": False, "environment": {"device": "NVIDIA H200"}, "when": "2026-11-26"}
    rows = [
        line,
        {**line, "when": "2026-11-25", "memory": 1.0},
        {**line, "small": True, "when": "2026-12-01"},
    ]
    (tmp_path / "nvidia-h200.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    case = setup("124m", 8)
    found = expected_rates(case, H200, "bf16", tmp_path)
    widest = line["attention"]["value"][-1]
    assert (found.product_flops, found.bytes) == (line["products"]["value"][-1], line["memory"])
    assert found.attention_flops == widest["value"][-1] and found.products_measured_on == "2026-11-26"
    assumed = expected_rates(case, H200, "bf16", tmp_path / "nothing")
    assert expected_rates(case, find_gpu("A100-80GB"), "bf16", tmp_path).product_flops < assumed.product_flops


def in_process(program: str) -> dict:
    """The JSON that a program prints whose modules are those of benchmarks/."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(f"import sys; sys.path.insert(0, 'benchmarks')\n{program}")
        script.flush()
        finished = completed(["forked", "0", script.name])
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def counted() -> dict:
    """Counts of this machine's libraries, beside the table's."""
    return in_process(
        "import json, kernel_factors, roofline\n"
        "found = {mode: kernel_factors.layer_factors('gpt2', how) for mode, how in kernel_factors.COMPILED.items()}\n"
        "loss = kernel_factors.loss_factors()\n"
        "from types import SimpleNamespace\n"
        "asked = dict(recipe='124m', deepspeed=None, gpu='H200', world_size=8, set=[], compile=None, top=3)\n"
        "print(json.dumps({'gpt2': found, 'loss': loss, 'whole': roofline.ceiling_of(SimpleNamespace(**asked))}))"
    )


def test_the_table_is_what_the_installed_libraries_launch(counted):
    """tables/kernels.json is counted, not believed: a new torch or transformers that moves more bytes fails here."""
    kept = table("kernels")
    assert counted["gpt2"] == kept["layers"]["gpt2"]
    assert counted["loss"] == kept["loss"]


def test_the_plan_has_the_ceiling_of_the_counted_recipe(counted):
    """The plan's formula against the whole model, loss and engine, run at full size on tensors without storage."""
    whole = counted["whole"]
    assert whole["mfu_ceiling"] == pytest.approx(whole["planned_mfu_ceiling"], rel=0.03)
    assert whole["planned_mfu_ceiling"] == pytest.approx(planned("124m").mfu, abs=1e-4)


def test_kernels_are_counted_as_they_are_launched():
    """FLOPs and bytes of operations whose counts are known; views launch nothing; a compiled chain is one kernel."""
    found = in_process(
        """
import json, torch
from tests.gear.kernels import ATTENTION, OTHER, PRODUCT, Kernels, counting_compiler, stand_in_tensors
import torch.nn.functional as F
kernels = Kernels()
def work(kind):
    total = kernels.sum(kind=kind)
    return [total.launches, total.flops, total.bytes]
found = {}
with stand_in_tensors(), counting_compiler(kernels):
    a, b = torch.empty(8, 16, dtype=torch.bfloat16), torch.empty(16, 4, dtype=torch.bfloat16)
    cases = {
        "product": lambda: a @ b,
        "view": lambda: a.view(4, 32).t()[:2].unsqueeze(0),
        "in place": lambda: a.mul_(2),
        "copy": lambda: a.copy_(torch.empty(8, 16, dtype=torch.bfloat16)),
        "lookup": lambda: F.embedding(torch.empty(3, dtype=torch.long), torch.empty(1000, 16, dtype=torch.bfloat16)),
        "attention": lambda: F.scaled_dot_product_attention(*(torch.empty(1, 2, 64, 16),) * 3, is_causal=True),
    }
    chain = lambda x: (x.sin() + 1).cos() * x
    compiled = torch.compile(chain)
    compiled(a)
    for name, run in {**cases, "chain": lambda: chain(a), "compiled chain": lambda: compiled(a)}.items():
        kernels.work.clear()
        with kernels:
            run()
        found[name] = {kind: work(kind) for kind in (PRODUCT, ATTENTION, OTHER)}
print(json.dumps(found))
"""
    )
    assert found["product"]["product"][:2] == [1, 2 * 8 * 16 * 4]
    assert found["view"]["other"] == [0, 0, 0]
    assert found["in place"]["other"] == [1, 0, 2 * 8 * 16 * 2]
    assert found["copy"]["other"] == [1, 0, 2 * 8 * 16 * 2]
    assert found["lookup"]["other"][2] == 3 * 8 + 2 * (3 * 16 * 2)
    assert found["attention"]["attention"][1] == 2 * 2 * 2 * 64 * 64 * 16 / 2
    assert found["chain"]["other"][0] == 4 and found["compiled chain"]["other"] == [1, 0, 2 * 8 * 16 * 2]


def test_layers_are_taken_as_the_run_would_run_them():
    """Compiled where `speed.compile: auto` compiles on a GPU, eager where it does not."""
    assert layer_mode(setup("124m")) == "compiled"
    for change in ("speed.compile=none", "model.resid_pdrop=0.1"):
        assert layer_mode(setup("124m", 1, change)) == "eager"
