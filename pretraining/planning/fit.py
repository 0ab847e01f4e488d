"""The ZeRO stage, layout, offload, micro-batch and recomputation that fit so many GPUs and are predicted fastest."""

import argparse
import math
import shlex
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from pretraining.ds_config import degrees_of, load_ds_config, optimizer_device, parameter_device, zero_stage
from pretraining.errors import UserError
from pretraining.planning.costs import cost_of_checkpoints, failure_words
from pretraining.planning.gpus import Gpu, find_gpu
from pretraining.planning.memory.need import ROOMY, TIGHT, MemoryNeed, memory_need
from pretraining.planning.memory.states import unprotected_gradient
from pretraining.planning.quantities import (
    count,
    duration,
    gpu_count,
    num_bytes,
    recomputation_text,
    several,
    share,
)
from pretraining.planning.run_plan import build_run_plan
from pretraining.planning.setup import BareSize, Setup, add_setup_arguments, setup_of
from pretraining.planning.shapes import widths_of
from pretraining.planning.step_time import scaling_over_nodes, step_time
from pretraining.recipe import Recipe, accumulation_steps
from pretraining.recipe.refusals import check_run
from pretraining.runtime.installation import as_typed
from pretraining.runtime.table import Column, write_table

WAYS = ("zero0", "zero1", "zero2", "zero3", "zero3_hpz", "zero2_offload", "zero3_offload", "zero3_nvme")
"""Names in ds_configs/, from the fewest messages to the most."""
SPLIT_WAYS = ("zero1", "zero2", "zero3")
"""Those of them that are also tried with layers, sequences or experts split over ranks."""
SHORTEST_PART = 1024
"""Tokens below which no sequence is split further."""
NODE = 8
"""GPUs of a node, if the kind of GPU is not known."""
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
RECOMPUTED = (0, 4, 2, 1)
"""One layer in so many is recomputed; 0: none is."""
SAME = 1.05
"""Step times, or needs of memory, within this factor of each other count as equal: the prediction is not finer."""
# ways shown without --top
MOST = 6
NOTE = """
The fastest first, times within {same:.0%} counted as equal; each further row needs less memory than all above it.
Of ways as fast as each other the first leaves {room:.0%} of the memory free, if one does, then has no offload,
the fewest layers recomputed, the fewest splits, the lowest stage and the largest micro-batch. What takes more than
{tight:.0%} of the memory is chosen only if nothing else fits. Time is the longest of products, messages and kernel
launches, plus offload. `ac`: of how many layers one is recomputed (activation checkpointing)."""

COLUMNS = (
    Column("ds_config", lambda way: way["deepspeed"] or "none"),
    Column("micro-batch", "micro_batch"),
    Column("accumulation", "accumulation"),
    Column("ac", lambda way: way["every_n_layers"] or "no"),
    Column("memory", lambda way: way["memory"]["total"], num_bytes),
    Column("step", "step_seconds", duration),
)


@dataclass(frozen=True)
class Way:
    """One way to train the recipe on the GPUs."""

    deepspeed: str | None
    micro_batch: int
    accumulation: int
    every_n_layers: int
    """One layer in so many is recomputed; 0: none is."""
    need: MemoryNeed
    step_seconds: float | None
    """None if the GPU is not one of the table's."""
    offload_seconds: float
    """Part of the step: transfers to the host, the host's optimizer, NVMe."""
    changes: tuple[str, ...]
    """Arguments that turn the recipe into this candidate."""
    why: str = ""

    @property
    def arguments(self) -> str:
        return " ".join(self.changes)

    def to_dict(self) -> dict:
        names = ("deepspeed", "micro_batch", "accumulation", "every_n_layers", "step_seconds")
        names += ("offload_seconds", "arguments", "why")
        return {**{name: getattr(self, name) for name in names}, "memory": self.need.to_dict()}


