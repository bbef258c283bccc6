"""Certificates of corrections for tokens that another policy drew."""
