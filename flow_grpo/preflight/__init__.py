"""What is checked and counted before a run: doctor, dry run, planner."""
