"""`data_prep.py --executor ray`: a real Ray cluster on this machine gives the bytes of one process.

Its start and its workers, which import what a task needs, take more than ten seconds.
"""

import os

import pytest

from tests.data.test_preparation import command, corpus, prepared, recipe_that_kills  # noqa: F401  a fixture
from tests.gear.runs import bytes_of, execute

ray = pytest.importorskip("ray", reason="Ray is not installed (requirements-ray.txt)")


@pytest.fixture(scope="module")
def cluster():
    """A cluster that runs before data_prep.py and after it, as `ray start --head` leaves one."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is sent from here
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield nodes
    nodes.shutdown()


def test_a_ray_cluster_gives_the_same_bytes_though_a_worker_is_killed(corpus, cluster, tmp_path):  # noqa: F811
    """The killed worker's task alone is run again; what a task says of its input arrives as one line."""
    recipe = recipe_that_kills(corpus, tmp_path, times=1)
    options = ["--executor", "ray", "--json"]
    finished = execute(command(recipe, tmp_path / "ray", *options), RAY_ADDRESS=cluster.address)
    assert finished.code == 0 and not finished.strays, finished.output
    assert finished.stderr.count("was ended (WorkerCrashedError): the task is run again") == 1
    # its one death has happened
    alone = prepared(recipe, tmp_path / "alone", "--executor", "inline")
    assert alone == bytes_of(tmp_path / "ray" / "corpus")
