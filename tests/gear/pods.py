"""A pod of the training task on several nodes, as Flyte's operator starts it.

`python -m tests.gear.pods META REQUEST DATA`, where META is where Flyte wants what the task shows, prints the folder of
the run on the first node, and nothing on the others.
"""

import sys

from flytekit.bin.entrypoint import setup_execution
from flytekit.core.context_manager import FlyteContextManager
from flytekit.extend import IgnoreOutputs
from flytekit.types.directory import FlyteDirectory

from flows import pretrain as flow


def main(meta: str, request: str, data: str) -> None:
    do = flow.do
    # what it says of a machine that plays two is another test's
    flow.do = lambda pipeline, name: do(pipeline, name) if name != "doctor" else []
    with setup_execution(f"{meta}/raw", meta) as context:
        # as the entry point of a pod does before it calls the task
        shown = context.user_space_params.with_enable_deck(enable_deck=True).build()
        state = context.execution_state.with_params(user_space_params=shown)
        with FlyteContextManager.with_context(context.with_execution_state(state)):
            given = {"request": request, "data": FlyteDirectory(data, remote_directory=False), "key": "k"}
            try:
                result = flow.train.execute(**given)
            except IgnoreOutputs:
                return
            print(f"run: {result.path}")
            flow.Deck.publish()


if __name__ == "__main__":
    main(*sys.argv[1:])
