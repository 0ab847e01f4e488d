"""The time and the cost of a run: GPU-hours, dollars, energy, and how often to save."""

import argparse
import math
from dataclasses import asdict, dataclass, replace

from pretraining.errors import UserError
from pretraining.planning.constants import table
from pretraining.planning.gpus import Gpu, find_gpu, kept_rates, prices_of
from pretraining.planning.quantities import (
    amount,
    dollars,
    duration,
    energy,
    hours,
    num_bytes,
    several,
    share,
    short,
)
from pretraining.planning.run_plan import RunPlan, build_run_plan, checkpoints_written, save_every
from pretraining.planning.setup import BareSize, Setup, add_setup_arguments, setup_of
from pretraining.planning.step_time import (
    ESTIMATED,
    Utilization,
    expected_utilization,
    scaling_over_nodes,
    step_time,
    tokens_per_second,
)
from pretraining.runtime import wall_time
from pretraining.runtime.table import facts

SECONDS_PER_HOUR = 3600
NOTABLE = 0.002
"""Share of the run's time that another interval must save before a plan proposes it."""


@dataclass(frozen=True)
class CheckpointCost:
    """Bytes and seconds that checkpoints take, and what a failure costs."""

    bytes: float
    every_seconds: float
    step_seconds: float
    steps: int
    """Optimizer steps of the whole run."""
    written: int
    """Checkpoints over the whole run."""
    kept: int
    write_seconds: float
    held_seconds: float
    """How long training stands still for a save: for the copy to host memory, or for all of the writing."""
    failure_seconds: float
    """Mean time between failures of all GPUs together."""
    disk: dict | None = None
    """The disk's rate, if it was measured on this machine (`gpus.kept_rates`); None if it is assumed."""

    def lost_share(self, every_seconds: float) -> float:
        """Return the share of the run's time that is lost to saves and failures, if it saves that often.

        A failure comes half an interval after the last save on average. A save behind training counts once it is
        written. The time to start again is the same at every interval and is left out.
        """
        unwritten = self.write_seconds if self.held_seconds < self.write_seconds else 0.0
        return self.held_seconds / every_seconds + (every_seconds / 2 + unwritten) / self.failure_seconds

    @property
    def best_every_seconds(self) -> float:
        """The interval that loses least (Daly 2006, equation 37, after Young 1974), and no shorter than a save."""
        ratio = self.held_seconds / (2 * self.failure_seconds)
        if ratio >= 1:
            return max(self.failure_seconds, self.write_seconds)
        series = 1 + math.sqrt(ratio) / 3 + ratio / 9
        best = math.sqrt(2 * self.held_seconds * self.failure_seconds) * series - self.held_seconds
        # a save waits for the one before
        return max(best, self.write_seconds, self.step_seconds)

    @property
    def best_every_steps(self) -> int:
        """The same in optimizer steps, in two digits: the prediction is not finer. At most those of the run."""
        steps = max(1.0, self.best_every_seconds / self.step_seconds)
        digits = 10 ** max(0, math.floor(math.log10(steps)) - 1)
        return min(self.steps, round(steps / digits) * digits)

    @property
    def best_lost_share(self) -> float:
        return self.lost_share(self.best_every_steps * self.step_seconds)

    @property
    def is_worth_changing(self) -> bool:
        """Return whether the best interval would save a notable share of the time."""
        return self.lost_share(self.every_seconds) - self.best_lost_share > NOTABLE

    def to_dict(self) -> dict:
        derived = ("best_every_seconds", "best_every_steps", "best_lost_share", "is_worth_changing")
        values = {name: getattr(self, name) for name in derived}
        return {**asdict(self), "lost_share": self.lost_share(self.every_seconds), **values}


def cost_of_checkpoints(plan: RunPlan, step_seconds: float, gpu: Gpu) -> CheckpointCost | None:
    """Return what the checkpoints of a run cost; None if it saves none. step_seconds: of one optimizer step."""
    recipe, num_gpus = plan.setup.recipe, plan.world_size
    every = save_every(recipe)
    if every is None:
        return None
    # a longer interval than the run is the run: it saves after its last step
    every = min(every, recipe.num_steps)
    # kept for this kind and number of GPUs: a plan of another cluster must not use this machine's disk
    disk = kept_rates(gpu.name, num_gpus).get("disk_bytes_per_second")
    rates = table("rates")
    write_seconds = plan.checkpoint_bytes / (disk or rates["disk_bytes_per_second"])["value"]
    # each GPU copies its share
    copy_seconds = plan.checkpoint_bytes / num_gpus / gpu.pcie_bytes_per_second
    between = recipe.checkpoints.hours_between_failures
    # one failure stops all GPUs, so that the time between failures shrinks as their number grows
    assumed = rates["gpu_hours_between_failures"]["value"] / num_gpus
    return CheckpointCost(
        bytes=plan.checkpoint_bytes,
        every_seconds=every * step_seconds,
        step_seconds=step_seconds,
        steps=recipe.num_steps,
        written=checkpoints_written(recipe),
        kept=plan.checkpoints_kept,
        write_seconds=write_seconds,
        held_seconds=min(copy_seconds, write_seconds) if recipe.checkpoints.background else write_seconds,
        failure_seconds=(between or assumed) * SECONDS_PER_HOUR,
        disk=disk,
    )


