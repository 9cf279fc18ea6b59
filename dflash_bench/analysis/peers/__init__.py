"""Figures by others: what authors published, what their harness would have printed, and files of other benchmarks."""
