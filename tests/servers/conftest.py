"""For tests of servers alone."""

from helpers.servers import plainly

plainly.apply()
