"""What all policy gradients share: the recipe, the iteration, the loss, the update."""
