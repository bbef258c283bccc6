"""The effect of the KL penalty, and three failures without it."""
