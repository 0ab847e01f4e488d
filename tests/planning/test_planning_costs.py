"""Time, money and layouts: formulas against what they must add up to, tables against their own rules."""

import json
import re
import sys
from types import SimpleNamespace

import pytest

from pretraining.planning import scaling_laws as laws
from pretraining.planning.__main__ import main
from pretraining.planning.constants import table
from pretraining.planning.costs import CheckpointCost, cost_of_checkpoints, energy_words, forecast
from pretraining.planning.fit import fitting
from pretraining.planning.gpus import all_gpus, find_gpu, prices_of
from pretraining.planning.messages import GRADIENTS, WEIGHTS, step_messages, zero_bytes
from pretraining.planning.parallelism import Cluster, Division, layout_memory, layouts
from pretraining.planning.run_plan import build_run_plan
from pretraining.planning.setup import Setup
from pretraining.planning.sizes import flops_per_token, model_size
from pretraining.planning.step_time import expected_utilization, step_time
from pretraining.recipe import load_recipe
from tests.gear.finished_data import refusal
from tests.gear.runs import execute
from tests.planning.test_planning import setup

LLAMA = load_recipe("7b").model
H100 = find_gpu("H100")


@pytest.mark.parametrize("gpu", all_gpus().values(), ids=all_gpus())
def test_peaks_are_dense(gpu):
    """Honest numbers: vendors double their peaks for sparsity; dense ones keep the ratios of the hardware."""
    peaks = gpu.dense_peak_flops
    assert gpu.training_precision in peaks
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.02)
    if "bf16" in peaks:
        assert peaks["bf16"] == peaks["fp16"]
        assert peaks.get("tf32", peaks["bf16"] / 2) == pytest.approx(peaks["bf16"] / 2, rel=0.03)
    # FLOPs per byte of memory bandwidth: double counting would put a GPU beyond all others
    assert 50e12 < peaks["fp16"] <= 2500e12
    assert 70 < peaks["fp16"] / gpu.memory_bandwidth_bytes_per_second < 430


def test_every_constant_has_a_source():
    """A user can follow each number to a document, or sees that it is an assumption; with the day it is of."""
    day = re.compile(r"20\d\d-\d\d-\d\d")
    for name, gpu in all_gpus().items():
        assert len(gpu.source) > 20 and day.fullmatch(table("gpus")["gpus"][name]["looked_up"])
        assert set(gpu.assumed) <= {"network_bits_per_second", "pcie_bytes_per_second"}  # never the GPU's own
    offers = [(entry["gpu"], entry["provider"]) for entry in table("prices")["prices"]]
    # the newest alone: two prices of one provider would leave open which one holds
    assert len(set(offers)) == len(offers)
    assert {("H100-SXM", provider) for provider in ("AWS", "Azure", "GCP", "Lambda")} <= set(offers)
    for entry in table("prices")["prices"]:
        assert find_gpu(entry["gpu"]).name == entry["gpu"]
        assert entry["dollars_per_gpu_hour"] > 0 and entry["source"] and entry["place"]
        assert day.fullmatch(entry["date"])
    rates = {**table("rates"), **table("memory")}
    sustained = [entries for name, entries in rates["sustained"].items() if name != "about"]
    assert all("*" in entries for entries in sustained)
    tables = [*sustained, rates["mfu"]]
    expected = {name: entry for name, entry in rates["expected"].items() if name != "about"}
    for name in ("products", "attention"):  # of several sizes
        assert day.fullmatch(expected[name]["looked_up"])
        assert re.search("assumption|figure", expected[name]["source"])
    of_stages = rates.pop("launch_seconds")
    assert day.fullmatch(of_stages["looked_up"])
    assert "measured by benchmarks/launches.py" in of_stages["source"]
    rates = [entry for name, entry in rates.items() if name not in ("about", "mfu", "sustained", "expected")]
    rates += [expected["memory"], expected["gaps"]]
    for entry in [*rates, *(entry for entries in tables for entry in entries.values())]:
        assert entry["value"] > 0 and day.fullmatch(entry["looked_up"])
        assert re.search(r"assumption|measured|github|docs\.|20\d\d|H100", entry["source"]), entry
    for name, law in table("scaling_laws").items():
        laws = law.values() if name in ("parametric", "frontiers") else [law] if name != "about" else []
        assert all(re.search(r"20\d\d", each["source"]) for each in laws)
    assert set(table("rates")["mfu"]) - {"*"} <= set(all_gpus())


