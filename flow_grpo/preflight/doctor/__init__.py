"""Checks of a run before it is paid for, through the code of training: machine, schedule, samples, update, rewards."""
