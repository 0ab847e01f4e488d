"""You know before you pay: under a launcher the doctor names the rank, pair, host or folder that would break a run."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pretraining.doctor import layers, rates, shared
from pretraining.doctor.cluster import pair_remedy, rounds_of, tournament
from pretraining.doctor.findings import BREAKS, COSTS, FINE, Finding, of_all_nodes
from pretraining.doctor.layers import Trained, _curve, reduced_recipe
from pretraining.doctor.rates import Products, bus_bandwidth, judge_messages, judge_products, link_peak
from pretraining.doctor.roll_call import Rank
from pretraining.doctor.shared import compare_ranks, judge_clocks
from pretraining.planning.gpus import find_gpu
from pretraining.planning.sizes import model_size
from pretraining.recipe import load_recipe, recipe_names
from pretraining.runtime.exit_codes import SUPERVISOR
from pretraining.training import profile
from tests.gear.doctor_ranks import NAMES
from tests.gear.hosts import hosts
from tests.gear.runs import answer_of, execute, forked_programs, launcher, on_own_port

DOCTOR = ["-m", "pretraining.doctor"]
TEST_SECONDS = 300


def ranks_on(*counts: int) -> SimpleNamespace:
    """What the checks look at of a roll call: so many ranks on node0, node1, ..."""
    ranks = [(f"node{node}", local) for node, count in enumerate(counts) for local in range(count)]
    came = [Rank(number, host, 100 + number, local) for number, (host, local) in enumerate(ranks)]
    nodes = [[rank.rank for rank in came if rank.host == f"node{node}"] for node in range(len(counts))]
    return SimpleNamespace(ranks=came, nodes=nodes, size=len(came), hosts=[rank.host for rank in came])


def by_check(findings: list[dict], check: str) -> list[dict]:
    return [finding for finding in findings if finding["check"] == check]


# ---- what is found, without ranks


def test_every_two_meet_once_and_nobody_is_in_two_places():
    """Nodes of different sizes too: the rounds grow with nodes and GPUs of a node, not with their product."""
    for players in range(2, 9):
        rounds = tournament(players)
        pairs = [pair for pairs in rounds for pair in pairs]
        assert sorted(pairs) == [(a, b) for a in range(players) for b in range(a + 1, players)]
        assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)
    nodes = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    rounds = rounds_of(nodes)
    met = {pair for pairs in rounds for pair in pairs}
    for ranks in nodes:
        assert met >= {(a, b) for a in ranks for b in ranks if a < b}
    assert {(0, 4), (0, 8), (4, 8), (3, 7)} <= met and len(rounds) == 3 + 3
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)


def test_a_folder_of_each_node_is_fine_beside_a_store():
    """Ranks of a node that see different folders are not, nor are folders apart without `checkpoints.upload`."""

    def verdict(missed: list[list[int]], upload: str | None) -> str:
        return shared.judge_run_folder(Path("runs/x"), upload, ranks_on(2, 2), missed)[0].verdict

    by_node = [[2, 3], [2, 3], [0, 1], [0, 1]]
    assert verdict(by_node, "s3://bucket/runs") == FINE and verdict(by_node, None) == BREAKS
    assert verdict([[1, 2, 3], [0, 2, 3], [0, 1], [0, 1]], "s3://bucket/runs") == BREAKS
    assert verdict([[]] * 4, None) == FINE


def test_half_of_the_link_is_told_beside_its_peak():
    """In one node NVLink's; between nodes that of the network cards of a node, if they carry less. Bandwidths are those
    of nccl-tests (PERFORMANCE.md): 2 (n-1)/n of the message for an all-reduce, (n-1)/n of what all have at the end."""
    assert bus_bandwidth("all-reduce", 8_000, 1.0, 8) == 14_000
    assert bus_bandwidth("all-gather", 8_000, 1.0, 8) == 7_000
    gpu, call = find_gpu("H100"), ranks_on(8)
    healthy = {1024: 2e-5, 1 << 28: (1 << 28) * 1.75 / 360e9}
    assert judge_messages(call, "all-reduce", healthy, gpu, True).verdict == FINE
    slow = judge_messages(call, "all-reduce", {1024: 2e-5, 1 << 28: 1e-2}, gpu, True)
    assert slow.verdict == COSTS and gpu.link in slow.message and "topo" in slow.remedy
    assert slow.values["all_reduce_bytes_per_second"] == pytest.approx((1 << 28) * 1.75 / 1e-2)
    assert judge_messages(call, "all-reduce", {1024: 5e-3, 1 << 28: 1e-3}, gpu, True).verdict == COSTS
    assert link_peak(gpu, [[0, 1]])[0] == gpu.link_bytes_per_second
    assert link_peak(gpu, [[0], [1]]) == (gpu.network_bytes_per_second, "the network")
    assert judge_messages(call, "all-reduce", {1024: 1.0}, None, False).verdict == FINE


def test_a_slow_rank_is_named_with_the_state_of_its_gpu():
    """10 % below the median; of two ranks the faster one is the median."""
    assert rates.slow_ranks([100, 99, 98, 88], 0.9) == [3] and rates.slow_ranks([100, 89], 0.9) == [1]
    state = {"clock_hz": 1.2e9, "temperature_celsius": 91, "watts": 350.4, "held_back_by": ["heat (driver)"]}
    found = [{"flops_per_second": 7e14, "state": {}}, {"flops_per_second": 5e14, "state": state}]
    products = Products(16384, 4096, 14336, "bf16")
    whole, slow = judge_products(ranks_on(2), products, find_gpu("H100"), True, found)
    assert whole.verdict == FINE and whole.values["product_flops"] == 7e14
    assert slow.verdict == COSTS and slow.where == "rank 1 on node0"
    assert "29% below the median (1,200 MHz, 91 C, 350 W, held back by heat (driver))" in slow.message
    assert rates.state_in_words({}) == ""


def test_the_rate_of_products_is_that_of_a_gpu_under_load(monkeypatch):
    """Plans use it for weeks: neither a clock that is still high nor the shape that suits a library best may decide."""
    each, asked = iter([9.0, 5.0, 4.0, 3.0, 4.0, 8.0]), []

    def rounds(seconds, multiply, on_gpu):
        asked.append(seconds)
        return next(each), 1.0

    monkeypatch.setattr(rates, "rounds_within", rounds)
    assert rates.rounds_a_second(lambda: None, on_gpu=True) == 4.0  # the load before it does not count
    assert asked[0] == rates.LOADED_SECONDS >= 20


def test_the_measured_products_are_those_of_a_training_pass():
    """A third of them is the gradient of a weight: summed over the tokens, into a small output."""
    flops, multiply = rates.round_of_products(Products(64, 32, 128, "fp32"), on_gpu=False)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.mm.default:
                seen.append((*args[0].shape, args[1].shape[1]))
            return function(*args, **(kwargs or {}))

    with Watch():
        multiply()
    assert seen == [(64, 32, 128), (64, 128, 32), (32, 64, 128)]
    assert flops == sum(2 * rows * inner * columns for rows, inner, columns in seen)


def test_what_differs_between_ranks_is_named_once_with_its_ranks():
    """Hosts may name interfaces of their own, not versions, variables of collectives, or numbers of ranks."""
    alike = {"version of torch": "2.13.0", "version of deepspeed": "0.19.8", "GPU": "H100"}
    call = ranks_on(2, 2, 2)
    assert [each.verdict for each in compare_ranks(call, [alike] * 6)] == [FINE]
    own = [{**alike, "variable NCCL_SOCKET_IFNAME": f"eth{rank // 2}"} for rank in range(6)]
    assert [each.verdict for each in compare_ranks(call, own)] == [FINE]
    odd = [dict(each) for each in own]
    odd[3] |= {"version of torch": "2.12.0", "variable NCCL_ALGO": "Ring"}
    odd[3] |= {"variable NCCL_SOCKET_IFNAME": "eth9"}
    odd[5]["GPU"] = "A100"
    found = {each.message.partition(" is ")[0]: each for each in compare_ranks(call, odd)}
    assert set(found) == {"version of torch", "variable NCCL_SOCKET_IFNAME", "variable NCCL_ALGO", "GPU"}
    torch_apart = found["version of torch"]
    assert (torch_apart.verdict, torch_apart.where) == (BREAKS, "rank 3 on node1")
    assert found["GPU"].verdict == COSTS and "elsewhere H100" in found["GPU"].message
    uneven = compare_ranks(ranks_on(2, 1, 2), [alike] * 5)
    assert [(each.verdict, each.where) for each in uneven] == [(COSTS, "node1")]


def test_a_clock_is_wrong_only_beyond_what_the_way_there_explains():
    ahead, bound = (5.0, -5.0), (4.5, 0.1)
    found = [None, *({"ahead_seconds": a, "bound_seconds": b} for a, b in zip(ahead, bound, strict=True))]
    call = ranks_on(1, 1, 1)
    assert [each.verdict for each in judge_clocks(call, found[:2])] == [FINE]
    (wrong,) = judge_clocks(call, found)
    assert wrong.where == "rank 2 on node2" and "5.00 s behind rank 0 on node0" in wrong.message


def test_the_remedy_follows_the_library_that_failed():
    assert "firewall" in pair_remedy(["cannot connect to 10.0.0.2 (TCP, port 1): timed out"])
    assert "NCCL_IB_DISABLE" in pair_remedy(["nccl does not work: RuntimeError: unhandled system error"])


@pytest.mark.parametrize("name", recipe_names())
def test_layers_of_every_recipe_fit_a_processor(name):
    """A stand-in of the same family where the recipe's own width is too much."""
    recipe = load_recipe(name)
    reduced = reduced_recipe(recipe, 8, on_gpu=False)
    assert model_size(reduced.model).total <= layers.PROCESSOR_PARAMETERS
    assert reduced.model.model_type == recipe.model.model_type and reduced.num_steps == layers.STEPS


