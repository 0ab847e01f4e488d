"""A job on a real SLURM of two nodes, each with its name, address and network: a node is lost, the job is not."""

import os
from pathlib import Path

import pytest

from tests.gear.hosts import hosts
from tests.gear.runs import SMALL_RECIPE, Run, Workshop, committed, completed
from tests.gear.slurm_cluster import cluster, installed

DOCTOR = "-m pretraining.doctor"
SEED = SMALL_RECIPE["training"]["seed"]


def words_of_a_node(folder: Path, job: int, **variables: str) -> list[str]:
    """What `torchrun` is given on a node, by the script itself; SLURM's programs and Python are left out."""
    programs = {"scontrol": "echo node1", "srun": 'shift 2; exec "$@"', "python": 'printf "%s\\n" "$@"'}
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    own = {"SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}
    own |= {"SLURM_CPUS_ON_NODE": "8", "SLURMD_NODENAME": "node1", "RUN": str(folder / "run"), **variables}
    command = ["bash", "-c", f"PATH={folder}:$PATH exec bash launch/slurm.sh --recipe tiny"]
    finished = completed(command, **own)
    return finished.stdout.splitlines()


def test_a_job_that_is_queued_again_meets_anew(tmp_path):
    """Each start of a job has an id of its own, and each job a port, which is not DeepSpeed's or torch's default."""

    def met(job: int, **variables: str) -> tuple[str, str]:
        words, names = words_of_a_node(tmp_path, job, **variables), ("--rdzv_id=", "--rdzv_endpoint=")
        return tuple(next(word for word in words if word.startswith(name)) for name in names)

    (first, place), (again, same) = met(4711), met(4711, SLURM_RESTART_COUNT="2")
    assert (first, again) == ("--rdzv_id=4711-0", "--rdzv_id=4711-2") and place == same
    ports = {int(met(job)[1].rpartition(":")[2]) for job in (9499, 9500, 18_499, 4711)}
    assert len(ports) == 3 and all(20_000 <= port < 29_000 for port in ports)
    assert met(4711, PORT="3000")[1] == "--rdzv_endpoint=node1:3000"


def test_a_job_trains_or_has_the_doctor_examine_its_nodes(tmp_path):
    """The same launcher, ports and nodes: what the doctor finds is what the run will meet."""
    rest = ["--recipe", "tiny", "--output_dir", str(tmp_path / "run")]
    for variables, program in (({}, ["-m", "pretraining.train"]), ({"PROGRAM": DOCTOR}, DOCTOR.split())):
        words = words_of_a_node(tmp_path, 4711, **variables)
        assert words[-len(rest) - len(program) :] == [*program, *rest] and "torchrun" in words


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
            submitted = completed(slurm.words(*job, *options), **variables)
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
    kinds = [(event["event"], event["world_size"]) for event in starts]
    assert kinds == [("start", 2), ("resume", 2)], log[-6000:]
    assert run.losses == pytest.approx(reference.losses, abs=1e-6)
    assert run.events[-1]["event"] == "end" and starts[1]["step"] >= 4
