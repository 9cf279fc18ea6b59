"""Races methods under a user's loads, and recommends which to serve with: rules, candidates, rounds, words."""
