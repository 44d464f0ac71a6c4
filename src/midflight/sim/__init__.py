"""What a schedule would give on hardware that is not there: formulas, a simulator on a virtual clock, a planner.

Times are in any one unit: seconds if they were measured, flashes in the PipelineRL paper (what a forward and backward
pass or a decode takes per token if arithmetic were all there is to it). Rates are tokens per that unit, lags optimizer
steps, lengths response tokens.

    paper   here                              paper   here
    N       num_gpus                          G       steps_per_rl_step
    I       num_engines (that generate)       L       lengths.max
    H       num_in_flight, per engine         U(h)    rate of one engine with h sequences in flight
    B       batch_size                        tau     train_time_per_token, of one GPU
"""
