"""What tests share: each module stands in for one thing, or makes inputs of one kind."""
