"""The synthetic language of the nano models: tasks made by rule, each with a worked answer.

Every family is a function from a random source to a `Task`; a task carries a row in the columns its suite has on
the hub, so the same code writes training text and the embedded samples that ship with the suites.
"""
