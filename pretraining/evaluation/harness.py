"""Tasks of lm-eval, by name or from local YAML files, on a model in training or exported."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from pretraining.ds_config import NOT_SPLIT, Degrees
from pretraining.errors import UserError, nearest, require
from pretraining.evaluation.sampling import seeded
from pretraining.upstream.lm_eval import no_task_bars

SEED = 1234
"""The seed that lm-eval itself uses for few-shot examples."""
SUFFIXES = (".yaml", ".yml")


class Harness:
    """Tasks of lm-eval. They are loaded with their data before there is a model.

    Args:
        names: tasks, tags or groups of lm-eval, YAML files, or folders of YAML files.
        limit: items of each task.
    """

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        batch_size: int,
        limit: int | None = None,
        degrees: Degrees = NOT_SPLIT,
    ) -> None:
        self.degrees = degrees
        self.loaded = load_tasks(names)
        self.tokenizer, self.max_length = tokenizer, max_length
        self.batch_size, self.limit = batch_size, limit

    def num_items(self) -> dict[str, int]:
        """Count the items of each task, by a name for it."""
        return {
            f"evaluation.tasks, items of {name}": len(task.eval_docs)
            for name, task in self.loaded["tasks"].items()
        }

    def measure(
        self, model: torch.nn.Module, interrupted: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Compute {"<task>/<metric>": score}, the same on every rank; all ranks must call it. Raises `Interrupted`.

        Every rank builds all requests, and the ranks share the forward passes.
        """
        # lm-eval is optional, and the model class below derives from one of its classes.
        from lm_eval.evaluator import evaluate

        from pretraining.evaluation.harness_model import HarnessModel

        answering = HarnessModel(
            model, self.tokenizer, self.max_length, self.batch_size, interrupted, self.degrees
        )
        with _own_randomness(answering.device), no_task_bars():
            # no bootstrap: errors of the estimates are not logged, and take minutes
            results = evaluate(answering, self.loaded, limit=self.limit, bootstrap_iters=0, log_samples=False)
        return scores_of(results["results"])


def load_tasks(names: Sequence[str]) -> dict:
    """Load what `lm_eval.evaluator.evaluate` takes, with as many few-shot examples as each task says.

    Raises:
        UserError: lm-eval is missing, knows no such task, or cannot read its data.
    """
    managers = require("lm_eval.tasks", f"evaluation.tasks ({', '.join(names)})")
    folders = [name for name in names if Path(name).is_dir()]
    shipped = [name for name in names if name not in folders and not name.endswith(SUFFIXES)]
    # Indexing the tasks that lm-eval ships takes half a minute; files need none of them.
    manager = managers.TaskManager(include_path=folders or None, include_defaults=bool(shipped))
    wanted = [name for name in names if name not in folders]
    for folder in folders:
        wanted += _tasks_in(folder, managers)
    for name in wanted:
        if name not in manager.all_tasks and not Path(name).is_file():
            known = nearest(name, manager.all_tasks) or "; `lm-eval ls tasks` lists them"
            raise UserError(f"evaluation.tasks: lm-eval knows no task {name!r}{known}")
    loaded = _load(manager, wanted)
    for task in loaded["tasks"].values():
        # The same defaults as lm-eval's own command.
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)
    return loaded


def _tasks_in(folder: str, managers) -> list[str]:
    found = managers.TaskManager(include_path=folder, include_defaults=False).all_tasks
    if not found:
        raise UserError(f"evaluation.tasks: {folder} holds no task of lm-eval; give a folder of YAML files")
    return found


def _load(manager, names: list[str]) -> dict:
    try:
        return manager.load(names)
    except UserError:
        raise
    except Exception as error:  # from a task's own code, its YAML, its data set or the network
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(
            f"evaluation.tasks: {', '.join(names)} cannot be loaded ({reason}); check the names and the network"
        ) from error


def scores_of(results: dict[str, dict]) -> dict[str, float]:
    """Name scores: {"arc_easy/acc": 0.4} from lm-eval's {"arc_easy": {"acc,none": 0.4, "acc_stderr,none": ...}}.

    A task's own filter stays in the name: "gsm8k/exact_match.strict-match".
    """
    scores = {}
    for task, values in results.items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            # Keys without a comma, such as "alias", are no scores.
            if isinstance(value, int | float) and kind and not metric.endswith("_stderr"):
                name = metric if kind == "none" else f"{metric}.{kind}"
                scores[f"{task}/{name}"] = float(value)
    return scores


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Let tasks draw the same random numbers each time, without effect on training's generators."""
    # Tasks draw from all three generators: of Python, of numpy, and of torch below.
    states = random.getstate(), np.random.get_state()
    random.seed(SEED)
    np.random.seed(SEED)
    try:
        with seeded(SEED, device):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
