"""The embedded generation engine. Input and output are token ids; the engine knows nothing about text, HTTP or RL.

engine.py         step(): adopt new weights -> schedule -> run -> sample -> record
scheduler.py      plans each step: admission, chunked prefill, page allocation, preemption
pages.py          page allocator and prefix cache
running_batch.py  the running sequence of each slot
plan.py           the tokens of one step: StepPlan (NumPy, from the scheduler) and Batch (tensors, for the model)
cache.py          the tensors of the paged KV cache
model.py          the EngineModel protocol
decoder.py        Llama, Mistral, Qwen2 and Qwen3 over fused weights
linear.py         weight matrices in the layout that is fastest for few tokens
hf_module.py      any other Hugging Face causal LM, as its own module
loading.py        the choice between decoder.py and hf_module.py
weight_sets.py    the two sets of weights that an update swaps
graphs.py         CUDA graphs of decode steps
kernels/          attention, norms and sampling: plain PyTorch, C for CPUs, Triton for CUDA
sampler.py        inverse-CDF sampling; top-k, top-p and min-p truncation
randomness.py     the random numbers of a rollout: a function of (seed, rollout id, position)
"""
