"""The files of launch/ that other programs read: valid by the schemas of those programs, their commands executed."""

import importlib.util
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from tests.gear.runs import REPOSITORY, completed, execute

JOBSET = REPOSITORY / "launch" / "kubernetes" / "jobset.yaml"
SKYPILOT = REPOSITORY / "launch" / "skypilot.yaml"
SKYPILOT_PYTHON = os.environ.get("PRETRAINING_SKYPILOT", sys.executable)
READ_TASK = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
resources = [each.to_yaml_config() for each in task.resources]
print(json.dumps({"run": task.run, "nodes": task.num_nodes, "resources": resources}))
"""


@pytest.fixture(scope="module")
def jobset() -> dict:
    return next(each for each in kubernetes_objects() if each["kind"] == "JobSet")


def kubernetes_objects() -> list[dict]:
    return list(yaml.safe_load_all(JOBSET.read_text()))


def test_kubernetes_objects_are_valid(jobset):
    """By Kubernetes' own schema, no unknown key; the JobSet by the models that its project publishes."""
    missing = "not installed (requirements-dev.txt)"
    validator = pytest.importorskip("kubernetes_validate", reason=f"kubernetes-validate is {missing}")
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=f"kubeflow-trainer-api is {missing}")
    job = jobset["spec"]["replicatedJobs"][0]["template"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, **job}
    for each in (job, *(each for each in kubernetes_objects() if each["kind"] != "JobSet")):
        validator.validate(each, validator.latest_version(), strict=True)
    read = models.JobsetV1alpha2JobSet.from_dict(jobset)
    # what its models do not know, they leave out
    assert json.loads(read.to_json()) == jobset


def test_pods_of_kubernetes_have_what_a_run_needs(jobset):
    """As many nodes everywhere, shared memory, time for a save, the store's credentials by a secret."""
    (budget,) = (each for each in kubernetes_objects() if each["kind"] == "PodDisruptionBudget")
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    nodes = {job["parallelism"], job["completions"], budget["spec"]["minAvailable"]}
    assert nodes == {int(variables["NODES"])}
    assert budget["spec"]["selector"]["matchLabels"] == job["template"]["metadata"]["labels"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == variables["GPUS"]
    volumes = {each["name"]: each["emptyDir"] for each in pod["volumes"]}
    mounted = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
    assert mounted["/dev/shm"]["medium"] == "Memory" and Path(variables["RUN"]).parent == Path("/runs")
    assert container["envFrom"] == [{"secretRef": {"name": "object-store"}}]
    assert not [name for name in variables if re.search("KEY|TOKEN|SECRET", name)]
    network = jobset["spec"]["network"]
    first = f"{jobset['metadata']['name']}-node-0-0.{network['subdomain']}"
    assert f"--master_addr={first} " in container["args"][0]


STEPS_OF_SLURM = {
    "by the user": ("a stop file", "", False),
    "at the job's end": ("a stop file", "kill -USR1 $PPID; sleep 1", True),
    "at the run's own limit": ("the time limit of 1 hours", "", True),
}


@pytest.mark.parametrize("reason, before, again", STEPS_OF_SLURM.values(), ids=STEPS_OF_SLURM)
def test_a_job_of_slurm_is_queued_again_unless_the_user_stopped_it(tmp_path, reason, before, again):
    """The script itself, with a SLURM whose step only stops: who wrote the stop file decides."""
    run, row = tmp_path / "run", json.dumps({"event": "stopped", "step": 8, "reason": reason})
    run.mkdir()
    scripts = {
        "scontrol": f"echo $* >> {tmp_path}/calls",
        "srun": f"{before}\necho '{row}' >> {run}/events.jsonl\nexit 75",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "47", "SLURM_JOB_NODELIST": "here", "SLURM_NNODES": "1", "SLURM_CPUS_ON_NODE": "1"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    finished = execute(["bash", str(REPOSITORY / "launch" / "slurm.sh")], PATH=path, RUN=str(run), **job)
    assert finished.code == 75, finished.output
    assert ("requeue 47" in (tmp_path / "calls").read_text()) == again


def test_the_hook_before_a_pod_stops_leaves_a_stop_file(jobset, tmp_path):
    """Executed; it then waits, less long than Kubernetes does, for the ranks to save."""
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    waited = int(re.search(r"sleep (\d+)", command[-1])[1])
    assert 60 < waited < pod["terminationGracePeriodSeconds"]
    finished = execute([*command[:-1], command[-1].replace(str(waited), "0")], RUN=str(tmp_path / "run"))
    assert finished.code == 0 and (tmp_path / "run" / "STOP").exists()


def test_the_command_of_kubernetes_is_one_that_train_reads(jobset, tmp_path):
    container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    variables = {each["name"]: each["value"] for each in container["env"]} | {"JOB_COMPLETION_INDEX": "1"}
    check_command([*container["command"], *container["args"]], variables, tmp_path, "s3://my-bucket/runs")


def test_skypilot_reads_its_file(tmp_path):
    """By its own package; what it would run is a command that train.py reads."""
    if sys.executable == SKYPILOT_PYTHON and importlib.util.find_spec("sky") is None:
        pytest.skip("SkyPilot is not installed (requirements-skypilot.txt)")
    words = [SKYPILOT_PYTHON, "-c", READ_TASK, str(SKYPILOT)]
    finished = completed(words, HOME=str(tmp_path), PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    task = json.loads(finished.stdout.splitlines()[-1])
    assert task["nodes"] == 2 and all(each["use_spot"] for each in task["resources"])
    assert {each["job_recovery"]["strategy"] for each in task["resources"]} == {"EAGER_NEXT_REGION"}
    assert task["run"].strip() == yaml.safe_load(SKYPILOT.read_text())["run"].strip()


def test_the_command_of_skypilot_is_one_that_train_reads(tmp_path):
    """With the variables that SkyPilot sets on each node; what it installs are files of this repository."""
    task = yaml.safe_load(SKYPILOT.read_text())
    for name in re.findall(r"-r (\S+)", task["setup"]):
        assert (REPOSITORY / name).exists()
    variables = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    variables |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", **task["envs"]}
    check_command(["bash", "-c", task["run"]], variables, tmp_path, "s3://my-bucket/runs")


def check_command(command: list[str], variables: dict[str, str], folder: Path, upload: str) -> None:
    """Execute what a node runs: torchrun's words are read by torchrun's parser, those of train.py by its plan."""
    from torch.distributed.run import get_args_parser

    torchrun = folder / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {shlex.quote(str(folder))}/words\n')
    torchrun.chmod(0o755)
    command = [word.replace("torchrun ", f"{torchrun} ") for word in command]
    completed(command, **variables)
    read = get_args_parser().parse_args((folder / "words").read_text().splitlines())
    found = (read.nnodes, read.node_rank, read.nproc_per_node, read.module, read.training_script)
    assert found == ("2", 1, "8", True, "pretraining.train")
    assert read.master_addr and read.master_port
    plan = ["--plan", "--world_size", "16", "--json"]
    completed(["python", "-m", read.training_script, *read.training_script_args, *plan])
    assert f"checkpoints.upload={upload}" in read.training_script_args
