"""Which activations wait in host memory, and what that frees on the device. No torch in here."""
