"""A watch against silent corruption: some replayed micro-batches are also run eagerly, and both must agree.

`graphs.verify: 1/N` of the plan turns it on. Of every N consecutive micro-batches one is verified, and at a run's start
those with number 0, 1, 2, 4, ... 64. What is compared, where the numbers come from, and what the watch leaves alone:

- **When.** Which micro-batches are verified depends on their number alone, which counts every call of the module, so
  that ranks which communicate inside the module choose alike (`sampling`). Those ranks also ask each other whether all
  of them replay the micro-batch: an eager pass communicates, and one rank must not make it alone. A module whose passes
  communicate is not watched unless its ranks can agree (`Surroundings.agreed`).
- **The twin.** The replay's inputs, boundaries, random states and buffers are kept at its forward. The eager pass, the
  twin, runs forward and backward inside the replay's backward, on the same output gradients, between the replay of the
  backward graph and the hooks of parameters (`twin`). So its activations exist for that moment only, and the gradients
  that are compared have not been reduced or moved yet. Parameters do not change between the two forwards, since the
  optimizer's step comes after all backwards. The twin is padded as the graph is, so that it runs the same kernels, with
  boundaries of its own.
- **Parameters' gradients.** The twin runs on fresh parameters over the same memory, as a capture does. Hooks of the
  real ones (gradient reduction, fused accumulation into `main_grad`) do not see it; kernels that write to `main_grad`
  write to scratch memory. The scratch of a compared parameter begins with what its gradient was before the replay, and
  is compared with what it is after the replay: the same additions to the same numbers, so that the sums can be equal
  bit for bit, which differences of sums could not. Gradients are large: of the parameters a sample that moves on from
  one verified micro-batch to the next is compared; of outputs and input gradients, all.
- **Pieces.** Between the graphs of a few layers the hooks of parameters run, and may reduce gradients in place while
  the backward goes on. The compared gradients that a piece has completed are therefore copied before its hooks. The
  twin still comes last, after the backward of all pieces, and before the hooks of the piece that ends it, which holds
  the first layers. So replays, gathering and reductions keep the order that they have without a watch, and what goes
  wrong by that order is found, such as a reduction that begins before its gradient is complete. Reductions of the other
  pieces may go on while the twin runs; it reads nothing that they change. Hooks must leave the parameters themselves
  alone: one that steps the optimizer between the pieces would show as a mismatch.
- **State.** Random states, also Megatron's, are set to those before the replay for the twin, and afterwards to what
  they were. Where the generators stand after the twin's forward must be where they stood after the replay's: a
  generator that a graph does not advance is found by this alone. Buffers (experts' biases, tokens per expert) and the
  experts' auxiliary losses are set back likewise, so that nothing is counted twice; what the replay made of them is
  compared, too.
- **Equal.** Where torch runs deterministic algorithms, each value must be equal bit for bit. Elsewhere the twin runs
  twice, and a tensor's largest difference may be four times the largest of two eager runs, in this micro-batch or any
  verified before it, and one rounding of its largest value; small tensors may differ as much as any (`findings`). NaN
  equals NaN, and an infinity the same infinity, at the same place.
- **No waiting.** The differences are reduced on the GPU and copied to the host behind it; they are read at a later
  micro-batch (`readback`). A mismatch therefore takes effect some micro-batches later: at the next one whose turn comes
  after the copy, or, where ranks must agree, SETTLED_AFTER micro-batches after the verified one, where all of them ask
  each other.
- **Mismatch.** It is logged with its numbers, counted in `Stats.mismatches`, and the bucket is in quarantine: its
  micro-batches run eagerly from there on, with FallbackReason `quarantined`, until graphs are captured anew. Gradients
  of the micro-batches up to there are in the weights: go back to a checkpoint before the last verified micro-batch that
  agreed.
- **Not verified** are passes without gradients or backward, dynamic context parallelism, and graphs of single layers
  (`graphs.impl` local and transformer_engine). The gradients of those reach the parameters through autograd, layer by
  layer; in no one place is a layer's replayed backward over, and its hooks still to come.

A verified micro-batch costs one more eager pass, or two, when algorithms are not deterministic, and the copies of what
is compared; others cost nothing but a few comparisons of integers on the host. `analyze` derives N (see
`thdprof.analyze.planning.verified_every`). Where there is no memory for an eager micro-batch beside the graphs, the
micro-batch is not verified. Where the twin fails all the same, the watch ends with a warning; training goes on, unless
other ranks were in communication with the twin.
"""
