"""Promise: ranks that exchange messages decide together how many. In each case one of two ranks differs.

`python -m tests.training.test_ranks_apart FILE` is what each of the two does.
"""

import json
import os
import shutil
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed import comm
from transformers import AutoConfig, AutoModelForCausalLM

from pretraining.checkpoints import background
from pretraining.errors import UserError, one_line_errors
from pretraining.evaluation.scores import HellaSwag, Item, Passes
from pretraining.evaluation.validation import Validation, check_alike
from pretraining.model.parallel import split_experts
from pretraining.recipe import load_recipe
from pretraining.recipe.sections import Monitors
from pretraining.runtime.run_folder import RunFolder
from pretraining.training import arguments as run_arguments
from pretraining.training.ranks import joined_ranks
from pretraining.training.stability import StabilityMonitor
from pretraining.training.stopping import TIME_LIMIT, StopRequests
from tests.evaluation.test_validation import Bigrams, by_source, recipe_of, sets_of, three_sources
from tests.gear.runs import EXPERTS, execute

STEPS = 50
SHARED_MEMORY = Path("/dev/shm")


def prefetched(folder: Path) -> int:
    """Batches that a worker reads ahead; on rank 1 others have filled the shared memory."""
    free = 10**9 if dist.get_rank() == 0 else 10**5
    recipe = load_recipe("features/gpt2", ["training.dataloader_num_workers=1"])
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
    commit = lambda folder, marker: (folder / "committed.json").write_text("{}")  # noqa: E731
    writer = background.CheckpointWriter(run, commit)
    with mock.patch.object(background, "free_memory_bytes", lambda: free):
        writer.save(1, {f"master/weight@{dist.get_rank() * 4}": torch.ones(4)})
        was_in_flight = writer._flight is not None
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
    tokenizer = mock.Mock(side_effect=lambda text, **_: {"input_ids": list(map(ord, text))}, eos_token_id=0)
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


def validated(folder: Path) -> dict[str, float]:
    """The metrics of batches that two ranks cannot share evenly, and in how many forward passes each took part."""
    entry, model, passes = three_sources(folder / str(dist.get_rank())), Bigrams(), []
    model.register_forward_hook(lambda *_: passes.append(1))
    found = Validation(sets_of(by_source(entry)), recipe_of(batch_size=3)).measure(model)
    return {**found, "passes": len(passes)}


def reduced(folder: Path) -> list[float]:
    """A sum over the ranks, and how many buffers of DeepSpeed's are in shared memory.

    One would take 66 MiB until the machine starts anew.
    """
    rank = dist.get_rank()
    named = list(SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_{rank}"))
    comm.barrier()
    value = torch.full((1000,), rank + 1.0)
    comm.all_reduce(value)
    comm.inference_all_reduce(value)
    return [value[0].item(), len(named)]


CASES = [prefetched, alerted, saved, stopped, measured, validated, reduced]
CASES += [continued] if find_spec("lm_eval") else []


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


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """What two ranks found, case by case, and how they ended."""
    path = tmp_path_factory.mktemp("apart") / "found.json"
    words = ["forked", "2", "-m", "tests.training.test_ranks_apart", path]
    finished = execute(words, timeout=300, TORCH_EXTENSIONS_DIR=str(path.parent / "extensions"))
    assert path.exists(), finished.output
    return json.loads(path.read_text()), finished


@pytest.mark.parametrize(
    "case, expected",
    [
        ("prefetched", 2),  # torch's least, which is all that rank 1 has room for
        ("alerted", None),  # rank 0's norm counts
        ("saved", ["checkpoint-1", "False"]),  # while training waits, on both
        ("stopped", 3),
        (
            "measured",
            "evaluation.hellaswag, endings: 12 on HOST, 8 on HOST; all nodes must read the same files",
        ),
        ("continued", ["1 tokens", "9 tokens"]),
    ],
)
def test_both_ranks_find_the_same(apart, case, expected):
    """Else one of them would wait for a message that the other does not send."""
    if case == "continued":
        pytest.importorskip("lm_eval", reason="lm-eval is not installed (requirements-eval.txt)")
    assert apart[0][case] == [expected, expected]


def test_two_ranks_measure_what_one_does(apart, tmp_path):
    """Batches that they cannot share evenly: the same numbers by source, and as many forward passes on each rank."""
    first, second = apart[0]["validated"]
    assert first == second and first["passes"] > 0
    alone = Validation(sets_of(by_source(three_sources(tmp_path))), recipe_of()).measure(Bigrams())
    assert {name: first[name] for name in alone} == pytest.approx(alone, rel=1e-6)


def test_no_rank_has_a_buffer_in_shared_memory(apart, tmp_path_factory):
    """Nothing is compiled for it and nothing is said of it."""
    found, finished = apart
    assert found["reduced"] == [[6.0, 0], [6.0, 0]]
    assert not any(tmp_path_factory.getbasetemp().glob("apart*/extensions/*"))
    assert "built" not in finished.stdout and "compil" not in finished.stdout


def test_what_one_node_lacks_is_one_line_and_exit_code_2(apart):
    """Rank 0 waits for a message meanwhile, and cannot report it."""
    finished = apart[1]
    assert finished.code == 2, finished.output
    said = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert said == ["error: no compiler on this node; install one"]


if __name__ == "__main__":
    main(sys.argv[1])
