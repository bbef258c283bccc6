"""Alarms: warnings about a run's metrics, each with a line of advice."""

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
