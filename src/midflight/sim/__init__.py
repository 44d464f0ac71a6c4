"""Predict a schedule's speed and lag on hardware you do not have: formulas, a simulator on a virtual clock, a planner.

All times share one unit: seconds if they were measured, flashes in the PipelineRL paper. A flash is the time of one
token's forward pass at the peak arithmetic rate of a GPU. Rates are tokens per unit of time, lags are in optimizer
steps, lengths in response tokens.

    paper   here                              paper   here
    N       num_gpus                          G       steps_per_rl_step
    I       num_engines (for generation)       L       lengths.max
    H       num_in_flight, per engine         U(h)    rate of one engine with h sequences in flight
    B       batch_size                        tau     train_time_per_token, on one GPU
"""