def test_on_a_gpu_the_recipes_own_width_and_batch_are_kept(monkeypatch):
    """As many layers as fit its memory without sharding."""
    memory = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    recipe = load_recipe("7b")
    reduced = reduced_recipe(recipe, 8, on_gpu=True)
    kept = {key: value for key, value in recipe.model.items() if key != "num_hidden_layers"}
    assert reduced.model == {**kept, "num_hidden_layers": 1} and reduced.micro_batch == recipe.micro_batch
    assert reduced_recipe(load_recipe("124m"), 8, on_gpu=True).model["n_layer"] == layers.MOST_LAYERS


def test_a_stage_that_leaves_stage_0s_curve_is_named():
    """A NaN, too; stages for which there was no time are named as left out."""
    recipe = load_recipe("features/gpt2")
    trained = {"zero0": Trained([6.0, 5.0], 1.0, None), "zero2": Trained([6.0, 5.1], 1.0, None)}
    (found,) = _curve(recipe, trained, ["zero3 (no time)"])
    assert found.verdict == BREAKS and "zero2" in found.remedy and "zero3 (no time)" in found.message
    trained["zero2"] = Trained([6.0, float("nan")], 1.0, None)
    assert _curve(recipe, trained, [])[0].verdict == BREAKS
    trained["zero2"] = Trained([6.0, 5.0001], 1.0, None)
    assert _curve(recipe, trained, [])[0].verdict == FINE


