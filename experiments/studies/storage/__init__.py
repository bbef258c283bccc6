"""Parts of `ablate_reference_storage`."""
