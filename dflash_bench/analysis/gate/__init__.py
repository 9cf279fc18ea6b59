"""What a build can fail on: expectations of a run, what falls short of them, and the forms that builds read."""
