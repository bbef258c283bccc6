"""Policy gradients as commands: one file each."""
