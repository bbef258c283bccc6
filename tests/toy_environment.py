"""An environment that fails in every way, for processes to import."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from rlhf_jax.environments.protocol import CountedTurn, Started, Turn


class Secretive(Exception):
    """An exception whose text cannot be read."""

    def __str__(self):
        raise self


class Loud(str):
    """A subclass of str."""


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not this one")


def user(text):
    return {"role": "user", "content": text}


class Toy:
    """Counts its turns; each response is a command."""

    def reset(self, row):
        match row.get("reset"):
            case "raise":
                raise KeyError("gold")
            case "die":
                os._exit(3)
            case "hang":
                time.sleep(1000)
            case "nothing":
                return None
            case "assistant":
                return Started([user("Hi"), {"role": "assistant", "content": "a"}], 0)
            case "empty":
                return Started([], 0)
            case "bytes":
                return Started(b"Hi", 0)
        return Started(row.get("prompt", "Go: "), int(row.get("count", 0)))

    def step(self, state, response):
        count = state + 1
        word, _, rest = response.partition(" ")
        match word:
            case "raise":
                raise KeyError("gold")
            case "exit":
                sys.exit(3)
            case "die":
                os._exit(3)
            case "hang":
                time.sleep(1000)
            case "spin":
                while True:
                    pass
            case "pid":
                return Turn(str(os.getpid()), 0.0, False, count)
            case "secretive":
                raise Secretive
            case "made":
                try:
                    Path(rest).touch()
                    time.sleep(1000)
                finally:
                    Path(rest).unlink()
            case "nothing":
                return None
            case "tuple":
                return ("seen", 0.0, False, count)
            case "reward":
                values = {"nan": float("nan"), "text": "1", "large": 1e39, "none": None}
                return Turn("seen", values[rest], False, count)
            case "done":
                return Turn("", float(rest or 0), np.bool_(True), Unpicklable())
            case "undecided":
                return Turn("", 0.0, 1, count)
            case "long":
                return Turn("x" * 10_000_000, 0.0, False, count)
            case "bytes":
                return Turn(b"seen\xff", 0.0, False, count)
            case "surrogate":
                text = b"seen\xff".decode("utf-8", "surrogateescape")
                return Turn(text, 0.0, False, count)
            case "number":
                return Turn(7, 0.0, False, count)
            case "loud":
                return Turn(Loud("seen"), np.float32(0.5), False, count)
            case "unpicklable":
                return Turn("seen", 0.0, False, Unpicklable())
            case "heavy":
                return Turn("seen", 0.0, False, bytes(2**25))
            case "messages":
                return Turn([user("one"), user(f"two {count}")], 0.0, False, count)
            case "spoken":
                answer = [user("one"), {"role": "assistant", "content": "mine"}]
                return Turn(answer, 0.0, False, count)
            case "silent":
                return Turn([], 0.0, False, count)
            case "typed":
                return Turn([{"role": "user", "content": 7}], 0.0, False, count)
            case "bare":
                return Turn(["seen"], 0.0, False, count)
            case "many":
                return Turn([user("x" * 60_000)] * 2, 0.0, False, count)
            case "more":
                return Turn([user("x")] * 1_000, 0.0, False, count)
            case "control":
                return Turn("<|im_end|>\n<|im_start|>", 0.0, False, count)
            case "loaded":
                return Turn(str("jax" in sys.modules), 0.0, False, count)
        return Turn(f"{count} {response}", count / 4, False, count)


class Counts(Toy):
    """The response is the JSON of the counts."""

    counts = ("calls", "errors")

    def step(self, state, response):
        return CountedTurn("", 1.0, True, None, counts=json.loads(response))
