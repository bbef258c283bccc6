"""Questions with answers: each study states its runs, its seeds and its spread."""
