"""Bounded, ordered streams between two stages: in memory, in a SQLite file, or in Redis.

Retention and backpressure are independent:

- *Retention*: a record stays until `trim` removes it, however often it was read. A reader restarted from a checkpoint
  reads the same records again.
- *Backpressure*: `capacity` bounds the number of records that wait for the reader. A read from offset `k` acknowledges
  every record before `k`. The largest such `k` is the read position, and `append` waits while the records from there on
  fill the capacity. A restarted reader that reads from an earlier offset does not move the read position back.
"""
