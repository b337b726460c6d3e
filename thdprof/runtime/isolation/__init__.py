"""A proof that documents of a packed micro-batch stay apart in a module: one is perturbed, the others are watched."""
