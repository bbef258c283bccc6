"""Who samples: our decoder on the devices of a trainer, or a program outside."""
