"""Figures from elsewhere: what authors published, what their harness computes, and files of other benchmarks."""