def test_peak_memory_counts_from_its_making():
    """What the process held before, and gave back, is not the model's."""
    held = b"x" * (200 << 20)
    del held
    memory = profile.PeakMemory()
    assert profile._status_bytes("VmHWM") - memory.held_before < 50 << 20


def test_a_line_that_is_not_the_same_on_every_node_names_its_nodes():
    """Each once: the same everywhere has no name, numbers are the first node's, and what one node has is its own."""
    hosts = ["node0", "node1", "node2"]
    found = [
        [
            Finding("memory", FINE, f"{node + 60}.1 GB, 3 free"),
            Finding("host name", FINE, f"{host} is 10.0.0.{node}"),
            Finding("cores", FINE, "8"),
            Finding("network", COSTS, "NCCL_DEBUG=TRACE", "unset NCCL_DEBUG"),
        ]
        for node, host in enumerate(hosts)
    ]
    found[2][2] = Finding("cores", COSTS, "2", "more")
    found[1] += [Finding("disk", BREAKS, "full", "", place) for place in ("/data", "/fast")]
    lines = [(each.check, each.verdict, each.where) for each in of_all_nodes(hosts, found)]
    expected = [("memory", FINE, "node0"), ("host name", FINE, "node0"), ("cores", FINE, "node0, node1")]
    expected += [
        ("network", COSTS, ""),
        ("disk", BREAKS, "/data on node1"),
        ("disk", BREAKS, "/fast on node1"),
    ]
    assert lines == [*expected, ("cores", COSTS, "node2")]
    many = [[Finding("clock", COSTS, f"{node} s ahead")] for node in range(9)]
    (line,) = of_all_nodes([f"n{node}" for node in range(9)], many)
    assert line.where == "n0, n1, n2, n3 and 5 more"


