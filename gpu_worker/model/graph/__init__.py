"""A model's forward pass, captured as one graph of kernels and replayed on CPUs, as a CUDA graph is
on a GPU.

``replay_check`` is called at start: it has ``layer_capture`` put other modules in the place of the
model's layers, and keeps them if their replays have the bits of the layers. ``capture_pass`` is the
one pass in which kernels are captured, ``torch_capture`` handles torch's own operators in it, and
``captured_layers`` holds and replays the result. Where ``model_inputs_outputs`` finds that nothing
else is computed before and behind the layers, ``direct_pass`` replays a step from token ids to
logits, with ``position_tables`` for arguments that depend on positions.
"""
