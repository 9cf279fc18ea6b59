"""Rows to judgement: figures with intervals, what is odd about them, comparisons and gates.

Answers "what do these rows say, and how sure is that?"; reads runs, and knows nothing of how they were made.
"""