# ---- with ranks


def test_healthy_ranks_are_fine(workshop):
    """Under the launcher of the run: each rate with its unit, progress from rank 0, nothing left behind."""
    healthy = workshop.examined()
    checks = {finding["check"]: finding for finding in healthy["findings"]}
    wanted = ["ranks alike", "shared run folder", "shared data", "pairs of ranks", "all-reduce", "all-gather"]
    wanted += ["products", "disk of all ranks", "layers", "layers' memory", "curve of stages"]
    assert {checks[name]["verdict"] for name in wanted} == {FINE}
    assert checks["all-reduce"]["values"]["all_reduce_bytes_per_second"] > 0
    assert checks["layers"]["values"]["tokens_per_second"] > 0
    assert "the same prepared data for 2 ranks" in checks["shared data"]["message"]
    assert healthy["stderr"].count("doctor: ") == healthy["stderr"].count(" s: ") >= 10
    # the curve of every stage is stage 0's: the recipe's own layers through the real Trainer and engine, fp32
    curve = checks["curve of stages"]
    apart = curve["values"]["loss_difference_by_stage"]
    assert apart and max(apart.values()) < 1e-5
    # A busy machine has no time for all of them within the minute; the line says which are left out.
    left_out = {each.split(" ")[0] for each in curve["message"].partition("left out: ")[2].split(", ")} - {""}
    assert set(apart) | left_out == {"zero1", "zero2", "zero3"}


def test_torchrun_starts_it_too(tmp_path):
    """Without a recipe: the ranks and the machine alone, as a table."""
    command = [*on_own_port(launcher("torchrun", 2)), *DOCTOR, "--output_dir", str(tmp_path / "run")]
    forks = {"PRETRAINING_DOCTOR_FOLDER": str(tmp_path / "kept"), **forked_programs()}
    finished = execute(command, timeout=TEST_SECONDS, **forks)
    assert finished.code == 0 and "pairs of ranks" in finished.stdout, finished.output
    assert "nothing will break" in finished.stdout and "layers" not in finished.stdout


def examine_with(fault: str, folder: Path, *options: str, ranks: int = 2) -> tuple[int, list[dict]]:
    """Exit code and findings of ranks with this fault (`tests/gear/doctor_ranks.py`); a supervisor learns the code."""
    command = ["forked", str(ranks), "-m", "tests.gear.doctor_ranks", fault, str(folder), *options]
    (told := folder / "supervisor").mkdir()
    finished = execute(command, timeout=TEST_SECONDS, **{SUPERVISOR: str(told)})
    assert "Traceback" not in finished.stderr, finished.output
    assert not finished.code or (told / "exit_code").read_text() == str(finished.code)
    return finished.code, answer_of(finished.stdout)["findings"]


