"""What a build can fail on: what runs are expected to reach, and which of them fall short."""