def fitting(
    setup: Setup,
    gpu: Gpu,
    memory_bytes: float | None = None,
    mfu: float | None = None,
    own_ds_config: bool = False,
) -> list[Way]:
    """Return the candidates that fit, predicted fastest first. Those above TIGHT come after all others.

    Equally fast ones are sorted by free memory: first those that use at most ROOMY, then those that use less. The next
    criteria are no offload, fewer recomputed layers, the lower stage and the larger micro-batch. `UserError` if nothing
    divides the step, or nothing fits (the message names the smallest need). own_ds_config: as for `candidates`.
    """
    limit = memory_bytes or gpu.memory_bytes
    tried = list(candidates(setup, gpu, mfu, limit, own_ds_config))
    # this raises with the reason: not even one sequence per GPU divides the step
    if not tried:
        smallest = _variant(setup, setup.recipe.deepspeed, 1, 0)
        accumulation_steps(smallest.recipe, setup.world_size, smallest.ds_config)
    fits = [each for each in tried if each.need.total <= limit]
    if not fits:
        best = min(tried, key=lambda each: each.need.total)
        largest, name = best.need.largest, best.deepspeed or "plain data parallel"
        way = f"with {name}" if own_ds_config else "in any way"
        instead = "leave --deepspeed out, " if own_ds_config else ""
        raise UserError(
            f"{setup.name} does not fit {several(setup.world_size, 'GPU')} of {num_bytes(limit)} {way}: the smallest, "
            f"{name} with micro-batch {best.micro_batch}, needs {num_bytes(best.need.total)} "
            f"({largest} {num_bytes(best.need.parts[largest])}); {instead}take more or larger GPUs, or a shorter "
            "data.sequence_length"
        )
    # a tight way is chosen only if all are, so the others are not compared with its speed
    safe = [each for each in fits if each.need.total <= TIGHT * limit]
    fastest = min(each.step_seconds for each in safe or fits)

    def order(each: Way) -> tuple:
        slower, used = each.step_seconds / fastest, each.need.total / limit
        # ways within SAME of the fastest are equal here, so that the keys behind decide between them
        speed = 0 if slower <= SAME else slower
        # more room than ROOMY leaves is worth nothing
        crowded = 0 if used <= ROOMY else used
        # a larger micro-batch has larger kernels, which are faster than predicted
        return (used > TIGHT, speed, crowded, *_burdens(each), -each.micro_batch, slower)

    return [replace(each, why=_reason(each, fastest, limit)) for each in sorted(fits, key=order)]


def worth_choosing(ways: list[Way]) -> list[Way]:
    """Return the ways that are worth a choice, the best first; `ways` has the order of `fitting`.

    No other way beats one of them, and each needs less memory than every one before it.
    """
    totals, burdens = [each.need.total for each in ways], [_burdens(each) for each in ways]

    def beaten(place: int) -> bool:
        """Return whether another way is as fast, needs less memory, and has no burden that this one is free of."""
        return any(
            SAME * totals[other] < totals[place]
            and each.step_seconds <= ways[place].step_seconds
            and all(more <= here for more, here in zip(burdens[other], burdens[place], strict=True))
            for other, each in enumerate(ways)
        )

    least, chosen = math.inf, []
    for place, way in enumerate(ways):
        # each way is slower than those before it, so it must need clearly less memory
        if SAME * totals[place] < least and not beaten(place):
            least = totals[place]
            chosen.append(way)
    return chosen


def nearest_fit(
    setup: Setup,
    fits_in: Callable[[MemoryNeed], bool],
    gpu: Gpu | None = None,
    gpu_memory: float | None = None,
) -> Way | None:
    """Return the candidate that `fits_in` accepts with the fewest changes to the recipe; among those, the fastest."""
    fits = [each for each in candidates(setup, gpu, gpu_memory=gpu_memory) if fits_in(each.need)]

    def distance(each: Way) -> tuple:
        # a ds_config of the user's own is not in WAYS and comes first
        place = WAYS.index(each.deepspeed) if each.deepspeed in WAYS else 0
        # without a known GPU there is no step time, and the number of messages decides
        more = abs(each.micro_batch - setup.recipe.micro_batch)
        return len(each.changes), each.step_seconds or 0.0, place, more

    return min(fits, key=distance, default=None)


