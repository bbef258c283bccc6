"""Parts that other packages add to this one by entry points."""
