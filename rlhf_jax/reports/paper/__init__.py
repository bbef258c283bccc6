"""A sweep for a paper: tables, figures, a methods paragraph and BibTeX."""