def candidates(
    setup: Setup,
    gpu: Gpu | None = None,
    mfu: float | None = None,
    gpu_memory: float | None = None,
    own_ds_config: bool = False,
) -> Iterator[Way]:
    """Return every combination that divides the recipe's step, whether it fits or not.

    Args:
        setup: its ds_config is not looked at, but the recipe's, by name.
        gpu: gives the step times; None leaves them out.
        mfu: share of the dense peak without recomputation; None for the expected one.
        gpu_memory: bytes of one GPU, in the table or not; None: a processor trains, or it is not known.
        own_ds_config: try the recipe's ds_config alone.
    """
    recipe = setup.recipe
    # the recipe's own choices are always candidates
    recomputed = sorted({*RECOMPUTED, recipe.training.recomputed_one_in})
    for way in [recipe.deepspeed] if own_ds_config else _ways(setup, gpu):
        for micro_batch in sorted({*MICRO_BATCHES, recipe.micro_batch}):
            groups = setup.world_size // degrees_of(_config(way)).ranks_per_sample
            at_once = groups * micro_batch * recipe.sequence_length
            # every step of a batch-size ramp must divide, not only the full one
            if any(size % at_once for size in recipe.step_sizes.all):
                continue
            need = None
            for every_n_layers in recomputed:
                variant = _variant(setup, way, micro_batch, every_n_layers)
                need = memory_need(variant, gpu_memory, need)
                step = step_time(variant, gpu, mfu) if gpu else None
                yield Way(
                    deepspeed=way,
                    micro_batch=micro_batch,
                    accumulation=variant.accumulation,
                    every_n_layers=every_n_layers,
                    need=need,
                    step_seconds=step.seconds if step else None,
                    offload_seconds=step.offload_seconds if step else 0.0,
                    changes=_changes(variant.recipe, recipe),
                )


# a search asks for the same few files again for every candidate
@cache
def _config(way: str | None) -> dict | None:
    return load_ds_config(way) if way else None


def _ways(setup: Setup, gpu: Gpu | None) -> list[str | None]:
    """Return the recipe's own ds_config and the shipped ones that `train.py` accepts with it (refusals.py)."""
    recipe, world_size = setup.recipe, setup.world_size
    node = gpu.gpus_per_node if gpu else NODE
    # groups of split layers, sequences and experts fit into a node
    sizes = [2**n for n in range(1, 1 + min(node, world_size).bit_length()) if node % 2**n == 0]
    sizes = [size for size in sizes if world_size % size == 0]
    sequences = [size for size in sizes if recipe.sequence_length >= size * SHORTEST_PART]
    degrees = [f"tensor={size}" for size in sizes]
    degrees += [f"sequence={size}" for size in sequences]
    degrees += [f"tensor={t},sequence={s}" for t in sizes for s in sequences if t * s in sizes]
    if widths_of(recipe.model).experts:
        degrees += [f"expert={size}" for size in sizes]
    tried = [*WAYS, *(f"{way}:{split}" for split in degrees for way in SPLIT_WAYS)]
    # hpZ keeps a copy of the weights in each node: worth it only among several
    if 1 < node < world_size and world_size % node == 0:
        tried[tried.index("zero3_hpz")] = "zero3_hpz" if node == NODE else f"zero3:hpz={node}"
    else:
        tried.remove("zero3_hpz")
    # DeepSpeed 0.19.8 cannot sum fp16 gradients in fp32 at stage 0
    if recipe.training.fp16:
        tried.remove("zero0")
    shipped = []
    for way in tried:
        variant = Setup(replace(recipe, deepspeed=way), _config(way), world_size)
        try:
            check_run(variant.recipe, variant.ds_config)
        except UserError:
            continue
        # a run with such a gradient is refused (gate.py), so that the search must not offer it
        if unprotected_gradient(variant) is None:
            shipped.append(way)
    return shipped if recipe.deepspeed in shipped else [recipe.deepspeed, *shipped]


