"""Costs of a decoder that its caller built: `python tests/gpu/calibration_cases.py later_stage`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
from support.own_loop import VOCABULARY, config_of, process_groups, wrapped

from thdprof.runtime.calibrate import Grid
from thdprof.runtime.megatron import measure_decoder

TOKENS = 1024


def later_stage():
    """The layers of a later pipeline stage, which get their input from the stage before, cost what the first's do."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    grid = Grid(n_tokens=TOKENS, n_seqs=[1, 8], max_seqs=[16], max_seqlen=[TOKENS])
    tables = {}
    with process_groups():
        config = config_of(num_layers=4)
        for name, first in (("first", True), ("later", False)):
            model = GPTModel(
                config=config,
                transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(),
                vocab_size=VOCABULARY,
                max_sequence_length=TOKENS,
                position_embedding_type="rope",
                pre_process=first,
                post_process=False,
            )
            tables[name] = measure_decoder(wrapped(model, config), config, grid, name=name)
            if not first:
                assert model.decoder.input_tensor is None
                gradients = [float(p.main_grad.abs().max()) for p in model.decoder.parameters()]
                assert all(one > 0 for one in gradients), gradients  # of every layer: the input came to them
    for kind in ("eager", "replay"):
        ours, theirs = (tables[name][kind][-1]["ms"] for name in ("later", "first"))
        print(kind, ours, theirs)
        assert ours == pytest.approx(theirs, rel=0.35)
    assert tables["later"]["replay"][0]["ms"] < tables["later"]["eager"][0]["ms"]


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("ok")