def failure_words(saved: dict) -> str:
    """Write how often a failure is expected, what it and the saves lose, and at which interval that is least."""
    text = f"one every {duration(saved['failure_seconds'])} of all GPUs"
    lost = f"{saved['lost_share']:.2%} of the time lost to it and to saves"
    if not saved["is_worth_changing"]:
        return f"{text}; {lost}"
    best = f"--set training.save_steps={saved['best_every_steps']}"
    return f"{text}; {lost}; least, {saved['best_lost_share']:.2%}, with {best}"


def write_words(saved: dict) -> str:
    """Write how long a checkpoint takes to write, if the disk was measured; nothing if its rate is assumed."""
    if (disk := saved["disk"]) is None:
        return ""
    rate = f"{num_bytes(disk['value'])}/s to {disk['where']}, measured here on {disk['date']}"
    return f", {duration(saved['write_seconds'])} to write ({rate})"


PRECISIONS = ("bf16", "fp16", "tf32", "fp32", "fp8")


def forecast(
    setup: Setup | BareSize,
    gpu: Gpu,
    mfu: float | None = None,
    precision: str | None = None,
    price: float | None = None,
) -> dict:
    """Predict the time and money of a run, as plain JSON; `UserError` as `step_time`.

    An assumed utilization knows nothing of the run. So recomputed layers, offload, and messages that need longer than
    the products come on top of it. A given one is used as it is. A measured one is lowered for recomputation alone.

    Args:
        mfu: share of the dense peak; None for what was measured here, else for the assumption of the tables.
        precision: that of the products; None for the recipe's, or the GPU's training precision.
        price: dollars per GPU-hour instead of the recipe's (`report.dollars_per_gpu_hour`) or the table's.
    """
    num_gpus, step, expected = setup.world_size, None, None
    if isinstance(setup, BareSize):
        # 6 N (Kaplan et al. 2020), and 2 N more for another forward pass if the layers are recomputed
        flops, precision = 6 * setup.parameters, precision or gpu.training_precision
    else:
        flops, precision = setup.flops.training, precision or setup.recipe.training.product_precision
    # tokens per second at an MFU of 1
    at_peak = tokens_per_second(flops, num_gpus, gpu.peak_flops(precision), 1.0)
    if isinstance(setup, BareSize):
        # only a size is known: no recipe to count kernels of
        used = expected_utilization(gpu, int(setup.parameters), recomputation=8 / 6)
        used = Utilization(mfu, "given", assumed=False) if mfu else used
        rate = expected_rate = at_peak * used.mfu
    else:
        recipe, price = setup.recipe, price or setup.recipe.report.dollars_per_gpu_hour
        time = step_time(setup, gpu, mfu, precision)
        used = time.utilization
        if mfu:
            # a given utilization is that of whole steps, so recomputation is not taken off again
            time = replace(time, compute_seconds=recipe.tokens_per_step / (at_peak * mfu))
        # a measured or given utilization includes the messages already, an assumed one does not
        rate = recipe.tokens_per_step / (time.seconds if used.assumed else time.compute_seconds)
        expected_rate = rate
        if time.expected_seconds:
            day = time.expected_measured_on
            how = "rates for its width, heads and length" + (f", measured here on {day}" if day else "")
            expected_rate = recipe.tokens_per_step / time.expected_seconds
            expected = Utilization(expected_rate / at_peak, how, assumed=not day)
        plan, seconds = build_run_plan(setup), recipe.tokens_per_step / rate
        saved = cost_of_checkpoints(plan, seconds, gpu)
        step = {
            # of one optimizer step, at the run's tokens per second
            "seconds": seconds,
            # that the products and the messages need on their own
            "time": time.to_dict(),
            "kernel_seconds": time.kernel_seconds,
            "sent_bytes_per_gpu": sum(message.total for message in time.messages),
            "messages": [asdict(message) for message in time.messages],
            # of all ranks; loaders read token shards: 2 or 4 bytes a token
            "loader_bytes_per_second": rate * plan.data_bytes / plan.unique_tokens,
            "checkpoints": saved and saved.to_dict(),
            "disk": plan.disk,
            "disk_bytes": plan.disk_bytes,
        }
    expected_seconds = setup.tokens / expected_rate
    return {
        "name": setup.name,
        "parameters": setup.parameters,
        "tokens": setup.tokens,
        # recomputation not counted
        "flops": flops * setup.tokens,
        "gpu": gpu.name,
        "num_gpus": num_gpus,
        "precision": precision,
        "utilization": asdict(used),
        # that the run reaches, after the time to recompute, send and offload
        "mfu": rate / at_peak,
        # the same at rates of the model's own shapes; None without a recipe, or if `utilization` was given or measured
        "expected": expected and asdict(expected),
        "tokens_per_second": rate,
        # at the expected MFU, else at the estimate; the cost is that of these seconds
        "expected_seconds": expected_seconds,
        "cost": run_cost(gpu, num_gpus * expected_seconds / SECONDS_PER_HOUR, price),
        "scaling": scaling_over_nodes(gpu, num_gpus, used.assumed),
        # None without a recipe: a size alone does not say what a step is
        "step": step,
        "seconds": setup.tokens / rate,
        "tokens_per_second_per_gpu": rate / num_gpus,
    }