def test_what_is_wrong_with_a_rank_is_named(tmp_path):
    """A slow rank with another DeepSpeed, another variable, a wrong clock, and a folder that it alone sees."""
    code, findings = examine_with("sick", tmp_path)
    assert code == 2
    of_rank = [each for each in findings if each["where"].startswith("rank 1 ")]
    named = {(each["check"], each["verdict"]): each for each in of_rank}
    assert {("slow rank", COSTS), ("clocks", COSTS), ("shared run folder", BREAKS)} <= set(named)
    differing = [each["message"] for each in by_check(findings, "ranks alike")]
    assert any(text.startswith("version of deepspeed is 9.9.9") for text in differing)
    assert any(text.startswith("variable NCCL_ALGO is Ring") for text in differing)
    assert "90.0 s ahead of rank 0" in named["clocks", COSTS]["message"]
    host = socket.gethostname()
    own = {each["check"]: (each["verdict"], each["where"]) for each in findings[:3]}
    assert own == {"NUMA": (FINE, ""), "disk": (FINE, host), "open files": (BREAKS, host)}


def test_a_rank_that_never_comes_is_named(tmp_path):
    code, findings = examine_with("absent", tmp_path)
    *_, arrival = findings
    assert code == 2 and arrival["verdict"] == BREAKS and "1 rank of 3 never came" in arrival["message"]
    assert arrival["where"] == "rank 2"


def test_a_rank_that_stops_is_named_while_the_others_wait(tmp_path):
    """Its process is stopped inside a step: what was found before is kept."""
    command = ["forked", "2", "-m", "tests.gear.doctor_ranks", "stopped", str(tmp_path)]
    finished = execute(command, timeout=TEST_SECONDS)
    findings = answer_of(finished.stdout)["findings"]
    assert by_check(findings, "pairs of ranks")[0]["verdict"] == FINE
    assert findings[-1]["verdict"] == BREAKS and "rank 1 on" in findings[-1]["message"]
    assert "stopped answering" in findings[-1]["message"]


def test_a_collective_that_hangs_ends_by_its_limit(tmp_path):
    code, findings = examine_with("hanging", tmp_path)
    assert code == 2 and findings[-1]["check"] == "products and copies"
    assert findings[-1]["message"].startswith("hangs on rank 0 on ")


def test_a_rank_that_fails_is_the_cause_of_those_that_wait(tmp_path):
    code, findings = examine_with("failing", tmp_path)
    assert code == 2 and findings[-1]["where"].startswith("rank 1 on ")
    assert "ZeroDivisionError" in findings[-1]["message"] and "; rank 0 on " in findings[-1]["message"]


def test_every_rank_that_fails_is_named(tmp_path):
    """And the rest is examined all the same."""
    code, findings = examine_with("broken", tmp_path)
    failed = by_check(findings, "products and copies")
    assert code == 2 and [each["where"].partition(" on ")[0] for each in failed] == ["rank 0", "rank 1"]
    assert all("ZeroDivisionError" in each["message"] for each in failed)


def test_a_full_disk_is_named(disk_of, tmp_path):
    """Room for the file of one rank, not for those of two."""
    disk = disk_of("24m")
    code, findings = examine_with("healthy", tmp_path, "--output_dir", str(disk / "run"))
    full = by_check(findings, "disk of all ranks")
    assert code == 2 and full[0]["where"].startswith("rank ") and "No space left" in full[0]["message"]
    assert not list(disk.iterdir()), "the full disk is left as it was"


def test_hosts_that_cannot_meet_are_named(tmp_path):
    """Three hosts with networks of their own: two of them cannot reach each other, and one has its own disk."""
    for name in ("run", "own"):
        (tmp_path / name).mkdir()
    with hosts(tmp_path, *NAMES) as made:
        if made is None:
            pytest.skip("may not make networks here")
        made.cut("beta", "gamma")
        code, findings = examine_with("apart", tmp_path, ranks=3)
    assert code == 2
    (apart,) = [each for each in by_check(findings, "pairs of ranks") if each["verdict"] != FINE]
    assert apart["verdict"] == BREAKS and apart["where"] == "rank 1 on beta, rank 2 on gamma"
    assert "firewall" in apart["remedy"] and "GLOO_SOCKET_IFNAME=eth0" in apart["remedy"]
    (folder,) = by_check(findings, "shared run folder")
    assert folder["verdict"] == BREAKS and folder["where"] == "rank 2 on gamma"
