"""A sweep as a paper takes it: tables, figures, a methods paragraph, BibTeX."""
