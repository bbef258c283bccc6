"""Reads and writes models in the layouts of Hugging Face and PEFT.

A folder or file that is missing, damaged or of another model raises an InputError that
names it, and nothing is written.
"""
