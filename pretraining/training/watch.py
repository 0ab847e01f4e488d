"""Everything that looks on while a run trains, put together from the recipe: stop requests, hangs, spikes, metrics."""

from collections.abc import Callable

from transformers import TrainerCallback

from pretraining.planning import RunPlan
from pretraining.recipe import Recipe
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.collector import SettledCollector
from pretraining.training.early_stopping import early_stopping
from pretraining.training.expert_load import ExpertLoad, experts_per_token
from pretraining.training.hangs import HangCallback
from pretraining.training.layer_norms import LayerNormsCallback
from pretraining.training.metrics import MetricsCallback
from pretraining.training.noise_scale import NoiseScaleCallback
from pretraining.training.peak_memory import PeakMemory
from pretraining.training.profile import ProfileCallback
from pretraining.training.progress import ProgressCallback
from pretraining.training.source_loss import source_losses
from pretraining.training.speed import SpeedMeter
from pretraining.training.stability import Finding, StabilityMonitor
from pretraining.training.stopping import StopRequests
from pretraining.training.trackers import build_trackers


class Watch:
    """One for a run; `begin` starts an attempt, of which a run has several where it rolls back."""

    def __init__(self, run: RunFolder, recipe: Recipe):
        self.run, self.recipe = run, recipe
        self.stop = StopRequests(run, recipe.checkpoints["time_limit_hours"])
        self.hangs = HangCallback(run, recipe.monitors["hang_minutes"])

    def begin(self, origins, plan: RunPlan, start, num_blocks: int) -> None:
        """Watch an attempt.

        origins: where the samples of a step are from, for events. start: where it begins. num_blocks: an epoch of
        the training data.
        """
        run, recipe = self.run, self.recipe
        last_step, extra_tokens = start.last_step(recipe), start.extra_tokens(recipe)
        self.memory = PeakMemory()
        self.stability = StabilityMonitor(run, recipe.monitors, origins)
        self.gradients, self.experts = self._gradient_monitors(), self._expert_monitors()
        self.sources = source_losses(recipe)
        settings = recipe.monitors["profile"]
        self.profile = [] if settings is None else [ProfileCallback(run, settings)]
        self.speed = SpeedMeter.of(recipe, plan.world_size, last_step, extra_tokens)
        self.metrics = MetricsCallback(run, self.speed, num_blocks * recipe.sequence_length)
        report_to, project = recipe.training.get("report_to", "none"), recipe.training.get("project")
        self.trackers = build_trackers(report_to, run, recipe.name, project)

    def _gradient_monitors(self) -> list[TrainerCallback]:
        """What measures gradients on some steps."""
        every = self.recipe.monitors["noise_scale_steps"]
        noise = [] if every is None else [NoiseScaleCallback(every, self.recipe.sequence_length)]
        layers_every, alerted = self.recipe.monitors["layer_norms_steps"], self.stability
        return [*noise, LayerNormsCallback(self.run, layers_every, lambda: alerted.alerted_step)]

    def _expert_monitors(self) -> list[ExpertLoad]:
        """What counts the load of experts, where there are some."""
        chosen = experts_per_token(self.recipe) if self.recipe.monitors["expert_load"] else None
        return [] if chosen is None else [ExpertLoad(self.run, chosen)]

    def loss(self, loss: Callable) -> Callable:
        """The loss, looked at before the backward pass."""
        for monitor in (*self.sources, *self.experts, self.stability.watch):
            loss = monitor.around(loss)
        return loss

    def callbacks(self, saves: TrainerCallback) -> list[TrainerCallback]:
        """In the order in which they must hear of things: a row of metrics tells of the save before it."""
        judging = [self.stability, *early_stopping(self.run, self.recipe.evaluation)]
        told = [self.metrics, ProgressCallback(), *self.trackers]
        counting = [*self.gradients, *self.sources, *self.experts]
        return [SettledCollector(), self.hangs, *judging, *counting, saves, *told, *self.profile]

    @property
    def finding(self) -> Finding | None:
        """Why the attempt was broken off, where it was."""
        return self.stability.finding
