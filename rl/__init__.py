"""Training: tasks, data, engines, schedule, losses, trainer, evaluation, run log."""
