"""Speed and memory, beside peers and beside what the machine allows."""
