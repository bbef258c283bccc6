"""Verifiers that fail in every way, for processes to import."""

import gc
import os
import sys
import time
from pathlib import Path

import numpy as np


class Secretive(Exception):
    """An exception whose text cannot be read."""

    def __str__(self):
        raise self


def check(prompt, response, row):
    """Returns the response's number, or does what the response commands."""
    match response:
        case "raise":
            raise KeyError("gold")
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(3)
        case "die quietly":
            os._exit(0)
        case "hang":
            time.sleep(1000)
        case "spin":
            while True:
                pass
        case "text":
            return "good"
        case "nothing":
            return None
        case "several":
            return np.zeros(2)
        case "huge":
            return 10**400
        case "large":
            return 1e39
        case "secretive":
            raise Secretive
        case "made":
            try:
                Path(row["made"]).touch()
                time.sleep(1000)
            finally:
                Path(row["made"]).unlink()
        case "collect":
            made = Path(row["made"])

            def callback(phase, info):
                gc.callbacks.remove(callback)
                made.touch()
                time.sleep(1000)

            gc.callbacks.append(callback)
            try:
                gc.collect()
                time.sleep(1000)
            finally:
                made.unlink()
        case "wait":
            while not Path(row["until"]).exists():
                time.sleep(0.01)
            return 1.0
        case "loaded":
            return float("jax" in sys.modules)
        case "row":
            return row["score"]
    return float(response)
