"""A job on a real SLURM of two nodes, each with its name, address and network: a node is lost, the job is not."""

import os

import pytest

from tests.hosts import hosts
from tests.runs import SMALL_RECIPE, Run, Workshop, committed, execute
from tests.slurm_cluster import cluster, installed

SEED = SMALL_RECIPE["training"]["seed"]


@pytest.mark.skipif(
    not (installed() and os.environ.get("SLURM_TESTS")),
    reason="three minutes; SLURM_TESTS=1 runs it as root, after: apt-get install slurmctld slurmd slurm-client",
)
@pytest.mark.timeout(7200)
def test_a_lost_node_costs_the_job_no_step(workshop: Workshop, tmp_path):
    """`sbatch launch/slurm.sh`, an array of one seed: a node's plug is pulled, the job is queued again and finishes.

    Losses are those of an undisturbed run on one machine.
    """
    folder, reference = tmp_path / "runs" / "small", workshop.run("zero2")
    run = Run(folder.with_name(f"small-seed{SEED}"))
    with hosts(tmp_path, "head", "node1", "node2") as made:
        if made is None:
            pytest.skip("may not make networks here")
        with cluster(tmp_path / "slurm", made) as slurm:
            job = ["sbatch", "--parsable", "--nodes=2", "--gpus-per-node=1", f"--array={SEED}"]
            job += ["--output", str(tmp_path / "job.log"), "launch/slurm.sh"]
            options = workshop.options("--set", "training.save_steps=2")
            # one rank on each node: torchrun would let it compute in several threads, which add up in another order
            variables = {**slurm.variables, "RUN": str(folder), "OMP_NUM_THREADS": "1"}
            submitted = execute(slurm.words(*job, *options), **variables)
            assert submitted.code == 0, submitted.output
            slurm.wait(lambda: "checkpoint-4" in committed(run.folder), "no checkpoint", 0.005)
            made.pull_plug("node2")
            slurm.wait(lambda: "down" in slurm.output("sinfo", "-h", "-o", "%t"), "the node is not missed")
            queued = ("squeue", "-h", "-t", "PENDING")
            slurm.wait(lambda: slurm.output(*queued), "the job is not queued again")
            made.plug_in("node2")
            slurm.start_node("node2")
            slurm.output("scontrol", "update", f"JobId={submitted.stdout.strip()}", "StartTime=now")
            slurm.wait_for_jobs()
    log = (tmp_path / "job.log").read_text()
    starts = [event for event in run.events if event["event"] in ("start", "resume")]
    assert [(event["event"], event["world_size"]) for event in starts] == [("start", 2), ("resume", 2)], log[
        -6000:
    ]
    assert run.losses == pytest.approx(reference.losses, abs=1e-6)
    assert run.events[-1]["event"] == "end" and starts[1]["step"] >= 4
