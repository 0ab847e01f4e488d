"""Print the plan of `train.py --plan`, on one screen or as JSON: what will be trained, what it takes, what is tight."""

import json
import math
import sys
from dataclasses import asdict, replace

from pretraining.ds_config import degrees_of, hpz_ranks
from pretraining.outside.schema import listed
from pretraining.planning import costs
from pretraining.planning.comparison import predicted
from pretraining.planning.constants import table
from pretraining.planning.gate import check_plan
from pretraining.planning.gpus import Gpu, all_gpus, find_gpu
from pretraining.planning.ladder import ladder_of
from pretraining.planning.memory.need import PHASES, host_words, memory_need, shrink
from pretraining.planning.quantities import (
    dollars,
    duration,
    hours,
    num_bytes,
    recomputation_text,
    several,
    short,
    three_digits,
)
from pretraining.planning.run_plan import Machine, RunPlan, build_run_plan
from pretraining.planning.setup import Setup
from pretraining.planning.shapes import count_model, family_of
from pretraining.planning.sizes import fp8_tensors, frozen_tensors
from pretraining.recipe import Recipe
from pretraining.recipe.fixed_keys import differs_from_published
from pretraining.recipe.refusals import compiled_part
from pretraining.runtime.exit_codes import USER_ERROR
from pretraining.runtime.table import Column, facts, write_table

WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MOST_PRICES = 3
LEAST_LOST = 0.001
"""Share of the time lost to failures and saves, below which a plan does not mention it."""
KERNELS = "GPU time: matrix products, sums of gradients; other kernels are norms, activations and copies"
GPUS_OF_A_NODE = 8
"""Assumed if the kind of GPU is not known."""


def print_plan(
    recipe: Recipe,
    ds_config: dict | None,
    world_size: int | None,
    gpu_name: str | None,
    as_json: bool,
    nodes: int | None = None,
) -> None:
    """Print the plan of a recipe. Without `world_size`, plan for the fewest ranks, and list those that divide the step.

    `UserError` if the GPU is not known or lacks the recipe's precision, or the ranks do not divide the step. It exits
    with USER_ERROR, after the plan is printed, if `train.py` would refuse this run on such GPUs.
    """
    gpu = None if gpu_name is None else find_gpu(gpu_name)
    setup = Setup(recipe, ds_config, world_size or fewest_ranks(ds_config))
    answer = full_plan(setup, gpu, nodes)
    print(json.dumps(answer, indent=2) if as_json else as_text(answer))
    if world_size is None and not as_json:
        print(f"\n{world_sizes(setup, gpu)}")
    # without a number of ranks it lists which fit
    if answer["refusals"] and world_size is not None:
        sys.exit(USER_ERROR)


