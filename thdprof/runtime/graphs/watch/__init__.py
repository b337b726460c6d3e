"""A watch against silent corruption: some replayed micro-batches are also run eagerly, and both must agree.

`graphs.verify: 1/N` of the plan turns it on. Of every N consecutive micro-batches one is verified, and at a run's start
those with number 0, 1, 2, 4, ... 64.

- **When.** A micro-batch's number among all calls of the module decides, so that ranks which communicate inside it
  choose the same ones (`watch`). They also agree that all of them replay it: one rank must not run an eager pass
  alone. Where they cannot agree (`Surroundings.agreed`), the module is not watched.
- **The twin.** Inputs, boundaries, random states and buffers are kept before the replay. The eager pass, the twin, runs
  forward and backward inside the replay's backward, between the replay of the backward graph and the hooks of
  parameters (`twin`). So its activations exist for that moment only, and no compared gradient has been reduced yet. It
  is padded as the graph is, so that it runs the same kernels. It quantizes weights for itself, so that stale ones show.
- **Parameters' gradients.** The twin runs on fresh parameters over the same memory, as a capture does, and adds to
  scratch memory. The scratch of a compared parameter begins with what its gradient was before the replay. Gradients are
  large: a sample of the parameters is compared, and the next one begins where it ended; of outputs and input gradients,
  all.
- **State.** Random states, buffers, the experts' auxiliary losses and the amax histories of FP8 are set to those before
  the replay for the twin, and back afterwards. What the replay made of them is compared, too, and so is where the
  generators stand: a generator that a graph does not advance is found by this alone. What one side has and the other
  lacks counts as zeros.
- **A suspicion, and more runs.** Where the comparison looks wrong, the micro-batch runs again at once, up to 15 times
  eagerly and 15 times by its graphs, with everything as it was before (`findings`). Gradients are then put back bit for
  bit, from copies on the GPU or, where it is full, on the host. Ranks that communicate inside the module make these
  runs together, as many as one of them needs.
- **Wrong** is what eager runs repeat bit for bit and every replay makes otherwise: outputs, state. Gradients are added
  up in no fixed order, and eager runs differ. A gradient is wrong where it lies further from the eager one than four
  rounding errors, and four times further than any other eager run does; or where each replay is the same multiple of
  it, such as 1.2 times or none of it. A replay that is right the next time is wrong by the first of these rules alone.
  Where torch runs deterministic algorithms, a bit is enough.
- **Pieces.** Between the graphs of a few layers, hooks may reduce gradients in place while the backward goes on. The
  compared gradients that a piece has completed are copied before its hooks. While reductions go on over streams of
  their own, nothing is replayed again, and only what lies far enough from all eager runs is wrong.
- **Mismatch.** It is logged with its numbers, counted in `Stats.mismatches`, and the bucket is in quarantine on all
  ranks: its micro-batches run eagerly, with FallbackReason `quarantined`, until graphs are captured anew. Suspicions
  that were not confirmed are counted in `Stats.suspicions`, and have no other effect.
- **Not found** is what both sides read in the same way, such as a scaling factor of FP8 whose update was left out.
- **Single layers.** Each layer is a part of the micro-batch with a twin of its own (`Finding`), which runs inside that
  layer's backward, before autograd hands its gradients on. The captured part of the layer is compared, from the
  replay's input on. The states of FP8 that a backward writes are not: Transformer Engine updates those of all layers at
  the end of the first one's backward.
- **Not verified** are passes without gradients or backward, dynamic context parallelism, graphs that Megatron replays
  (`graphs.impl` local), and graphs of single layers that move activations to the host or overlap the exchange of
  tokens with other micro-batches.

A verified micro-batch costs one more eager pass and the copies of what is compared. `analyze` derives N (see
`thdprof.analyze.planning.find_verify_interval`). Where there is no memory for the eager pass, the micro-batch is not
verified. Where the twin fails, the watch ends with a warning and training goes on, unless other ranks were in
communication with the twin.
"""