def _variant(setup: Setup, way: str | None, micro_batch: int, every_n_layers: int) -> Setup:
    recipe = setup.recipe
    values = {"per_device_train_batch_size": micro_batch, "activation_checkpointing": every_n_layers > 0}
    if every_n_layers:
        given = recipe.training.activation_checkpointing_kwargs or {}
        # other keywords of the recipe stay
        values["activation_checkpointing_kwargs"] = {**given, "every_n_layers": every_n_layers}
    recipe = replace(recipe, deepspeed=way, training={**recipe.training, **values})
    return Setup(recipe, _config(way), setup.world_size)


def _changes(variant: Recipe, recipe: Recipe) -> tuple[str, ...]:
    changes, every_n_layers = [], variant.training.recomputed_one_in
    if variant.deepspeed != recipe.deepspeed:
        changes.append(f"--deepspeed {variant.deepspeed}")
    if variant.micro_batch != recipe.micro_batch:
        changes.append(f"--set training.per_device_train_batch_size={variant.micro_batch}")
    if bool(every_n_layers) != bool(recipe.training.activation_checkpointing):
        recomputes = str(every_n_layers > 0).lower()
        changes.append(f"--set training.activation_checkpointing={recomputes}")
    given = recipe.training.activation_checkpointing_kwargs or {}
    if every_n_layers and every_n_layers != int(given.get("every_n_layers") or 1):
        changes.append(f"--set training.activation_checkpointing_kwargs.every_n_layers={every_n_layers}")
    return tuple(changes)


def _burdens(each: Way) -> tuple[bool, float, int, int]:
    """Return what a way costs beyond its predicted time: offload, layers computed twice, split layers, waits."""
    config = _config(each.deepspeed)
    offloads = optimizer_device(config) != "gpu" or parameter_device(config) != "gpu"
    # stages 0 and 1 reduce once a step, stage 2 waits for its messages in every micro-batch, stage 3 gathers as well
    stage, split = max(1, zero_stage(config)), math.prod(degrees_of(config))
    again = 1 / each.every_n_layers if each.every_n_layers else 0.0
    return offloads, again, split, stage


def _reason(each: Way, fastest: float, limit: float) -> str:
    """Write what this candidate pays for its memory, and how much slower it is than the fastest."""
    paid = [recomputation_text(each.every_n_layers)] if each.every_n_layers else []
    if each.offload_seconds:
        paid.append(f"{each.offload_seconds / each.step_seconds:.0%} offload")
    if each.need.total > TIGHT * limit:
        paid.append(f"tight: {each.need.total / limit:.0%} of the memory")
    slower = each.step_seconds / fastest - 1
    speed = "as fast as any" if slower <= SAME - 1 else f"{slower:.0%} slower"
    return ", ".join([speed, *paid])


