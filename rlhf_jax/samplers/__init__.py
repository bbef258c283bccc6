"""Samplers behind one protocol: our decoder, here or in a process, and servers."""
