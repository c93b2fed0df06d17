"""The training loop and what it needs: schedule, evaluation, checkpoints."""
