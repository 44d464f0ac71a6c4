"""A run on a virtual clock: the product's schedules and ledger, engines and a trainer that only take time."""
