"""Whose forward pass it is: policy, critic, reference, reward."""
