"""Kill a run at random moments, start it again by the same command, and see whether anything was lost.

It reads only what every run folder has: the markers of committed checkpoints, the rows of metrics and events.
"""

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from tests.gear.forked import ForkedRanks
from tests.gear.runs import Run, Started, Workshop, committed, completed, send_kill

TARGETS = ("one rank", "all ranks", "launcher", "everything")
PATIENCE_SECONDS = 30.0
"""What launchers give ranks that do not end by themselves before they kill them."""
SETTINGS = ("training.save_steps=2", "training.eval_steps=3")
ALONE = ("null", 1)
NEARLY = 1e-4
"""Nats, and units of a weight: what a run may differ by that has been at several layouts."""


class Folder:
    """What a run folder shows of the moment, since this look at it began."""

    def __init__(self, path: Path):
        self.path, self.run = path, Run(path)
        self.rows, self.markers = len(self.run.rows), set(committed(path))

    def trained(self) -> bool:
        return len(self.run.rows) > self.rows

    def saves(self) -> bool:
        return any(not (folder / "committed.json").exists() for folder in self.path.glob("checkpoint-*"))

    def committed(self) -> bool:
        return bool(set(committed(self.path)) - self.markers)

    def pruned(self) -> bool:
        return self.committed() and bool(self.markers - set(committed(self.path)))

    def evaluates(self) -> bool:
        rows = self.run.rows[self.rows :]
        due = [row["step"] for row in rows if "train/loss" in row and row["step"] % 3 == 0]
        return bool(due) and not any(row.get("step") == due[-1] for row in rows if "eval/loss" in row)


MOMENTS: dict[str, tuple[Callable[[Folder], bool], float]] = {
    "resuming": (lambda folder: True, 1.5),
    "training": (Folder.trained, 0.1),
    "saving": (Folder.saves, 0.1),
    "committing": (Folder.committed, 0.02),
    "pruning": (Folder.pruned, 0.01),
    "evaluating": (Folder.evaluates, 0.1),
}
"""Moment: what shows that it has come, and the longest random wait in seconds from then to the kill."""


@dataclass(frozen=True)
class Kill:
    """One SIGKILL, drawn from the seed."""

    moment: str
    target: str
    wait_share: float
    rank: int

    @classmethod
    def drawn(cls, chance: random.Random, ranks: int) -> "Kill":
        moment, target = chance.choice(list(MOMENTS)), chance.choice(TARGETS)
        return cls(moment, target, chance.random(), chance.randrange(ranks))


