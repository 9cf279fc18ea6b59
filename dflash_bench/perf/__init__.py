"""Where would the time go? Times a backend's forwards and judges them by the machine's limits."""
