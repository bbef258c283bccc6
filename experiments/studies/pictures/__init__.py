"""Parts of `kl_pictures`."""
