"""Two ranks of which one differs from the other in a decision: `python -m tests.gear.ranks_apart FILE`."""

import json
import shutil
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from pretraining.checkpoints import background
from pretraining.errors import UserError, one_line_errors
from pretraining.evaluation.scores import HellaSwag, Item, Passes
from pretraining.evaluation.validation import check_alike
from pretraining.model.parallel import split_experts
from pretraining.recipe import load_recipe
from pretraining.recipe.sections import Monitors
from pretraining.runtime.run_folder import RunFolder
from pretraining.training import arguments as run_arguments
from pretraining.training.ranks import joined_ranks
from pretraining.training.stability import StabilityMonitor
from pretraining.training.stopping import TIME_LIMIT, StopRequests
from tests.gear.runs import EXPERTS

STEPS = 50


def prefetched(folder: Path) -> int:
    """Batches that a worker reads ahead; on rank 1 others have filled the shared memory."""
    free = 10**9 if dist.get_rank() == 0 else 10**5
    recipe = load_recipe("tiny", ["training.dataloader_num_workers=1"])
    with mock.patch.object(shutil, "disk_usage", lambda path: SimpleNamespace(free=free)):
        return run_arguments.build_arguments(recipe, None, folder, 16).dataloader_prefetch_factor


def alerted(folder: Path) -> int | None:
    """The step whose norm exploded: rank 0's is just below what counts as that, rank 1's just above."""
    monitor = StabilityMonitor(RunFolder(folder), Monitors(), lambda step: {})
    state = SimpleNamespace(global_step=0, is_world_process_zero=dist.get_rank() == 0)
    for step in range(STEPS):
        state.global_step = step
        monitor._judge_norm(1.0, state)
    state.global_step = STEPS
    limit = monitor.norm_course.limit(monitor.settings.score)
    monitor._judge_norm(limit * (1 - 1e-6 if dist.get_rank() == 0 else 1 + 1e-6), state)
    return monitor.alerted_step


def saved(folder: Path) -> list[str]:
    """How a checkpoint was written; rank 1 has no memory for a copy."""
    run, free = RunFolder(folder), 10**12 if dist.get_rank() == 0 else 10
    writer = background.CheckpointWriter(
        run, lambda folder, marker: (folder / "committed.json").write_text("{}")
    )
    with mock.patch.object(background, "free_memory_bytes", lambda: free):
        writer.save(1, {f"master/weight@{dist.get_rank() * 4}": torch.ones(4)})
        was_in_flight = writer.in_flight
    writer.wait()
    return [writer.last["checkpoint"], str(was_in_flight)]


def stopped(folder: Path) -> int:
    """The look at which both stop; rank 1's clock alone is past the time limit, from its third look on."""
    stop = StopRequests(RunFolder(folder), time_limit_hours=1000)
    for look in range(1, 10):
        if dist.get_rank() == 1 and look == 3:
            stop._until = 0.0
        if stop.agreed():
            assert stop._agreed == TIME_LIMIT
            return look
    return 0


def continued(folder: Path) -> list[str]:
    """Texts of a model of split experts, without ZeRO-3: rank 0's is done after a token, rank 1's after nine."""
    from lm_eval.api.instance import Instance

    from pretraining.evaluation.scores import HarnessModel, Passes

    config = AutoConfig.for_model(**EXPERTS, bos_token_id=0, eos_token_id=0, use_cache=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    split_experts(model, 2)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokenizer = mock.Mock(
        eos_token_id=0, side_effect=lambda text, **_: {"input_ids": [ord(each) for each in text]}
    )
    tokenizer.decode = lambda ids, **_: f"{len(ids)} tokens"
    ways = ({"until": [], "max_gen_toks": number, "ignore_eos": True} for number in (1, 9))
    asked = [Instance("generate_until", {}, ("def", way), number) for number, way in enumerate(ways)]
    return HarnessModel(model, tokenizer, Passes(64, 1)).generate_until(asked)


def measured(folder: Path) -> str:
    """What both are told if rank 1 reads fewer items of HellaSwag."""
    tokenizer = mock.Mock(side_effect=lambda text, **_: {"input_ids": list(map(ord, text))})
    items = [Item("a b", ("c", "d", "e", "f"), 0)] * (3 - dist.get_rank())
    data = SimpleNamespace(fingerprint="0")
    validation = SimpleNamespace(parts=[SimpleNamespace(dataset=range(7))])
    try:
        check_alike(data, validation, [HellaSwag(items, tokenizer, Passes(64, 1))])
    except UserError as error:
        return str(error).replace(socket.gethostname(), "HOST")
    return ""


CASES = [prefetched, alerted, saved, stopped, measured, *([continued] if find_spec("lm_eval") else [])]


def main(path: str) -> None:
    """Write {case: what each rank found}; then rank 1 alone meets an error that a whole node would."""
    with one_line_errors(), joined_ranks(None):
        found = {}
        for case in CASES:
            folder = Path(path).with_name(case.__name__)
            folder.mkdir(exist_ok=True)
            answers: list = [None, None]
            dist.all_gather_object(answers, case(folder))
            found[case.__name__] = answers
        if dist.get_rank() == 0:
            Path(path).write_text(json.dumps(found))
        if dist.get_rank() == 1:
            raise UserError("no compiler on this node; install one")
        dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
