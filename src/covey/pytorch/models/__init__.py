"""Models: reading, quantising, adapters, and what shape they have."""
