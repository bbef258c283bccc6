"""Where arrays live: meshes, shardings, processes."""