REPORTED = """NVIDIA H100 80GB HBM3: H100-SXM; NVIDIA H100 PCIe: H100-PCIe; h100: H100-SXM; NVIDIA H100 NVL: H100-NVL;
NVIDIA A100-SXM4-80GB: A100-80GB; NVIDIA A100-SXM4-40GB: A100-40GB; NVIDIA A100-PCIE-40GB: A100-40GB-PCIe;
NVIDIA H200: H200; NVIDIA H200 NVL: H200-NVL; NVIDIA GH200 480GB: GH200; NVIDIA GB200: GB200; NVIDIA B300 SXM6 AC: B300;
Tesla T4: T4; Tesla V100-SXM2-32GB: V100-SXM-32GB; NVIDIA GeForce RTX 4090: RTX-4090; AMD Instinct MI300X: MI300X;
NVIDIA L4: L4; NVIDIA A10: A10; NVIDIA A10G: A10G; NVIDIA A40: A40; NVIDIA RTX 6000 Ada Generation: RTX-6000-Ada;
NVIDIA GeForce RTX 5090: RTX-5090"""


def test_gpus_are_found_by_the_names_devices_report():
    """An unknown one names the nearest, and a precision that one lacks those that it has."""
    for each in REPORTED.replace("\n", " ").split("; "):
        reported, _, name = each.partition(": ")
        assert find_gpu(reported).name == name
    assert "H200" in refusal(find_gpu, "H20")
    assert re.search(r"has no bf16 peak .* it has fp32, fp16", refusal(find_gpu("T4").peak_flops, "bf16"))


def test_prices_come_cheapest_first():
    """A GPU without a dated price has none: the plan says so rather than inventing one."""
    prices = [entry["dollars_per_gpu_hour"] for entry in prices_of(H100)]
    assert len(prices) > 1 and prices == sorted(prices)
    assert prices_of(find_gpu("V100")) == []


def test_communication_volume_by_stage():
    """ZeRO, section 7: 2 psi at stages 0 to 2, 3 psi at stage 3, here of 2 bytes on many ranks.

    ZeRO++: with hpZ, of stage 3's three messages the backward gather no longer crosses the network.
    """
    many, psi = 10**9, 1000
    for accumulation, expected in ((1, (2, 2, 2, 3)), (4, (2, 2, 5, 12))):
        sent = [sum(zero_bytes(psi, stage, many, accumulation).values()) / 2 for stage in range(4)]
        assert sent == pytest.approx([times * psi for times in expected])
    assert sum(zero_bytes(psi, 3, 1).values()) == 0
    plain, hpz = (zero_bytes(psi, 3, 64, hpz=width) for width in (1, 8))
    assert hpz[GRADIENTS] + hpz[WEIGHTS] == pytest.approx(2 / 3 * sum(plain.values()))


def test_messages_go_at_the_rate_of_the_slowest_link():
    """Inside a node at the link's peak, over several at the network's; hpZ's own gathers stay in the node."""

    def sent(way: str, ranks: int) -> tuple[float, float]:
        messages = step_messages(setup("7b", ranks, way=way), H100)
        return sum(message.total for message in messages), sum(message.seconds for message in messages)

    for ranks, rate in ((64, 50e9), (8, 450e9)):
        size, seconds = sent("zero3", ranks)
        assert seconds == pytest.approx(size / rate)
    assert sent("zero3_hpz", 64)[1] < sent("zero3", 64)[1]


def test_a_step_takes_the_longer_of_products_and_messages():
    case = setup("7b", 64, "training.activation_checkpointing=false", way="zero1")
    plain = step_time(case, H100, mfu=0.4)
    flops = case.flops.training * case.recipe.tokens_per_step
    assert plain.compute_seconds == pytest.approx(flops / (64 * H100.peak_flops("bf16") * 0.4))
    assert plain.seconds == plain.compute_seconds and plain.bound_by == "compute"
    small = setup("7b", 64, "training.per_device_train_batch_size=1", way="zero3")
    chopped = step_time(small, H100, mfu=0.4)
    assert chopped.seconds == chopped.communication_seconds and chopped.bound_by == "links"
    again = setup("7b", 64, "training.activation_checkpointing=true", way="zero1")
    recomputed = step_time(again, H100, mfu=0.4)
    assert 1.25 < recomputed.compute_seconds / plain.compute_seconds < 4 / 3


