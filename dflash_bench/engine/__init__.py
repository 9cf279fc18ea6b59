"""Decoding in this process: how tokens are drafted, verified and chosen.

One loop serves every method; plain decoding is the drafter that proposes nothing.
"""
