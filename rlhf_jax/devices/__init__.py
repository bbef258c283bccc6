"""Where arrays live: meshes, shardings, processes.

Meshes, placements and batches that do not fit the devices raise an InputError.
"""
