"""From prompts to scored groups to a training batch. Knows no backend, only a `Generator` and arrays."""
