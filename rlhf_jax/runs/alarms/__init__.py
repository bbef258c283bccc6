"""Alarms: what in a run's metrics asks for a look, and one line of advice on it."""

from rlhf_jax.runs.alarms.limits import ADVICE, LIMITS, Limits
from rlhf_jax.runs.alarms.rules import check
from rlhf_jax.runs.alarms.watch import Alarm, Check, Watch, begun

__all__ = ["ADVICE", "LIMITS", "Alarm", "Check", "Limits", "Watch", "begun", "check"]