def run_cost(gpu: Gpu, hours: float, own_price: float | None = None) -> dict:
    """Return dollars at every known provider and the energy of `hours` GPU-hours (Touvron et al. 2023, section 6).

    Prices are entries of tables/prices.json with the run's `dollars`, cheapest first; none if it has none for the GPU.
    own_price: dollars per GPU-hour, used instead of the table's.
    """
    entries = prices_of(gpu)
    # a price of the user's own replaces the whole table
    if own_price:
        given = {"provider": "your price", "place": "given", "source": "given", "date": None}
        entries = [{**given, "dollars_per_gpu_hour": own_price}]
    names = ("provider", "place", "dollars_per_gpu_hour", "dollars", "date", "source")
    prices = [{**entry, "dollars": hours * entry["dollars_per_gpu_hour"]} for entry in entries]
    overhead = table("rates")["power_usage_effectiveness"]["value"]
    return {
        "gpu_hours": hours,
        "prices": [{name: price[name] for name in names} for price in prices],
        # GPUs at their rated power, in kilowatts, times the data centre's overhead
        "energy_kwh": gpu.watts * hours * overhead / 1000,
    }


def price_of(own: float | None, gpu: Gpu | None) -> wall_time.Price | None:
    """Return what a GPU costs: the recipe's `own` price, else the cheapest listed; None if neither is known."""
    if own is not None:
        return wall_time.Price(own, "the recipe's report.dollars_per_gpu_hour")
    for entry in prices_of(gpu) if gpu else ():
        return wall_time.Price(entry["dollars_per_gpu_hour"], f"{entry['provider']}, {entry['date']}")
    return None


