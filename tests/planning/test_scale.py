"""Nothing grows faster than what it describes: operations are counted, so that no machine is too slow for this."""

import sys
import threading

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups

from pretraining.checkpoints import background, folders
from pretraining.checkpoints.background import CheckpointWriter
from pretraining.checkpoints.remote import RemoteRun
from pretraining.checkpoints.upload import Uploader
from pretraining.ds_config import Degrees
from pretraining.runtime.process_group import host_group, largest_over_ranks, own_group, rank_groups
from pretraining.runtime.run_folder import RunFolder
from pretraining.runtime.wall_time import attempts
from pretraining.training import stopping
from pretraining.upstream.deepspeed import groups_at_once
from pretraining.upstream.fake_gpu import fake_gpu
from pretraining.upstream.split_weights import make_expert_groups
from tests.gear.runs import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

LINEAR = 1.05
"""The largest exponent that counts as linear."""


@pytest.mark.parametrize(
    ("name", "sizes"), [("marker of ranks", (16, 256)), ("files that a rank opens", (8, 128))]
)
def test_a_checkpoint_of_more_ranks_asks_the_disk_no_more_than_in_proportion(tmp_path, name, sizes):
    """The marker opens each receipt twice; at a resume a rank opens its own file, however many there are."""
    import scale

    measure = scale.CURVES[name][1]
    found = scale.curve(sizes, lambda size: measure(tmp_path / str(size), size))
    assert found["exponent"]["operations"] <= (0 if "opens" in name else LINEAR)


def test_a_full_cache_is_not_listed_at_each_fetch(tmp_path):
    import scale

    few, many = (scale.cache(tmp_path / str(size), size)["operations"] for size in (800, 1600))
    assert many <= 2.2 * few


def test_a_share_of_the_files_costs_one_look_at_each(monkeypatch):
    looks, replace = [], folders.heapreplace
    monkeypatch.setattr(folders, "heapreplace", lambda *each: looks.append(1) or replace(*each))
    files = {f"rank-{number}": {"bytes": 1 + number % 7} for number in range(4096)}
    shares = [folders.rank_files(files, rank, 64) for rank in (0, 63)]
    assert len(looks) == 2 * len(files) and not shares[0].keys() & shares[1].keys()


def test_ranks_exchange_one_number_at_a_step_while_a_save_is_in_flight(tmp_path, monkeypatch):
    """Their reports are gathered once, at its end."""
    gathered, gather, finish = [], background.gather_from_ranks, threading.Event()
    monkeypatch.setattr(background, "gather_from_ranks", lambda *each: gathered.append(1) or gather(*each))
    writer = CheckpointWriter(RunFolder(tmp_path), lambda folder, marker: finish.wait(30))
    writer.save(1, {"master/weight@0": torch.zeros(4)}, marker={"ranks": 1})
    before = len(gathered)
    for _ in range(20):
        writer.poll()
    assert len(gathered) == before and writer._flight is not None
    finish.set()
    writer.wait()
    assert len(gathered) == before + 1


def test_a_run_without_events_has_no_attempts():
    assert attempts([], 0.0) == []


@pytest.fixture
def groups_made(monkeypatch) -> list[str]:
    """The calls of torch's `new_group` and `split_group`, by name; on NCCL all ranks of the run take part in each."""
    made: list[str] = []
    for name in ("new_group", "split_group"):
        call = getattr(dist, name)
        monkeypatch.setattr(
            dist, name, lambda *a, name=name, call=call, **k: made.append(name) or call(*a, **k)
        )
    return made


def test_all_that_the_main_threads_agree_on_goes_through_one_group(tmp_path, monkeypatch, groups_made):
    """In each every rank has a connection to every other one, and a rollback would add to them."""
    monkeypatch.setattr(stopping, "SignalListener", lambda in_vain: None)
    run, remote = RunFolder(tmp_path), RemoteRun(str(tmp_path / "store"), "run")

    def attempt() -> None:
        largest_over_ranks(0)
        CheckpointWriter(run, lambda folder, marker: None)
        Uploader(run, remote)

    with fake_gpu(1024):
        groups_made.clear()
        stopping.StopRequests(run, None)
        attempt()
        assert groups_made == ["new_group"]
        attempt()
        assert groups_made == ["new_group"]
    with fake_gpu(8):  # the ranks of another run have never met those
        groups_made.clear()
        assert dist.get_world_size(host_group()) == 8 and groups_made == ["new_group"]


@pytest.mark.parametrize("world_size", [16, 1024])
def test_groups_of_all_ranks_are_made_by_one_split(groups_made, world_size):
    """Sequences, experts and the copies of nodes: on NCCL all ranks take part in making each group."""
    first = world_size // 2 + 3
    with fake_gpu(world_size, first):
        groups_made.clear()
        split = rank_groups(Degrees(sequence=4, tensor=2))
        with groups_at_once(own_group):
            experts = make_expert_groups(8)
            deepspeed_groups._create_zero_param_parallel_group(8)
        assert groups_made == ["split_group"] * 4
        node = list(range(first - first % 8, first - first % 8 + 8))
        found = (
            split.sequence_group,
            experts,
            deepspeed_groups._get_expert_data_parallel_group("ep_size_8"),
            deepspeed_groups._get_zero_param_intra_parallel_group(),
        )
        expected = node[first % 2 :: 2], node, list(range(first % 8, world_size, 8)), node
        for group, ranks in zip(found, expected, strict=True):
            # in this order, which is that of the parts and of the experts
            assert dist.get_process_group_ranks(group) == ranks
            assert dist.get_rank(group) == ranks.index(first)


def test_ranks_that_follow_others_in_one_process_get_groups_of_their_own():
    """The address of a group that is gone is given to the next one."""
    for world_size in [16, 32] * 8:
        with fake_gpu(world_size, world_size - 1):
            group = rank_groups(Degrees(sequence=4, tensor=2)).sequence_group
            assert dist.get_process_group_ranks(group) == list(range(world_size - 7, world_size, 2))
