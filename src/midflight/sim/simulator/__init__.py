"""A run on a virtual clock: the real schedules and ledger, with engines and a trainer that only take time."""