class Chaos:
    """Runs of one recipe that are killed again and again; `endure` raises `AssertionError` where one lost anything.

    layouts: (ds_config, ranks). With several, three runs of four start at another drawn one after each kill.
    """

    def __init__(
        self,
        workshop: Workshop,
        seed: int,
        layouts: Sequence[tuple[str, int]] = (("zero2", 2),),
        launchers: Sequence[str] = ("forked",),
        settings: Sequence[str] = (),
    ):
        self.workshop, self.layouts, self.settings = workshop, layouts, (*settings, *SETTINGS)
        # several of these may share a workshop
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=workshop.folder))
        self.chance, self.launchers = random.Random(seed), launchers
        self.counts: Counter = Counter()
        self.differences = {"loss": 0.0, "weights": 0.0}
        """The largest, of runs that moved."""

    def endure(self, kills: int) -> dict[str, int]:
        """Kill so often, over as many runs as it takes, and leave each to finish. {what: how often}."""
        while self.counts["kills"] < kills:
            output = self.folder / str(self.counts["runs"])
            self.counts["runs"] += 1
            chosen = [self.chance.choice(self.layouts)]
            if moves := len(self.layouts) > 1 and self.chance.random() < 0.75:
                chosen += [self.chance.choice(self.layouts) for _ in range(8)]
                self.counts["moved runs"] += 1
            for start in range(self.chance.randint(3, 8)):
                layout = chosen[start % len(chosen)]
                if self.counts["kills"] == kills or not self._start_and_kill(output, layout):
                    break
            self._finish(output, chosen[-1])
            if moves:
                self._ends_nearly_as(output, self._reference(chosen[0]))
            else:
                ends_as(Run(output), self._reference(chosen[0]))
        return dict(self.counts)

    def _reference(self, layout: tuple[str, int]) -> Run:
        """The undisturbed run of a layout."""
        return self.workshop.run(*layout, "plain" if layout == ALONE else "forked", self.settings)

    def _start_and_kill(self, output: Path, layout: tuple[str, int]) -> bool:
        """Whether the run could be killed before it ended by itself."""
        kill, by = Kill.drawn(self.chance, layout[1]), self.chance.choice(self.launchers)
        newest, num_events = _newest(output), len(Run(output).events)
        started, folder = Started(self._command(output, layout, by)), Folder(output)
        try:
            if not came([started], folder, kill.moment):
                assert started.process.poll() == 0, started.finish().output
                return False
            time.sleep(kill.wait_share * MOMENTS[kill.moment][1])
            _strike(started, kill)
            self.counts["killed after patience"] += not have_fallen([started])
        finally:
            started.kill()
        self.counts.update(("kills", kill.moment, kill.target, by))
        self._nothing_lost(output, newest, num_events)
        return True

    def _nothing_lost(self, output: Path, newest: int, num_events: int) -> None:
        """The start that was killed went on from the newest checkpoint there was, which only newer ones replace."""
        assert _newest(output) >= newest, f"{output}: checkpoint-{newest} is gone"
        for event in Run(output).events[num_events:]:
            if event["event"] in ("start", "resume"):
                name = event.get("checkpoint")
                assert (int(name.partition("-")[2]) if name else 0) == newest, (output, event, newest)

    def _finish(self, output: Path, layout: tuple[str, int]) -> None:
        """Start once more, and leave the run to its end."""
        newest, num_events = _newest(output), len(Run(output).events)
        completed(self._command(output, layout, self.launchers[0]))
        self._nothing_lost(output, newest, num_events)

    def _ends_nearly_as(self, output: Path, reference: Run) -> None:
        """Weights, losses and validation are within `NEARLY` of the undisturbed run's."""
        run = Run(output)
        losses = [abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True)]
        ours, theirs = _validations(run), _validations(reference)
        assert [step for step, _ in ours] == [step for step, _ in theirs], (output, ours, theirs)
        losses += [abs(a - b) for (_, a), (_, b) in zip(ours, theirs, strict=True)]
        weights, others = (load_file(each.dir.export / "model.safetensors") for each in (run, reference))
        assert weights.keys() == others.keys()
        moved = max(float((weights[name] - others[name]).abs().max()) for name in others)
        for name, value in (("loss", max(losses)), ("weights", moved)):
            self.differences[name] = max(self.differences[name], value)
            assert value <= NEARLY, (output, name, value)

    def _command(self, output: Path, layout: tuple[str, int], by: str) -> list[str]:
        return self.workshop.command(output, *layout, "plain" if layout == ALONE else by, self.settings)


def ends_as(run: Run, reference: Run) -> None:
    """Fail unless weights, losses and validation are those of the undisturbed run, to the last bit."""
    name = "model.safetensors"
    assert run.losses == reference.losses
    measured = [_validations(each) for each in (run, reference)]
    assert measured[0] == measured[1], (run.folder, measured)
    assert (run.dir.export / name).read_bytes() == (reference.dir.export / name).read_bytes()


def _validations(run: Run) -> list[tuple[int, float]]:
    return [(row["step"], row["eval/loss"]) for row in run.validation_rows]


def _newest(output: Path) -> int:
    names = committed(output)
    return int(names[0].partition("-")[2]) if names else 0


def came(started: list[Started], folder: Folder, moment: str) -> bool:
    """Wait for the moment; False where one of the commands of the run ended first."""
    while all(each.process.poll() is None for each in started):
        try:
            if MOMENTS[moment][0](folder):
                return True
        except OSError:  # a file went while it was looked at
            continue
        time.sleep(0.002)
    return False


def have_fallen(started: list[Started]) -> bool:
    """Return whether what was not killed has ended by itself, as launchers do, and ranks that lose others."""
    until = time.monotonic() + PATIENCE_SECONDS
    while (left := any(each.processes() for each in started)) and time.monotonic() < until:
        time.sleep(0.02)
    return not left


def _strike(started: Started, kill: Kill) -> None:
    ranks, launcher = ranks_of(started), started.process.pid
    victims = {
        "one rank": ranks[kill.rank : kill.rank + 1],
        "all ranks": ranks,
        "launcher": [launcher],
        "everything": started.processes(),
    }
    send_kill(victims[kill.target])


def ranks_of(started: Started) -> list[int]:
    """The processes that run train.py, without what they started; none yet, perhaps."""
    if isinstance(started.process, ForkedRanks):
        path = started.process.logs / "ranks"
        return [int(line) for line in path.read_text().split()] if path.exists() else []
    return [process for process in started.processes() if _is_rank(process)]


def _is_rank(process: int) -> bool:
    try:
        environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    has_rank = any(variable.startswith(b"RANK=") for variable in environment)
    return has_rank and b"train.py" in words and b"torchrun" not in b" ".join(words[:3])
