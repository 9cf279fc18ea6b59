"""Analysis of finished runs: metrics, intervals, findings, comparisons and the gate."""
