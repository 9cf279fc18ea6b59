"""What do the rows say, and how certain is it? Figures, intervals, findings, changes and the gate.

It reads finished runs and does not depend on how they were made.
"""
