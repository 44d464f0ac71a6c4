"""The embedded generation engine. Token ids in, token ids out; it knows nothing of text, HTTP or RL.

engine.py       step(): adopt new weights -> schedule -> run -> sample -> record
scheduler.py    who computes what next: admission, chunked prefill, pages, preemption
pages.py        which sequence holds which page; prefixes that can be used again
running_batch.py  which sequence is in which slot
plan.py         what one step computes, as the scheduler says it and as the model reads it
cache.py        the tensors of the paged KV cache
model.py        what the engine needs of a model
decoder.py      Llama, Qwen2 and Qwen3 over fused weights
linear.py       weight matrices in the layout that is fast
hf_module.py    every other Hugging Face causal LM, as its own module
loading.py      which of the two
weight_sets.py  the two sets of weights an update swaps
graphs.py       CUDA graphs of decode steps
kernels/        attention, norms and sampling: plain PyTorch, C for CPUs, Triton for CUDA
sampler.py      inverse-CDF sampling and its truncations
randomness.py   the random numbers of a rollout: a function of (seed, rollout id, position)
"""
