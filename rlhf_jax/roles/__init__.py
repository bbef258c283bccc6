"""Forward passes of the four models: policy, critic, reference, reward."""
