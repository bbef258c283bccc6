"""The parts that all policy gradients share: recipe, iteration, loss and update."""