@pytest.mark.parametrize(("name", "ranks"), [("124m", 8), ("qk-norm", 64), ("7b", 64)])
def test_zero_1_is_planned_no_slower_than_zero_2(name, ranks):
    """README: zero1 if everything fits. Stage 2 stops every pass until its gradients are reduced, unless overlapped."""
    single = "training.per_device_train_batch_size=1"
    first, second = (setup(name, ranks, single, way=f"zero{stage}") for stage in (1, 2))
    once, often = step_time(first, H100), step_time(second, H100)
    assert once.seconds <= often.seconds and once.waiting_seconds == 0 < often.waiting_seconds
    second.ds_config["zero_optimization"]["overlap_comm"] = True
    assert step_time(second, H100).waiting_seconds == 0


def test_energy_names_its_overhead():
    """Rated power times hours is not what a plan gives: the data centre's overhead is in it, and said."""
    cost = forecast(setup("124m", way="zero1"), H100)["cost"]
    overhead = table("rates")["power_usage_effectiveness"]["value"]
    assert cost["energy_kwh"] == pytest.approx(overhead * H100.watts * cost["gpu_hours"] / 1000)
    assert f"{overhead:g} x the GPUs' rated power" in energy_words(cost)


def test_a_measured_utilization_takes_precedence(tmp_path):
    """Results of the same device and size feed later plans; another size or device does not."""
    row = {"benchmark": "throughput", "mfu": 0.31, "parameters": 7e9, "when": "2026-01-01"}
    rows = [
        {**row, "environment": {"device": "NVIDIA H100 80GB HBM3"}},
        {**row, "mfu": 0.33, "when": "2026-02-01", "environment": {"device": "NVIDIA H100 80GB HBM3"}},
        {**row, "mfu": 0.99, "when": "2026-03-01", "environment": {"device": "CPU x86_64 2 cores"}},
    ]
    (tmp_path / "h100.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = expected_utilization(H100, 7_241_732_096, tmp_path)
    assert (found.mfu, found.assumed) == (0.33, False) and "measured" in found.source
    for gpu, parameters in ((H100, 1_300_000_000), (find_gpu("A100"), 7_241_732_096)):
        assert expected_utilization(gpu, parameters, tmp_path).assumed


def test_a_small_model_s_gpu_waits_for_its_kernels():
    """Python launches them no faster on a faster GPU; ZeRO-3 has most of them; a large model hides it."""

    def found(way: str, micro_batch: int, compiled: str):
        settings = f"training.per_device_train_batch_size={micro_batch}", f"speed.compile={compiled}"
        return forecast(setup("features/gpt2", 1, *settings, way=way), H100)["step"]

    for way, stage in (("null", "0"), ("zero1", "1"), ("zero3", "3")):
        for compiled, mode in (("none", "eager"), ("auto", "compiled")):
            launch = table("rates")["launch_seconds"]["value"][stage][mode]
            a_pass = launch["micro-batch"] + 4 * launch["layer"]
            for micro_batch in (8, 16):
                step = found(way, micro_batch, compiled)
                assert step["time"]["bound_by"] == "kernel launches"
                assert step["seconds"] == pytest.approx(launch["step"] + 16 / micro_batch * a_pass)
    assert found("zero3", 8, "auto")["seconds"] > 2 * found("zero1", 8, "auto")["seconds"]
    # so the stage with the fewest of them is proposed, not the one whose optimizer moves the fewest bytes
    ways = fitting(setup("features/gpt2", 8), H100)
    assert ways[0].deepspeed == "zero0" and ways[0].step_seconds > 0.002
    large = forecast(setup("7b", 8, way="zero3"), H100)
    assert large["step"]["time"]["bound_by"] == "compute"


def saves_of(case: Setup) -> CheckpointCost:
    saved = cost_of_checkpoints(build_run_plan(case), forecast(case, H100)["step"]["seconds"], H100)
    assert saved.to_dict() == forecast(case, H100)["step"]["checkpoints"]
    return saved


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("hours", [1.0, 100.0])
def test_the_best_checkpoint_interval_loses_least(background, hours):
    """Daly 2006: no other interval loses less; it follows the failures that the recipe expects."""
    settings = [f"checkpoints.background={str(background).lower()}"]
    settings.append(f"checkpoints.hours_between_failures={hours}")
    saved = saves_of(setup("30b", 256, *settings))
    best = saved.best_every_seconds
    assert saved.failure_seconds == hours * 3600 and best >= saved.write_seconds
    # a save behind training holds it up for a copy to the host alone, so that it may come more often
    assert (saved.held_seconds < saved.write_seconds / 5) == background
    tried = [saved.lost_share(factor * best) for factor in (0.5, 0.9, 1.1, 2.0)]
    if best > 1.01 * saved.write_seconds:
        assert min(tried) > 0.99 * saved.lost_share(best)
    told = saved.to_dict()
    assert told["best_every_steps"] == pytest.approx(best / saved.step_seconds, rel=0.06)
    assert told["is_worth_changing"] == (told["lost_share"] - told["best_lost_share"] > 0.002)


def test_plan_and_search_name_the_best_cadence():
    """A cluster that fails every two hours: both name the same remedy, and taking it is the end of it."""
    words = ["--recipe", "30b", "--world_size", "256", "--gpu", "H100"]
    often = ["--set", "checkpoints.hours_between_failures=2"]
    plan = [sys.executable, "train.py", "--plan", *words, *often]
    text = execute(plan).stdout
    named = re.search(r"training\.save_steps=(\d+)", " ".join(text.split()))
    assert "one every 2.00 hours of all GPUs" in text and named
    better = execute([*plan, "--set", f"training.save_steps={named[1]}"]).stdout
    assert "of the time lost" in better and "training.save_steps" not in better
    fit = execute([sys.executable, "-m", "pretraining.planning", "fit", *words, *often, "--json"])
    assert json.loads(fit.stdout)["checkpoints"]["is_worth_changing"]


@pytest.mark.parametrize("save_steps", [100, 50_000])
def test_no_cadence_beyond_the_end_of_a_run_is_proposed(save_steps):
    """A run of 100 steps that saves at its end can save no less often: there is nothing to change."""
    settings = ["budget.tokens=52428800", "training.warmup_steps=10", f"training.save_steps={save_steps}"]
    settings.append("checkpoints.hours_between_failures=1000")
    saved = saves_of(setup("124m", 1, *settings, way="zero1"))
    assert saved.best_every_steps == saved.steps == 100 and not saved.is_worth_changing
    assert saved.every_seconds == pytest.approx(100 * saved.step_seconds)


@pytest.mark.parametrize("approach", ["approach 1", "approach 2", "approach 3", laws.CORRECTED])
def test_an_optimum_is_the_same_from_budget_size_and_tokens(approach):
    frontier = laws.frontier(approach)
    optimum = frontier.at_flops(1e23)
    assert optimum.flops == pytest.approx(1e23)
    for other in (frontier.at_parameters(optimum.parameters), frontier.at_tokens(optimum.tokens)):
        assert (other.parameters, other.tokens) == pytest.approx((optimum.parameters, optimum.tokens))


def test_the_frontier_is_the_minimum_of_the_loss():
    """Hoffmann et al. 2022, equation 4: at equal FLOPs every other size does worse."""
    law = laws.parametric_loss()
    best = law.frontier().at_flops(1e22)
    losses = [law.loss(best.parameters * k, best.tokens / k) for k in (0.5, 0.9, 1.0, 1.1, 2.0)]
    assert min(losses) == losses[2]
    assert laws.compute_overhead(law, best) == pytest.approx(1, rel=1e-6)
    over_trained = laws.Allocation(best.parameters / 4, law.tokens_for(losses[2], best.parameters / 4))
    assert laws.compute_overhead(law, over_trained) == pytest.approx(over_trained.flops / 1e22, rel=1e-6)
    assert laws.with_inference(law, losses[2], 1e-3).parameters == pytest.approx(best.parameters, rel=1e-3)


def test_batch_and_learning_rate_hints(capsys):
    """Li et al. 2025 and McCandlish et al. 2018: at the critical batch twice the tokens, twice the steps."""
    main(["chinchilla", "--parameters", "7b", "--json"])
    answer = json.loads(capsys.readouterr().out)
    answer["hints"]["Step Law"]["batch_tokens"] = answer["critical_batch_tokens"]
    text = " ".join(laws.ChinchillaVerb().as_text(answer).split())
    assert text.count("(2.00 x tokens and 2.00 x steps)") == 1
    rates = [laws.hints(size, 1e11, 1e20)["Step Law"]["learning_rate"] for size in (1e9, 8e9)]
    assert rates[0] == pytest.approx(1.79 * 1e9**-0.713 * 1e11**0.307) and rates[0] > rates[1]


def test_layouts_divide_everything_and_fit():
    """Every layout multiplies out to the GPUs and the step, keeps tensor parallelism in a node, and fits."""
    recipe = load_recipe("65b")
    found = layouts(Cluster(recipe.model, 2048, recipe.tokens_per_step // 2048, 512, H100, 0.6))
    assert len(found) > 20
    sequences = recipe.tokens_per_step // 2048
    for layout in found:
        assert layout["data"] * layout["tensor"] * layout["pipeline"] * layout["context"] == 512
        assert layout["data"] * layout["micro_batch"] * layout["microbatches"] == sequences
        assert layout["layers_per_stage"] * layout["pipeline"] == recipe.model["n_layer"]
        assert layout["tensor"] <= H100.gpus_per_node
        assert layout["memory"]["total"] <= H100.memory_bytes
        assert layout["bubble"] == (layout["pipeline"] - 1) / layout["microbatches"]
    assert [x["step_seconds"] for x in found] == sorted(x["step_seconds"] for x in found)


def test_long_sequences_get_context_parallelism():
    recipe = load_recipe("7b", ["model.max_position_embeddings=131072"])
    found = layouts(Cluster(recipe.model, 131072, 32, 64, H100, 0.6))
    assert max(layout["context"] for layout in found) >= 8
    assert {layout["context"] for layout in layouts(Cluster(LLAMA, 4096, 1024, 64, H100, 0.6))} == {1}


def test_memory_of_a_layout_by_component():
    """6 + 12 / shards bytes a parameter (Megatron-LM's distributed optimizer); activations by passes in flight.

    Korthikanti et al. 2022: 34 h bytes a token and layer for GPT, 32 h without the two dropout masks.
    """
    gpt, size, tokens = load_recipe("65b").model, model_size(LLAMA), 4096

    def held(*division: int, model: dict = LLAMA, recompute: bool = False):
        cluster = Cluster(model, tokens, 8, 8, H100, 1.0)
        return SimpleNamespace(**layout_memory(cluster, Division(*division), recompute))

    assert held(model=gpt).activations == gpt["n_layer"] * tokens * 32 * gpt["n_embd"]
    alone, shared = held(), held(8)
    assert alone.weights_and_gradients + alone.optimizer == 18 * size.total
    assert shared.optimizer == alone.optimizer / 8
    assert shared.weights_and_gradients == alone.weights_and_gradients
    # of recomputed layers the inputs, and one layer's activations
    assert held(recompute=True).activations == 32 * tokens * 2 * 4096 + alone.activations / 32
    assert held(1, 2, 4).activations == alone.activations / 2
    # the first stage has a table beside its layers
    assert held(1, 8).weights_and_gradients == 6 * size.total / 8
    assert 32 * held(1, 1, 32).weights_and_gradients > 6 * size.total
    assert alone.logits == 12 * tokens * 32000 and alone.total > 18 * size.total + alone.activations


def test_messages_of_a_layout():
    """Four all-reduces a layer, tensor ranks apart 2 (t - 1) / t; gradients and weights once a step."""
    found = layouts(Cluster(LLAMA, 4096, 1024, 64, H100, 0.6))
    names = ("tensor", "pipeline", "micro_batch", "recompute")
    by_size = {tuple(each[name] for name in names): each for each in found}
    plain, halves = (SimpleNamespace(**by_size[tensor, 1, 1, False]) for tensor in (1, 2))
    assert plain.tensor_seconds == plain.pipeline_seconds == plain.context_seconds == 0
    message = 2 * 4096 * 4096
    assert halves.tensor_seconds == pytest.approx(32 * 32 * 4 * message / 450e9)
    assert plain.data_seconds == pytest.approx(6 * 7_241_732_096 * 63 / 64 / 50e9)
    assert halves.data_seconds == pytest.approx(6 * 7_241_732_096 / 2 * 31 / 32 / 50e9)
    flops = flops_per_token(model_size(LLAMA), 4096).training * 2**22
    assert plain.compute_seconds == pytest.approx(flops / (64 * 0.6 * 989.5e12))
    assert plain.step_seconds == pytest.approx(plain.compute_seconds + plain.data_seconds)
