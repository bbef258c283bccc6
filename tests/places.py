"""Paths in a checkout."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
FIXTURES = TESTS / "fixtures"
PROGRAMS = TESTS / "programs"
EXPERIMENTS = ROOT / "experiments"
RECORDED = EXPERIMENTS / "recorded"
# PYTHONPATH of processes that a test starts.
PYTHONPATH = os.pathsep.join(map(str, (ROOT, TESTS, PROGRAMS, EXPERIMENTS)))