def full_plan(setup: Setup, gpu: Gpu | None, nodes: int | None = None) -> dict:
    """Collect all values that `--plan` prints, as plain JSON. nodes: None if they are full, as sold with this GPU."""
    recipe, ds_config, world_size = setup.recipe, setup.ds_config, setup.world_size
    # host memory and disks belong to a node
    at_node = min(world_size, gpu.gpus_per_node if gpu else GPUS_OF_A_NODE)
    if nodes:
        at_node = -(-world_size // nodes)
        gpu = gpu and replace(gpu, gpus_per_node=at_node)
    plan, there = build_run_plan(setup), gpu.memory_bytes if gpu else None
    need = memory_need(setup, there)
    # on paper: host memory, disk and data are not known
    machine = Machine(there, gpu, "bf16" in gpu.dense_peak_flops) if gpu else Machine()
    verdict = check_plan(setup, machine)
    degrees = {**setup.degrees._asdict(), "hpz": hpz_ranks(ds_config)}
    # the table's GPUs with the recipe's precision and enough memory; the need depends on the GPU's memory alone (chunks
    # of the loss), so that it is counted once for each size
    precision = recipe.training.product_precision
    known = [each for each in all_gpus().values() if precision in each.dense_peak_flops]
    sizes = {each.name: each.memory_bytes for each in known}
    needs = {size: memory_need(setup, size).total for size in set(sizes.values())}
    published = recipe.published.to_dict()
    if differs := differs_from_published(recipe.to_dict()):
        published["not_comparable"] = differs
    size, width = setup.size, recipe.model.hidden_size
    model = f"{size.total:,} parameters{_parts_words(plan)}: {recipe.model['model_type']}, "
    model += f"{size.num_layers} layers of width {width:,}"
    if size.counted:
        model += f"; {size.counted}, kernels' time as that of a {family_of(recipe.model)} of these widths"
        if why := count_model(recipe.model).estimated:
            model += f", activations estimated: {why}"
    return {
        **plan.to_dict(),
        "budget_tokens": recipe.budget.tokens,
        "disk_bytes_of_node": plan.disk_bytes_of_node(at_node),
        # the same values as in plan.json, so that a run can be compared with this plan
        "predicted": predicted(setup, gpu, gpu_memory=there),
        "model": model,
        "published": published,
        "loss": loss_words(recipe, recipe.num_tokens * setup.flops.training),
        "layout": {name: size for name, size in degrees.items() if size > 1},
        "precision": precision,
        "keep_in_fp32": recipe.weights.keep_in_fp32,
        "fp8_layers": len(fp8_tensors(recipe)),
        "compiles": compiled_part(recipe, ds_config),
        "recomputation": recomputation_text(recipe.training.recomputed_one_in, recipe.speed.recompute),
        "gpu": gpu.name if gpu else None,
        "gpu_memory_bytes": there,
        "fitting_gpus": [name for name, size in sizes.items() if needs[size] <= size],
        "memory": {
            **need.to_dict(),
            "gpus_of_node": at_node,
            "host_node_bytes": at_node * need.host_bytes,
            "pinned_bytes": need.pinned,
            "snapshot_bytes": need.snapshot,
            "shrink": shrink(need, setup),
        },
        # time and cost need the rates of a known GPU
        "forecast": costs.forecast(setup, gpu) if gpu else None,
        "refusals": [asdict(each) for each in verdict.refusals],
        "warnings": [asdict(each) for each in verdict.warnings],
    }


def fewest_ranks(ds_config: dict | None) -> int:
    """Return the fewest ranks on which a ds_config can be used: those of one group of each degree and of hpZ."""
    degrees = degrees_of(ds_config)
    return math.lcm(degrees.ranks_per_sample, degrees.tensor * degrees.expert, hpz_ranks(ds_config))


def _parts_words(plan: RunPlan) -> str:
    """Write how many of the parameters a token passes, in a mixture of experts, and how many are frozen."""
    size = plan.setup.size
    active = f", {short(size.active)} of them for each token" if size.active < size.total else ""
    frozen = sum(tensor.numel for tensor in frozen_tensors(plan.setup.recipe))
    return active + (f", {frozen:,} frozen" if frozen else "")


def as_text(answer: dict) -> str:
    """Write one screen."""
    rows = [("in short", in_short(answer)), ("", ""), *_what(answer), ("", ""), *_memory(answer), ("", "")]
    rows += [*_time_and_money(answer), ("", "")]
    judged = {"refused": answer["refusals"], "tight": answer["warnings"]}
    rows += [(label, f"{each['what']}; {each['remedy']}") for label in judged for each in judged[label]]
    if not any(judged.values()):
        unknown = "nothing in the recipe; memory is judged with --gpu NAME"
        rows.append(("tight", "nothing" if answer["gpu"] else unknown))
    number, kind = answer["world_size"], answer["gpu"]
    gpus = f"{number:,} x {kind}" if kind else several(number, "GPU")
    lines = [line.rstrip() for line in facts(rows).splitlines()]
    return "\n".join([f"plan of {answer['name']} on {gpus}", "", *lines])


def in_short(answer: dict) -> str:
    """Write whether it fits, how long it takes and what it costs."""
    speed, need = answer["forecast"], answer["memory"]["total"]
    disk = f"{num_bytes(answer['disk_bytes'])} of disk"
    if speed is None:
        alone = num_bytes(answer["memory"]["on_processor"])
        memory = f"{alone} of memory for each process without GPUs, {num_bytes(need)} on each GPU"
        return f"{memory}; {disk}; time and cost depend on --gpu NAME"
    fits = "fits" if need <= answer["gpu_memory_bytes"] else "does not fit"
    # what a first run should show: the estimate below it is that of wide kernels
    time, cost = duration(speed["expected_seconds"]), costs.least_dollars(speed["cost"])
    paid = "no price known" if cost is None else dollars(cost)
    paid += costs.estimated(speed, " ({})")
    return f"{fits}; {time}{costs.expected_word(speed)}, {paid}; {disk}"


def run_line(plan: RunPlan, folder: str, device: str) -> str:
    """Describe a run in one line. folder, device: as they are shown."""
    recipe, sharding = plan.setup.recipe, plan.setup.recipe.deepspeed or "without DeepSpeed"
    # a file of the user's own need not be called after its stage
    if plan.zero_stage is not None and f"zero{plan.zero_stage}" not in sharding:
        sharding += f" (zero{plan.zero_stage})"
    size = f"{recipe.model.model_type} of {plan.parameters:,} parameters{_parts_words(plan)}"
    ranks = f"{several(plan.world_size, 'rank')} on {device}, {sharding}, {recipe.training.product_precision}"
    return f"{recipe.name} in {folder}: {size}, {ranks}, {recipe.num_steps:,} steps, {recipe.num_tokens:,} tokens"


def plan_line(plan: RunPlan, left: float = 1.0) -> str:
    """Describe in one line what a judged plan (`gate.judge_plan`) foresees on its machine.

    left: the share of the run's tokens that is still to be trained.
    """
    machine, foreseen = plan.machine or Machine(), plan.predicted
    there = f" of {num_bytes(machine.gpu_memory_bytes)}" if machine.gpu_memory_bytes else ""
    parts = [f"{num_bytes(foreseen['peak_memory_bytes'])}{there} of memory on each rank"]
    if foreseen["training_seconds"] is None:
        parts.append("no time (this device is not in the table of GPUs)")
    else:
        speed = costs.forecast(plan.setup, machine.gpu)
        rest = "" if left == 1 else " for what is left"
        rate = f"{foreseen['tokens_per_second']:,.0f} tokens/s, MFU {foreseen['mfu']:.0%}"
        cost, lasts = costs.least_dollars(speed["cost"]), duration(left * speed["expected_seconds"])
        parts += [f"{duration(left * foreseen['training_seconds'])}{rest} at {rate}"]
        paid = [] if cost is None else [dollars(left * cost)]
        paid += [f"{lasts} expected"] if speed["expected"] else []
        parts += [" for the ".join(paid)] if paid else []
        parts[-1] += costs.estimated(speed, " ({})")
    return ", ".join([*parts, f"{num_bytes(plan.disk_bytes)} of disk"])


def _what(answer: dict) -> list[tuple[str, str]]:
    sharding = answer["deepspeed"] or "plain data parallel"
    # values of `refusals.compiled_part`; it adds nothing for "none"
    parts = {"blocks": ", blocks compiled", "whole": ", compiled whole", "deepcompile": ", DeepCompile"}
    compiled = parts.get(answer.get("compiles"), "")
    # over how many ranks each part is split, the innermost ranks first; the name of the ds_config says hpZ
    words = {
        "tensor": "matrices, embedding and head over {} neighbours",
        "sequence": "each sequence over {} ranks",
        "expert": "the experts over {} neighbours",
    }
    split = [words[name].format(size) for name, size in answer["layout"].items() if name != "hpz"]
    wide = f" ({' and '.join(answer['keep_in_fp32'])} in fp32)" if answer["keep_in_fp32"] else ""
    fp8 = f", {answer['fp8_layers']:,} layers in fp8" if answer["fp8_layers"] else ""
    way = f"{sharding}, {answer['precision']}{wide}{fp8}, {answer['recomputation']}{compiled}"
    # GPUs, or groups of GPUs, that read samples of their own
    together = answer["layout"].get("tensor", 1) * answer["layout"].get("sequence", 1)
    readers = several(answer["world_size"], "GPU")
    if together > 1:
        readers = f"{several(answer['world_size'] // together, 'group')} of {together} GPUs"
    step = f"{readers} x {several(answer['micro_batch'], 'sequence')} x {answer['sequence_length']:,} tokens "
    step += f"x {answer['accumulation_steps']} accumulation"
    if answer["ramp_steps"]:
        step += f"; the first {answer['ramp_steps']:,} are smaller"
    # steps are whole, and those of a ramp have several sizes
    left = answer["budget_tokens"] - answer["tokens"]
    tokens = f"{answer['tokens']:,}{f' ({left:,} less than the budget: the ramp leaves them over)' if left else ''}"
    tokens += f", {three_digits(answer['tokens_per_parameter'])} per parameter"
    # what the run that a recipe repeats has reached, whose it is, and in what this one is another
    other = answer["published"]
    reached = f"{other.get('result', 'no result')} ({other.get('run', 'of others')})"
    if differs := other.get("not_comparable"):
        reached += f"; not comparable: {listed(differs, ', ')}"
    return [
        ("model", answer["model"]),
        ("tokens", f"{tokens} (about 20 are compute-optimal); {answer['training_flops']:.3g} FLOPs"),
        ("steps", f"{answer['steps']:,} of {answer['tokens_per_step']:,} tokens: {step}"),
        ("how", way),
        *([("layout", ", ".join(split))] if split else []),
        *([("published", reached)] if other else []),
        *([("loss", answer["loss"])] if answer["loss"] else []),
    ]


def loss_words(recipe: Recipe, flops: float) -> str | None:
    """Write the loss that the recipe's ladder foresees; None if the recipe names no ladder."""
    if recipe.report.ladder is None:
        return None
    ladder = ladder_of(recipe)
    if ladder is None:
        command = f"python -m pretraining.ladder {recipe.words[1]} --output_dir {recipe.report.ladder}"
        return f"not known: there is no ladder in {recipe.report.ladder} yet; {command} makes one"
    return ladder.words(recipe, flops)


def _memory(answer: dict) -> list[tuple[str, str]]:
    need = answer["memory"]
    parts = sorted(need["parts"].items(), key=lambda part: -part[1])
    parts.append(("CUDA, NCCL, allocator", need["reserve"]))
    rows = []
    if answer["gpu"] is None:
        assumed = num_bytes(table("memory")["processor_bytes"]["value"])
        words = f"{num_bytes(need['on_processor'])} for each process beyond its libraries, {assumed} of them assumed"
        rows += [("without GPUs", words)]
    there, peak = answer["gpu_memory_bytes"], f"peak {PHASES[need['peak_phase']].partition(':')[0]}"
    if there is None:
        fitting = ", ".join(answer["fitting_gpus"]) or "none that the table knows"
        fits = f"{num_bytes(need['total'])}, {peak}; fits {fitting}"
    else:
        fits = "fits" if need["total"] <= there else "does not fit"
        used = f"{num_bytes(need['total'])} of {num_bytes(there)} ({need['total'] / there:.0%})"
        fits = f"{used}: {fits}; {peak}"
    rows.append(("memory of each GPU", fits))
    rows += [(f"  {name}", f"{num_bytes(size):<9}{size / need['total']:>5.0%}") for name, size in parts]
    rows.append(("largest", f"{need['largest']}; less of it: {need['shrink']}"))
    node = f", {num_bytes(need['host_node_bytes'])} for a node of {several(need['gpus_of_node'], 'GPU')}"
    node = node if need["gpus_of_node"] > 1 else ""
    host = f"{num_bytes(need['host_bytes'])} for each GPU ({host_words(need['host'])}){node}"
    rows.append(("host memory", host))
    rows += _pinned(answer) if there and need["total"] <= there else []
    return rows + ([("NVMe", f"{num_bytes(need['nvme'])} for each GPU")] if need["nvme"] else [])


def _pinned(answer: dict) -> list[tuple[str, str]]:
    """Write what is pinned, when, and how a checkpoint is written where host memory has room for a copy or not."""
    need, node = answer["memory"], answer["memory"]["gpus_of_node"]
    parts = [f"{num_bytes(need['pinned_bytes'])} a GPU before the first step"] if need["pinned_bytes"] else []
    if copy := need["snapshot_bytes"]:
        waits = duration(answer["forecast"]["step"]["checkpoints"]["write_seconds"])
        of_node = f", {num_bytes(node * copy)} a node" if node > 1 else ""
        first = f"{num_bytes(copy)} a GPU{of_node}, in the first save, which takes longer"
        less = f"a node with less than {num_bytes(need['host_node_bytes'])} of host memory"
        parts.append(f"{first}; {less} stops training for {waits} at every save instead")
    return [("pinned", "; ".join(parts))] if parts else []


def _time_and_money(answer: dict) -> list[tuple[str, str]]:
    unique, shards = answer["unique_tokens"], f"{num_bytes(answer['data_bytes'])} of token shards"
    read = f"{answer['tokens']:,} tokens, each read once, are {shards}"
    epochs = answer["tokens"] / unique
    # less than a thousandth is what rounds to whole blocks
    if epochs > 1.001:
        read = f"{unique:,} tokens, read {epochs:.3g} times, are {shards}"
    disk = costs.disk_words(answer["disk"], answer["checkpoints_kept"])
    if answer["world_size"] > answer["memory"]["gpus_of_node"]:
        each = num_bytes(answer["disk_bytes_of_node"])
        disk += f" (of all nodes; on disks of their own at most {each} each)"
    speed = answer["forecast"]
    if speed is None:
        ask = "give --gpu NAME; `python -m pretraining.planning gpus` lists those known"
        return [("time, money", ask), ("disk", disk), ("data", read)]
    step, cost = speed["step"], speed["cost"]
    if saved := step["checkpoints"]:
        disk += f"; a checkpoint every {duration(saved['every_seconds'])}{costs.write_words(saved)}"
    # where the time of a micro-batch goes, the largest part first; less than half a percent would be written as 0 %
    spent = sum(step["kernel_seconds"].values())
    kernels = sorted(step["kernel_seconds"].items(), key=lambda part: -part[1])
    kernels = [f"{name} {part / spent:.0%}" for name, part in kernels if part >= 0.005 * spent]
    # what each GPU sends in a step, where to, and how long that takes at the links' peak
    messages = []
    for each in step["messages"]:
        sizes = (("inside a node", each["inside_bytes"]), ("between nodes", each["across_bytes"]))
        where = " and ".join(f"{num_bytes(size)} {words}" for words, size in sizes if size)
        ranks = several(each["ranks"], "rank")
        messages.append(f"{each['name']} of {ranks} {where} ({duration(each['seconds'])})")
    # of a plan that fits, if it loses enough to failures and saves
    fits = answer["memory"]["total"] <= (answer["gpu_memory_bytes"] or math.inf)
    is_notable = fits and saved is not None and saved["lost_share"] > LEAST_LOST
    money = f"{hours(cost['gpu_hours'])} GPU-hours{costs.expected_word(speed)}"
    # the cheapest ones: prices are sorted
    prices = []
    for price in cost["prices"][:MOST_PRICES]:
        of_hour = f"{dollars(price['dollars_per_gpu_hour'])} an hour, {price['date']}"
        prices.append(f"{dollars(price['dollars'])} at {price['provider']} ({of_hour})")
    unknown = "; no price known: add yours to pretraining/planning/tables/prices.json"
    money += f": {', '.join(prices)}" if prices else unknown
    return [
        *costs.time_rows(speed, fits),
        ("kernels", ", ".join(kernels)),
        ("", KERNELS),
        ("step", costs.step_words(step)),
        *([("messages", "; ".join(messages))] if answer["layout"] else []),
        ("money", money),
        ("energy", costs.energy_words(cost)),
        ("disk", disk),
        *([("failures", costs.failure_words(saved))] if is_notable else []),
        ("data", f"{read}; loaders read {num_bytes(step['loader_bytes_per_second'])}/s"),
    ]


def world_sizes(setup: Setup, gpu: Gpu | None) -> str:
    """Write a table of the numbers of GPUs that divide the step evenly."""
    recipe, fewest = setup.recipe, fewest_ranks(setup.ds_config)
    at_once = recipe.micro_batch * recipe.sequence_length
    steps, together = recipe.step_sizes.all, setup.degrees.ranks_per_sample
    fitting = [size for size in WORLD_SIZES if size % fewest == 0]
    # with a batch-size ramp, every size of step must divide, not only the full one
    sizes = [size for size in fitting if not any(tokens % (size // together * at_once) for tokens in steps)]
    columns = [Column("GPUs", "GPUs", ","), Column("accumulation", "accumulation", ",")]
    columns.append(Column("memory of each", "memory", num_bytes))
    if gpu:
        columns += [Column("fits", "fits"), Column("expected time", "seconds", duration)]
        columns.append(Column("GPU-hours", "GPU-hours", hours))
    rows = []
    for size in sizes:
        case = replace(setup, world_size=size)
        need = memory_need(case, gpu.memory_bytes if gpu else None).total
        rows.append({"GPUs": size, "accumulation": case.accumulation, "memory": need})
        if gpu:
            speed = costs.forecast(case, gpu)
            rows[-1] |= {"seconds": speed["expected_seconds"], "GPU-hours": speed["cost"]["gpu_hours"]}
            rows[-1]["fits"] = "yes" if need <= gpu.memory_bytes else "no"
    text = write_table(columns, rows, left=0)
    # the note concerns rows with more than one node only
    if gpu is None or max(sizes, default=1) <= gpu.gpus_per_node:
        return text
    return f"{text}\nTimes of more than {gpu.gpus_per_node} GPUs, one node, assume perfect scaling."
