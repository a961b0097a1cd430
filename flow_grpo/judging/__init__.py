"""Did it learn: held-out evaluation, changes and their intervals, verdict, stop rules."""