class CostVerb:
    """Hours, dollars, energy, links, data rate and checkpoints of a run."""

    EXAMPLES = """  python -m pretraining.planning cost --recipe 7b --world_size 64 --gpu H100
  python -m pretraining.planning cost --recipe 30b --world_size 8 --gpu H200 --mfu 0.35 --price 2.5
  python -m pretraining.planning cost --parameters 65b --tokens 1.4t --world_size 2048 --gpu A100 --json"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_setup_arguments(parser, on_cluster=True)
        add = parser.add_argument
        add("--mfu", type=share, metavar="SHARE", help="share of the dense peak that whole steps reach")
        add("--precision", choices=PRECISIONS, help="of the products, instead of the recipe's")
        add("--price", type=amount, metavar="DOLLARS", help="per GPU-hour, instead of the table's")

    def answer(self, options: argparse.Namespace) -> dict:
        setup, gpu = setup_of(options), find_gpu(options.gpu)
        # a recipe has its own budget; --parameters has none
        if not setup.tokens:
            raise UserError("--tokens D is missing: how many tokens is it to train on?")
        return forecast(setup, gpu, options.mfu, options.precision, options.price)

    def as_text(self, answer: dict) -> str:
        cost, step = answer["cost"], answer["step"]
        size = f"{short(answer['parameters'])} parameters"
        # a workload given by --parameters is named after its size
        name = answer["name"] if answer["name"] == size else f"{answer['name']}, {size}"
        rows = [
            ("run", f"{name} on {short(answer['tokens'])} tokens"),
            ("training FLOPs", f"{answer['flops']:.3e}"),
            ("GPUs", f"{answer['num_gpus']:,} x {answer['gpu']}, {answer['precision']}"),
            *time_rows(answer),
            ("GPU-hours", hours(cost["gpu_hours"]) + expected_word(answer)),
            ("energy", energy_words(cost)),
        ]
        # a row for every known price, the cheapest first; a price of the user's own has no date
        for price in cost["prices"]:
            where = ", ".join(part for part in (price["place"], price["date"]) if part)
            of_hour = f"{dollars(price['dollars_per_gpu_hour'])} a GPU-hour"
            rows.append((f"at {price['provider']}", f"{dollars(price['dollars'])} ({of_hour}; {where})"))
        if not cost["prices"]:
            rows.append(("dollars", "no price known: give --price, or add one to tables/prices.json"))
        if step is None:
            return facts(rows)
        time, saved = step["time"], step["checkpoints"]
        seconds, products = time["communication_seconds"], time["compute_seconds"]
        links = f"{seconds / products:.0%} of the products' time"
        # messages that take longer than the products cannot be hidden behind them
        if seconds > products:
            links = f"more than the products' {duration(products)}: larger micro-batches with less accumulation, hpZ "
            links += "or model parallelism would help"
        rows += [
            ("step", step_words(step)),
            ("messages", f"{duration(seconds)} at the links' peak, {links}"),
            ("data loaders", f"{num_bytes(step['loader_bytes_per_second'])}/s for all ranks"),
        ]
        if saved:
            spacing = f"every {duration(saved['every_seconds'])}{write_words(saved)}"
            written = f"{num_bytes(saved['bytes'])} each, {saved['written']:,} written, {spacing}"
            rows += [("checkpoints", written), ("failures", failure_words(saved))]
        return facts([*rows, ("disk", disk_words(step["disk"], saved["kept"] if saved else 0))])


def estimated(speed: dict, form: str) -> str:
    """Write into a form that a forecast is estimated; nothing if its utilization was measured or given."""
    return form.format(ESTIMATED) if speed["utilization"]["assumed"] else ""


def energy_words(cost: dict) -> str:
    overhead = f"{table('rates')['power_usage_effectiveness']['value']:g} x the GPUs' rated power"
    return f"{energy(cost['energy_kwh'])}: {overhead}, for cooling and the rest (PUE)"


def step_words(step: dict) -> str:
    sent = f"{num_bytes(step['sent_bytes_per_gpu'])} sent by each GPU"
    return f"{duration(step['seconds'])}, bound by {step['time']['bound_by']}; {sent}"


def time_rows(answer: dict, fits: bool = True) -> list[tuple[str, str]]:
    """Write how long a run takes, and the MFU that this follows from; what to expect, if it fits."""
    rate, each = answer["tokens_per_second"], answer["tokens_per_second_per_gpu"]
    time = f"{duration(answer['seconds'])} at {rate:,.0f} tokens/s ({each:,.0f} a GPU), "
    rows = [("time", f"{time}{estimated(answer, 'estimated, ')}without validation, saving and restarts")]
    # what is assumed about several nodes
    if scaling := answer["scaling"]:
        rows.append(("scaling", f"{several(scaling['nodes'], 'node')}, {scaling['assumption']}"))
    used = answer["utilization"]
    reached, of_kernels = f"{answer['mfu']:.0%}", f"{used['mfu']:.0%} ({used['source']})"
    less = "less recomputation, messages, offload and launches"
    # the same in whole percent: a second number would say nothing new
    is_same = of_kernels.startswith(f"{reached} ")
    rows.append(("MFU", of_kernels if is_same else f"{reached}: {of_kernels} {less}"))
    # beside an estimate that has one rate for all shapes
    if fits and (expected := answer["expected"]):
        cost = least_dollars(answer["cost"])
        time = duration(answer["expected_seconds"]) + ("" if cost is None else f", {dollars(cost)}")
        rows.append(("expected", f"MFU {expected['mfu']:.0%}: {time}, by {expected['source']}"))
    return rows


def expected_word(answer: dict) -> str:
    """Write that a time is the expected one; nothing if there is only the estimate."""
    return " expected" if answer["expected"] else ""


def least_dollars(cost: dict) -> float | None:
    """Return what a run costs at the cheapest known price; None without one."""
    return min((price["dollars"] for price in cost["prices"]), default=None)


def disk_words(disk: dict[str, int], checkpoints_kept: int) -> str:
    names = {"checkpoints kept": several(checkpoints_kept, "checkpoint")}
    parts = ", ".join(f"{num_bytes(size)} for {names.get(name, name)}" for name, size in disk.items())
    return f"{num_bytes(sum(disk.values()))}: {parts}"
