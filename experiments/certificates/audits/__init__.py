"""Audits of the KL penalties of other libraries."""
