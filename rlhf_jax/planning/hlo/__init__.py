"""The text of optimised programs: its lines, and what one of them does."""