class FitVerb:
    """The stage, layout, offload, micro-batch and activation checkpointing that fit, predicted fastest first."""

    EXAMPLES = """  python -m pretraining.planning fit --recipe 7b --world_size 8 --gpu A100
  python -m pretraining.planning fit --recipe 30b --world_size 8 --gpu H200 --top 3 --json"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_setup_arguments(parser, on_cluster=True)
        add = parser.add_argument
        add("--memory", type=count, metavar="BYTES", help="of one GPU, instead of the table's: 80e9")
        add("--mfu", type=share, metavar="SHARE", help="share of the dense peak where no layer is recomputed")
        add("--top", type=gpu_count, metavar="K", help=f"ways to show (default {MOST}, with --all every one)")
        what = "show every way that fits, not only those that a choice is between"
        add("--all", action="store_true", help=what)

    def answer(self, options: argparse.Namespace) -> dict:
        """Return the fastest way, and those that need less memory; with `--deepspeed` those of that ds_config alone."""
        setup, gpu = setup_of(options), find_gpu(options.gpu)
        if isinstance(setup, BareSize):
            remedy = "give --recipe NAME or --model NAME (and --set to change it)"
            raise UserError(f"the search needs the model's shape: {remedy}")
        limit = options.memory or gpu.memory_bytes
        fits = fitting(setup, gpu, limit, options.mfu, own_ds_config=options.deepspeed is not None)
        chosen = worth_choosing(fits)
        shown, best = fits if options.all else chosen, chosen[0]
        variant = _variant(setup, best.deepspeed, best.micro_batch, best.every_n_layers)
        saved = cost_of_checkpoints(build_run_plan(variant), best.step_seconds, gpu)
        top = options.top or (len(shown) if options.all else MOST)
        return {
            "name": setup.name,
            "gpu": gpu.name,
            "memory_bytes": limit,
            "world_size": setup.world_size,
            "scaling": scaling_over_nodes(gpu, setup.world_size),
            "fitting": len(fits),
            "ways": [each.to_dict() for each in shown[:top]],
            "checkpoints": saved.to_dict() if saved else None,
            "command": _command(options, setup.recipe, best, gpu),
        }

    def as_text(self, answer: dict) -> str:
        number, shown = answer["fitting"], len(answer["ways"])
        fits = f"{several(number, 'way')} {'fits' if number == 1 else 'fit'}"
        if shown < number:
            fits += f", {shown} worth a choice {'is' if shown == 1 else 'are'} shown; --all shows every one"
        scaling, saved = answer["scaling"], answer["checkpoints"]
        note = NOTE.format(same=SAME - 1, room=1 - ROOMY, tight=TIGHT)
        note += f" {several(scaling['nodes'], 'node')}: {scaling['assumption']}." if scaling else ""
        note += f" Failures: {failure_words(saved)}." if saved else ""
        note = textwrap.fill(" ".join(note.split()), 118, initial_indent="\n", break_on_hyphens=False)
        where = "on each node, with the name of the first in place of node0:\n" if scaling else ""
        # the reasons read from the left, also where they are padded to one width
        width = max(len(way["why"]) for way in answer["ways"])
        table = write_table([*COLUMNS, Column("why".ljust(width), "why", f"<{width}")], answer["ways"])
        title = f"{answer['name']} on {answer['world_size']:,} x {answer['gpu']}: {fits}"
        # for a shell, with one option of train.py on each line
        words = [shlex.quote(word) for word in shlex.split(answer["command"])]
        options = words.index("--recipe")
        lines = [f" \\\n    {word}" if word.startswith("--") else f" {word}" for word in words[options:]]
        command = "".join([" ".join(words[:options]), *lines])
        return f"{title}\n\n{table}\n{note}\n\n{where}{command}"


def _command(options: argparse.Namespace, recipe: Recipe, best: Way, gpu: Gpu) -> str:
    """Write the command for the best way: for deepspeed on one node, for torchrun on each of several."""
    number, name = options.world_size, recipe.name
    # the fewest nodes with the same number of GPUs on each
    nodes = next(n for n in range(-(-number // gpu.gpus_per_node), number + 1) if number % n == 0)
    launcher = ["deepspeed", f"--num_gpus={number}"]
    if nodes > 1:
        launcher = ["torchrun", f"--nnodes={nodes}", f"--nproc_per_node={number // nodes}"]
        launcher += ["--rdzv_backend=c10d", "--rdzv_endpoint=node0:29500", f"--rdzv_id={name}"]
    # `recipe.words` are the arguments that the user gave; what the search changes comes after them
    words = recipe.words
    if options.model:
        changes = [f"model.from={options.model}", *recipe.overrides]
        words = ["--recipe", "RECIPE", *(word for text in changes for word in ("--set", text))]
    given = [*launcher, "train.py", *words]
    if options.deepspeed and recipe.deepspeed == best.deepspeed:
        given += ["--deepspeed", options.deepspeed]
    return as_typed(" ".join([shlex.join(given), *best.changes]))
