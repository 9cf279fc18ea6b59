"""Prompts, and scoring of answers.

The only package that runs code written by a model, in a sandbox.
"""
