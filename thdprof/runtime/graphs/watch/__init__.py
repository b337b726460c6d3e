"""A watch against silent corruption: some replayed micro-batches are also run eagerly, and both must agree.

`graphs.verify: 1/N` of the plan turns it on. Of every N consecutive micro-batches one is verified, and at a run's start
those with number 0, 1, 2, 4, ... 64.

- **When.** Which micro-batches are verified depends on their number alone, which counts every call of the module, so
  that ranks which communicate inside the module choose alike (`watch`). Those ranks also ask each other whether all
  of them replay the micro-batch: an eager pass communicates, and one rank must not make it alone. A module whose passes
  communicate is not watched unless its ranks can agree (`Surroundings.agreed`).
- **The twin.** The replay's inputs, boundaries, random states and buffers are kept at its forward. The eager pass, the
  twin, runs forward and backward inside the replay's backward, on the same output gradients, between the replay of the
  backward graph and the hooks of parameters (`twin`). So its activations exist for that moment only, and the gradients
  that are compared have not been reduced or moved yet. Parameters do not change between the two forwards, since the
  optimizer's step comes after all backwards. The twin is padded as the graph is, so that it runs the same kernels, with
  boundaries of its own. It quantizes weights for itself, so that stale ones show.
- **Parameters' gradients.** The twin runs on fresh parameters over the same memory, as a capture does. Hooks of the
  real ones (gradient reduction, fused accumulation into `main_grad`) do not see it; kernels that write to `main_grad`
  write to scratch memory. The scratch of a compared parameter begins with what its gradient was before the replay, and
  is compared with what it is after the replay: the same additions to the same numbers. Gradients are large: a sample of
  the parameters is compared, and the next one begins where it ended; of outputs and input gradients, all.
- **State.** Random states, also Megatron's, are set to those before the replay for the twin, and afterwards to what
  they were. Where the generators stand after the twin's forward must be where they stood after the replay's: a
  generator that a graph does not advance is found by this alone. Buffers, the experts' auxiliary losses and the amax
  histories of FP8 are set back likewise. What the replay made of them is compared, too. What one side has and the other
  lacks counts as zeros.
- **A suspicion, and more runs.** The host waits for the comparison of a verified micro-batch. Where it looks wrong, the
  micro-batch runs again at once, up to 15 times eagerly and 15 times by its graphs, with everything as it was before
  (`findings`). Nothing is said or refused before that. Gradients are then put back bit for bit, from
  copies on the GPU or, where it is full, on the host. Ranks that communicate inside the module make these runs
  together, as many as one of them needs.
- **Wrong** is what eager runs repeat bit for bit and every replay makes otherwise: outputs, state. Gradients are added
  up in no fixed order, and eager runs differ. A gradient is wrong where it lies further from the eager one than four
  rounding errors, and four times further than any other eager run does; or where each replay is the same multiple of
  it, such as 1.2 times or none of it. A replay that is right the next time, because its memory was overwritten once,
  say, is wrong by the first of these rules alone. Where torch runs deterministic algorithms, a bit is enough.
- **Pieces.** Between the graphs of a few layers the hooks of parameters run, and may reduce gradients in place while
  the backward goes on. The compared gradients that a piece has completed are therefore copied before its hooks. The
  twin still comes last, after the backward of all pieces. While reductions go on over streams of their own (in the last
  micro-batch of a step), graphs must not write to the gradients: nothing is replayed again, and only what lies far
  enough from all eager runs is wrong.
- **Mismatch.** It is logged with its numbers, counted in `Stats.mismatches`, and the bucket is in quarantine on all
  ranks: its micro-batches run eagerly from there on, with FallbackReason `quarantined`, until graphs are captured anew.
  Suspicions that were not confirmed are counted in `Stats.suspicions`, and have no other effect.
- **Not found** is what both sides read in the same way, such as a scaling factor of FP8 whose update was left out.
- **Single layers.** Gradients of such graphs reach the parameters through autograd. Each layer is a part of the
  micro-batch with a twin of its own (`Parts`), which runs inside that layer's backward, before autograd hands its
  gradients on. The part of the layer that is captured is compared, from the replay's input on; what runs eagerly
  between two graphs is not. What is found of all layers is one finding. The states of FP8 that a backward writes are
  not compared: Transformer Engine updates those of all layers at the end of the first one's backward.
- **Not verified** are passes without gradients or backward, dynamic context parallelism, graphs that Megatron replays
  (`graphs.impl` local), and graphs of single layers that move activations to the host or overlap the exchange of
  tokens with other micro-batches.

A verified micro-batch costs one more eager pass and the copies of what is compared; a suspicion up to 15 passes and
replays. Others cost nothing but a few comparisons of integers on the host. `analyze` derives N (see
`thdprof.analyze.planning.verified_every`). Where there is no memory for an eager micro-batch beside the graphs, the
micro-batch is not verified. Where the twin fails for want of memory, the watch ends with a warning; training goes on,
unless other ranks were in communication with the twin.
"""
