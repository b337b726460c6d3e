"""A TransformerConfig, and the lines with which `install` refuses it; for tests on a CPU."""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig

from thdprof.runtime.megatron import refusals


def config(**changes) -> TransformerConfig:
    values = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "apply_rope_fusion": False, **changes}
    made = TransformerConfig(**{k: v for k, v in values.items() if k != "apply_rope_fusion"})
    made.apply_rope_fusion = changes.get("apply_rope_fusion", True)  # whose own check wants Transformer Engine
    return made


FACTS = refusals.Facts(num_chunks=1)


def complaints(plan, changes=None, facts=FACTS, environment=None) -> list[str]:
    made = config()
    for name, value in (changes or {}).items():
        setattr(made, name, value)
    try:
        refusals.check(made, plan, facts, environment or {})
    except refusals.SettingsError as error:
        first, *lines = str(error).splitlines()
        assert first == "thdprof cannot install graphs:"
        return lines
    return []
