"""All of RLHF in a minute or two, with commands that users can type themselves."""
