"""What every room may know: types, methods, files, what the terminal may show, the machine. No torch."""
