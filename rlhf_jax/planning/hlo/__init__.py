"""The text of optimised programs: parsing, matrix products and collectives."""
