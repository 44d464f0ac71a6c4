"""Bounded, ordered streams between two stages: in memory, or in a SQLite file that survives any process.

Every stream keeps two things apart. *Retention*: a record stays until `trim` forgets it, however often it was read, so
that a reader restarted from a checkpoint sees the same records again. *Backpressure*: `capacity` bounds how many
records may be waiting for a reader. A reader that asks from offset `k` says by it that it has taken every record before
`k`; the furthest such `k` is the read position, and `append` waits while the records past it fill the capacity. A
restarted reader that asks from an earlier offset does not move the position back.
"""
