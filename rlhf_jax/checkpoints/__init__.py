"""Models from and to disk, in the layouts of Hugging Face and PEFT."""
