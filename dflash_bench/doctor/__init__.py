"""Why is acceptance low? A draft is tried as it is, and then with one thing changed at a time."""
