"""What do the rows say, and how sure is that? Figures, intervals, findings, changes and the gate.

It reads finished runs, and knows nothing of how they were made.
"""
