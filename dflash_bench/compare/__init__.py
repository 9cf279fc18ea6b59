"""Methods against each other within a run, runs against each other, and a run against what others print."""
