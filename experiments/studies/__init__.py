"""Studies; each answers a question and states its runs, seeds and spread."""
