"""Where arrays live: meshes, shardings, processes.

Meshes, placements and batches that do not fit the devices are refused with an
InputError.
"""
