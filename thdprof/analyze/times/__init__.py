"""Times of the user's own model: measured, modelled from its shape, or none; the verdict on them, and their worth."""
