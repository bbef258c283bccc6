"""Models from and to disk, in the layouts of Hugging Face and PEFT.

A folder or a file that is missing, damaged or of another model is refused with an
InputError that names it; nothing is written then.
"""
