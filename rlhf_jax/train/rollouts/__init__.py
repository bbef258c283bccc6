"""Rollouts that are drawn ahead of the step that learns from them: --max-staleness."""
