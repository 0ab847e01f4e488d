"""Say what transformers reads from keys of a published config.json that its class does not declare.

This is a separate program, which recipe/published.py starts. It reads {"section": keys, "own": the class's keys} on
stdin, and prints {"read": those of `own` that change by the other keys} or {"error": one line}.
"""

import json
import sys
from copy import deepcopy

from transformers import AutoConfig


def answered(section: dict, own: list[str]) -> dict:
    known = {key: value for key, value in section.items() if key in own}
    try:
        # a class changes what it is given
        whole, plain = (AutoConfig.for_model(**deepcopy(each)).to_dict() for each in (section, known))
    except Exception as error:  # each class of transformers has its own for what it cannot take
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return {"read": {key: whole[key] for key in own if key in whole and whole[key] != plain.get(key)}}


if __name__ == "__main__":
    print(json.dumps(answered(**json.load(sys.stdin))))
