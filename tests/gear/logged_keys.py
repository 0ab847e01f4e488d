"""An extension that writes down which keys a callback of a user's own finds in `logs`."""

import json
from pathlib import Path

from transformers import TrainerCallback

from pretraining import extend


@extend.callback
class LoggedKeys(TrainerCallback):
    """Keep the keys of every call, and add a number without a group."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Append a line to logged_keys.jsonl of the run."""
        if state.is_world_process_zero:
            with Path(args.output_dir, "logged_keys.jsonl").open("a") as file:
                file.write(json.dumps(sorted(logs)) + "\n")
        logs["without_a_group"] = 1.0
