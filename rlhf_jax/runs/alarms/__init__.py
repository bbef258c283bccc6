"""Alarms: what in a run's metrics asks for a look, and one line of advice on it."""

from rlhf_jax.runs.alarms.rules import (
    ADVICE,
    LIMITS,
    Alarm,
    Check,
    Limits,
    Watch,
    begun,
    check,
)

__all__ = ["ADVICE", "LIMITS", "Alarm", "Check", "Limits", "Watch", "begun", "check"]
